"""`StreamHooks`: every method that an author of a stream may override. Overridden hooks define the capabilities.

Public methods of `Stream` check their arguments before they call a hook; hooks may rely on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from opweave.contract.step import Call, Group, Step
from opweave.errors import raise_backend_failure

if TYPE_CHECKING:
    from opweave.contract.buffer import Buffer
    from opweave.contract.device import Device
    from opweave.contract.plan import Plan
    from opweave.contract.stream import Stream

__all__ = ["StreamHooks"]


class StreamHooks:
    """The optional methods of a stream with their defaults, which make it synchronous."""

    def __init__(self, device: Device) -> None:
        self.device: Final = device

    # --- preparing work ---------------------------------------------------------------------------------------------

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        """Group the steps of a split before memory is planned. Default: one group per step, with the workspace of its
        kernel.

        Returns the given steps in groups, in an order that keeps all reads and writes of each value (``Arg.value``) in
        sequence; `pointwise_groups` finds elementwise ones. A value that only its own group uses gets no memory: its
        args stay unbound.
        """
        return [Group((step,), self.device._workspace(step)) for step in steps]

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        """One call for each group, or fewer where the device compiles several groups into one call. A call may have an
        attribute ``remark``, a text that `Program.explain` shows."""
        calls = []
        for group in groups:
            try:
                calls.append(self._bind(group))
            except BaseException as error:
                raise_backend_failure(error, self.device.name, "preparing a kernel", group.describe())
        return calls

    def _compiled(self, plan: Plan) -> None:
        """Receive the plan made from the result of `_compile`. For streams that discover a failing step only later and
        then raise a `StepError` that names the plan. Keep no more than a weak reference."""

    def _bind(self, group: Group) -> Call:
        """The call for one group. Default: the kernel of its only step."""
        return self.device.kernels.bind(self, group)  # type: ignore[arg-type]  # every StreamHooks is a Stream

    # --- running ----------------------------------------------------------------------------------------------------

    def _run(self, calls: Iterator[Call]) -> None:
        """Make the calls of a plan in order. Override it for what has to hold during the calls: a current context, a
        floating-point mode. Consume the iterator with one ``for`` loop: `Stream.abort` ends the run by exhausting
        it."""
        for call in calls:
            call()

    def _inlines(self, other: Stream) -> bool:
        """Whether ``_run`` of this stream may also make calls of ``other``'s plans. Both streams are synchronous.

        Default: yes if neither overrides ``_run``.
        """
        return type(self)._run is StreamHooks._run and type(other)._run is StreamHooks._run

    def _translate(self, error: Exception) -> Exception:
        """The error to raise in place of what a call of a plan raised, e.g. `DeviceLostError` for a driver's status.
        Default: ``error`` itself, which otherwise becomes the ``__cause__`` of the result."""
        return error

    def _synchronize(self) -> None:
        """Wait until all submitted work is complete. Overriding it makes the stream asynchronous. Called from any
        thread."""

    def _abort(self) -> None:
        """End running work early. Called from any thread."""

    def _close(self) -> None:
        """Release the driver's queue."""

    # --- events -----------------------------------------------------------------------------------------------------

    def _record(self) -> Any:
        """Record an event behind all submitted work and return the driver's handle of it. Default: ``None``; waiting
        for the event then waits for the whole stream."""
        return None

    def _wait(self, handle: Any) -> bool:
        """Make later work of this stream wait for an event of another stream of the same class; ``False`` where that
        is not possible, then the host waits."""
        return False

    def _join(self, handle: Any) -> None:
        """Block the calling thread, which may be any, until an event of this stream is complete."""
        self._synchronize()

    def _query(self, handle: Any) -> bool:
        """Whether an event of this stream is complete, without waiting. Called from any thread."""
        return False

    # --- transfers, queued behind the submitted work ----------------------------------------------------------------

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        """Queue writing ``data`` at byte ``offset``. ``data`` stays alive and unchanged until the work is complete."""
        raise NotImplementedError

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        """Queue reading ``len(out)`` bytes from byte ``offset`` into ``out``, which stays alive until complete."""
        raise NotImplementedError

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        """Queue a copy of ``size`` bytes from any buffer into memory of this device; ``False`` where the source cannot
        be copied without the host."""
        return False
