"""`StreamHooks`: every method that an author of a stream may override. Overridden hooks define the capabilities.

Public methods of `Stream` check their arguments before they call a hook; hooks may rely on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from opweave.contract.step import Arg, Call, Group, Single, Step
from opweave.errors import raise_backend_failure

if TYPE_CHECKING:
    from opweave.contract.transfers import Rows
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.device import Device
    from opweave.runtime.functional import Function
    from opweave.runtime.plan import Plan
    from opweave.runtime.stream import Stream

__all__ = ["Launch", "Range", "StreamHooks"]

Range: TypeAlias = "tuple[Buffer, int, int]"
Launch: TypeAlias = tuple[Call, Sequence[memoryview], Sequence[memoryview]]


class StreamHooks:
    """The optional methods of a stream with their defaults, which make it synchronous."""

    reads_ahead = False
    """Whether results of a run are to be queued (``_download``) behind it, and not read once it has ended: for devices
    where each round trip takes long, such as remote ones."""

    repack: float = inf
    """Bytes that copies of weights may take in forms with which kernels are faster, those of the device's library too.
    The scheduler sets it before it asks for groups."""

    def __init__(self, device: Device) -> None:
        self.device: Final = device

    # --- preparing work ---------------------------------------------------------------------------------------------

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        """Group the steps of a split before memory is planned. Default: one group per step, with the workspace of its
        kernel.

        Returns the given steps in groups, in an order that keeps all reads and writes of each value (``Arg.value``) in
        sequence; a group may be all of them, and `pointwise_groups` finds elementwise ones. A value that only its own
        group uses gets no memory: its args stay unbound. Streams with `_compile_functional` have all steps in one group
        by default.
        """
        if self.is_functional:
            return [Group(tuple(steps))] if steps else []
        return [Group((step,), self.device._workspace(step)) for step in steps]

    def _single(self, step: Step) -> Single | None:
        """For streams that override `_fuse`, and can tell of a step by itself whether it may share a group: how it is
        computed if it shares none. The core asks once for each kind and layout of steps, and gives `_fuse` only those
        runs of steps that may share groups. Default: ``None``, `_fuse` gets all steps."""
        return None

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        """One call for each group, or fewer where the device compiles several groups into one call.

        A call may have the attributes ``remark``, a text that `Program.explain` shows (such as which constants it has
        packed), ``library_bytes``, the memory in bytes that its library has taken for itself, and ``refresh``, a
        function of a token that is called after weights were written (`Weights.write`), for calls that keep something
        made of weights; calls that share it are given the same token, and the first one makes it again.
        """
        calls = []
        for group in groups:
            try:
                calls.append(self._bind(group) if group.call is None else group.call)
            except BaseException as error:
                raise_backend_failure(error, self.device.name, "preparing a kernel", group.describe())
        return calls

    def _compiled(self, plan: Plan) -> None:
        """Receive the plan made from the result of `_compile`. For streams that discover a failing step only later and
        then raise a `StepError` that names the plan. Keep no more than a weak reference."""

    def _bind(self, group: Group) -> Call:
        """The call for one group. Default: what `_compile_functional` gives, else the kernel of its only step.

        For streams that override `_fuse`, the group's operands are listed (`Group.reads`, ``writes``, ...), and
        `opweave.contract.structure_of` and `Stream.artefact` let equal groups share what was compiled.
        """
        raise NotImplementedError

    def _compile_functional(
        self, steps: Sequence[Step], inputs: Sequence[Arg], outputs: Sequence[Arg], donated: Sequence[int]
    ) -> Function:
        """Compile steps into a function of arrays, for libraries whose arrays cannot be written in place. Overriding it
        is for devices whose memory holds such arrays (`opweave.functional`), and makes kernels unnecessary.

        Called once for each structure: equal steps over other leaves or in other memory get the same function. Nothing
        has memory here: ``Arg.value`` numbers inputs, outputs and what the steps pass on, ``Arg.offset`` counts from
        the start of that. `opweave.functional.evaluate` computes the steps, views included, from a table of functions.

        Args:
            steps: in the order in which they are computed.
            inputs: what the function takes, dense. Steps may use any window of them.
            outputs: what it returns, dense. Of a state that the steps write it is the new version.
            donated: positions of inputs that nobody else uses from then on: the library may take their memory.

        Returns:
            ``f(*arrays) -> arrays``. Arrays that it returns are new: none of its arguments, none twice. Where the
            library may still be computing them then, its attribute ``wait`` is called with them and returns when they
            are complete. The attributes ``remark`` and ``library_bytes`` are as those of calls (`_compile`).
        """
        raise NotImplementedError

    def _warm(self, call: Call) -> None:
        """Do what the first run of a call would have to do first, such as compiling. Called by `Program.warm` with all
        calls, those that `_merge` made too. Default: functions of `_compile_functional` are called once with zeros."""

    @property
    def is_functional(self) -> bool:
        """Whether it computes by functions of immutable arrays: `_compile_functional` is overridden."""
        return type(self)._compile_functional is not StreamHooks._compile_functional

    @property
    def shares_calls(self) -> bool:
        """Whether the calls of a plan, one for each group, may be in further plans, and several times in one, for equal
        steps in the same memory. Calls of earlier plans are in `Group.call`. If `_compile` is overridden, the last call
        of each plan is made anew all the same, as `_compile` may add work to it. Default: if neither `_compile` nor
        `_compiled` is overridden, as those may keep something of a plan in its calls, and operands are not listed, as
        what else reads them differs between programs."""
        kind = type(self)
        plain = kind._compile is StreamHooks._compile and kind._compiled is StreamHooks._compiled
        return plain and not self.lists_operands

    @property
    def lists_operands(self) -> bool:
        """Whether the core lists the operands of its groups (`Group.reads` and what follows)."""
        return self.is_functional or type(self)._fuse is not StreamHooks._fuse

    # --- running ----------------------------------------------------------------------------------------------------

    def _bind_launch(self, writes: Sequence[Range], plan: Plan, reads: Sequence[Range]) -> Launch | None:
        """One call that does a whole run: it writes, runs ``plan``, reads, and returns when all that is complete. For
        devices where each round trip takes long. Default: ``None``: the stream does not offer this.

        Args:
            writes, reads: buffer, offset and number of the bytes, in memory of this device.

        Returns:
            The call, memory for the bytes of each of ``writes``, and of each of ``reads``. The call raises the
            `StepError` of a failing step.
        """
        return None

    def _run(self, calls: Iterator[Call]) -> None:
        """Make the calls of a plan in order. Override it for what has to hold during the calls: a current context, a
        floating-point mode. Consume the iterator with one ``for`` loop: `Stream.abort` ends the run by exhausting
        it."""
        for call in calls:
            call()

    def _merge(self, calls: Sequence[Call]) -> Sequence[tuple[Call, int]]:
        """The calls of a run in order, some in a row as one call, each with how many of ``calls`` it makes: for streams
        that make several at once in less time. Failures of a merged call name the step of its attribute ``failed``,
        counted from its first one, if it has that, else the first. A run that somebody traces or observes makes
        ``calls``. Default: nothing is merged."""
        return [(call, 1) for call in calls]

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
        """End running work early. Called from any thread, also while nothing runs, and then without consequences. A
        call that is ended in the middle may raise anything: the run raises `Cancelled`. Without it a plan ends after
        its present call, and what an asynchronous device has accepted goes on (`Stream.uncancellable` says so)."""

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
        """Whether an event of this stream is complete, without waiting. Called from any thread. Default: ``False``, so
        that it is known only where somebody has waited."""
        return False

    # --- transfers, queued behind the submitted work ----------------------------------------------------------------

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        """Queue writing ``data`` at byte ``offset``. ``data`` stays alive and unchanged until the work is complete."""
        raise NotImplementedError

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        """Queue reading ``len(out)`` bytes from byte ``offset`` into ``out``, which stays alive until complete."""
        raise NotImplementedError

    def _upload_2d(self, buffer: Buffer, offset: int, pitch: int, rows: Rows) -> None:
        """Queue writing rows of bytes, row ``i`` at byte ``offset + i * pitch``; ``rows`` as for
        ``Device._upload_2d``. Default: an ``_upload`` for each row."""
        for i, row in enumerate(rows):
            self._upload(buffer, offset + i * pitch, row.data)

    def _download_2d(self, buffer: Buffer, offset: int, pitch: int, out: Rows) -> None:
        """Queue reading rows of bytes: the counterpart of ``_upload_2d``. Default: a ``_download`` for each row."""
        for i, row in enumerate(out):
            self._download(buffer, offset + i * pitch, row.data)

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        """Queue a copy of ``size`` bytes from any buffer into memory of this device; ``False`` where the source cannot
        be copied without the host."""
        return False
