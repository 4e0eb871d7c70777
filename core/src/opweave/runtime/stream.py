"""`Stream`: an ordered queue of work on a device; the finished methods over the hooks of `opweave.contract.stream`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from sys import is_finalizing
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

from opweave.contract.memory import Usage, as_bytes
from opweave.contract.step import Arg, Call, Group, Step
from opweave.contract.transfers import as_rows
from opweave.contract.tunable import Limit
from opweave.errors import ExecutionError, UnsupportedOpError, raise_backend_failure
from opweave.graph.dtypes import u8
from opweave.lifecycle import close_at_exit, notify_after_fork
from opweave.runtime.buffer import Buffer
from opweave.runtime.checks import check_operands, check_reachable
from opweave.runtime.fusion import check_fusion
from opweave.runtime.listing import listed
from opweave.runtime.plan import Plan
from opweave.runtime.reclaim import reclaim
from opweave.runtime.submission import Epoch, Event, StreamState
from opweave.runtime.transfers import copy_bytes

__all__ = ["Stream"]

T = TypeVar("T")

ARTEFACTS_KEPT: Final = 256
"""How many compiled artefacts a device keeps beside those that plans use (`Stream.artefact`)."""


class Stream(StreamState):
    """An ordered queue of work on a device. Made by ``device.open()``.

    The base class is a synchronous stream: work is complete when the call returns. An asynchronous device overrides
    ``_synchronize`` and further hooks. Overridden hooks define the capabilities.

    Threads: one thread at a time submits (``compile run record wait upload download copy_from``); while it does, the
    stream is busy and submitting from a second thread raises `LifetimeError`. ``synchronize settle abort failure`` and
    all methods of `Event` may be called from any thread at any time, and so are an author's
    ``_synchronize _join _query _abort``.

    Failures: a call that raises, and queued work that turns out to have failed, put the stream into the failed state.
    Events recorded from then on have failed, and `synchronize` raises until `recover` is called.

    Attributes:
        device: the device whose work it does.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        notify_after_fork(self)
        close_at_exit(self)
        return self

    opened_with: Mapping[str, Any] = MappingProxyType({})
    """The parameters that were given to ``device.open(...)``."""

    has_thread = False
    """Whether a thread of this process does its work; see `WorkerStream`."""

    # --- capabilities and state ---------------------------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        """Whether waiting for its events waits for less than all of its work: it overrides ``_record``."""
        return type(self)._record is not Stream._record

    def queues_uploads(self, buffer: Buffer) -> bool:
        """Whether `upload` to ``buffer`` only queues the transfer. If not, it waits for the stream and then writes."""
        return type(self)._upload is not Stream._upload and self.owns(buffer)

    def queues_copies(self, dst: Buffer, src: Buffer) -> bool:
        """Whether `copy_from` may be able to queue a copy from ``src`` to ``dst``, without the host."""
        return type(self)._copy_from is not Stream._copy_from and self.owns(dst) and src.type.is_raw

    @property
    def transferring(self) -> bool:
        """Whether transfers were queued that are not known to be complete."""
        return bool(self.progress.pending)

    @property
    def failure(self) -> BaseException | None:
        """The first failure since the last `recover`, or ``None``."""
        return self.progress.epoch.failure

    def __repr__(self) -> str:
        return f"<Stream of {self.device.name}{', closed' if self.closed else ''}>"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Queued transfers may still read and write arrays that only this stream keeps alive. At interpreter shutdown
        # nothing can be done: open streams were closed at exit, and threads that would do the work no longer run.
        if is_finalizing():
            return
        try:
            self.close()
        except Exception:
            self.closed = True

    # --- work -------------------------------------------------------------------------------------------------------

    def _bind(self, group: Group) -> Call:
        if self.is_functional:
            from opweave.runtime.functional import bind_functional  # most devices have kernels

            return bind_functional(self, group)
        return self.device.kernels.bind(self, group)

    def _warm(self, call: Call) -> None:
        if self.is_functional:
            from opweave.runtime.functional import FunctionCall

            if isinstance(call, FunctionCall):
                call.warm()

    def fuse(self, steps: Sequence[Step]) -> list[Group]:
        """The steps, grouped in the order in which they will run; see `_fuse`.

        Raises:
            ExecutionError: the author's ``_fuse`` raised; ``__cause__`` is what it raised.
            Broken: ``_fuse`` lost, repeated or invented a step, or moved one before a step that it depends on.
        """
        try:
            groups = list(self._fuse(steps))
        except Exception as error:
            raise_backend_failure(error, self.device.name, "fusing steps")
        if type(self)._fuse is not Stream._fuse:
            check_fusion(f"{type(self).__name__}._fuse of {self.device.name}", steps, groups)
        return groups

    def compile(self, groups: Sequence[Group | Step]) -> Plan:
        """Compile bound steps into a plan.

        Raises:
            UnsupportedOpError: the device does not support a step; names the step and the reason.
            LifetimeError: the stream is closed or busy, or an operand has no memory, was freed, or is in memory that
                the device cannot reach.
            BoundsError: an operand extends beyond its buffer.
            HazardError: a result in read-only memory.
            LayoutError: an operand in a buffer type that the kernel cannot use directly.
            ExecutionError: the backend's code failed while preparing a kernel; names the operation.
        """
        reclaim()
        ready: Sequence[Group] = [Group((g,)) if isinstance(g, Step) else g for g in groups]
        buffers = check_operands(self.device, ready)
        if self.device.has_own_rules:
            # A kernel table refuses unsupported steps itself when it binds; it does not know an overridden `_why_not`.
            self._check_supported([step for group in ready for step in group.steps])
        if self.lists_operands:
            ready = [group if group.reads or group.writes else listed(group) for group in ready]
        return self.submit_work(partial(self._plan, ready, buffers), submits=False)

    def _plan(self, groups: Sequence[Group], buffers: set[Buffer]) -> Plan:
        try:
            calls = self._compile(groups)
        except BaseException as error:
            ends = dict.fromkeys([group.describe() for group in (*groups[:1], *groups[-1:])])
            raise_backend_failure(error, self.device.name, "compiling a plan", " to ".join(ends))
        plan = Plan(self, calls, len(groups), buffers)
        self._compiled(plan)
        return plan

    @cached_property
    def _parameters(self) -> str:
        return repr(sorted(self.opened_with.items()))

    def artefact(self, key: Hashable, make: Callable[[], T]) -> T:
        """What the first ``make`` of ``key`` returned, for compilers: used by an author's ``_compile`` and ``_bind``.

        Streams of one device, class and parameters share what they made. The device keeps the latest `ARTEFACTS_KEPT`.

        Args:
            key: all that the result depends on, such as `Structure.key`.
        """
        known = self.device.artefacts
        full = (type(self), self._parameters, Limit.version, key)
        found = known.pop(full, None)
        if found is None:
            found = make()
            while len(known) >= ARTEFACTS_KEPT:
                known.pop(next(iter(known)), None)
        known[full] = found
        return found  # type: ignore[no-any-return]

    def run(self, steps: Sequence[Step]) -> None:
        """Check, compile and run steps once. Steps whose result has no elements are skipped.

        Raises:
            UnsupportedOpError: the device does not support a step; names the step and the reason.
            AllocationError: the device has no memory for the workspace of the steps.
            LifetimeError, BoundsError, HazardError, LayoutError: as `compile`.
            ExecutionError: as `compile`; `StepError` as `Plan.run`.
        """
        steps = [step for step in steps if 0 not in step.out.shape]
        self._check_supported(steps)
        groups = self.fuse(steps)
        need = max([group.workspace for group in groups], default=0)
        if not need:
            self.compile(groups).run()
            return
        with self.device.alloc(need, Usage.COMPUTE) as scratch:  # freeing waits for the work
            args = [Arg(scratch, 0, u8, (g.workspace,), (1,)) if g.workspace else None for g in groups]
            self.compile([g._replace(scratch=arg) for g, arg in zip(groups, args, strict=True)]).run()

    def synchronize(self) -> None:
        """Wait until all submitted work is complete.

        Raises:
            ExecutionError: work failed since the last `recover`; ``__cause__`` is the first failure.
        """
        self.check_inherited()
        known = self.progress.epoch.failure
        self.settle()
        failure = self.progress.epoch.failure
        if failure is not None:
            when = "failed" if known is None else "failed before"
            raise ExecutionError(f"work on {self.device.name} {when}: {failure}", device=self.device.name) from failure

    def settle(self) -> None:
        """Wait until no submitted work is in flight. Failures are kept on the stream (`failure`), not raised."""
        if self.closed or not self.is_async:
            return
        sequence = self.progress.sequence
        # Swapped out before waiting: a transfer that another thread queues meanwhile stays in the new table.
        done, self.progress.pending = self.progress.pending, {}
        with self.progress.waiting:
            try:
                self._synchronize()
            except BaseException as error:
                for first, kept in done.items():
                    self.progress.pending.setdefault(first, []).extend(kept)
                if not isinstance(error, Exception):
                    raise  # an interrupt: the transfers are still in flight
                self.fail(error)
                self.progress.finished = max(self.progress.finished, sequence)
            else:
                self.progress.complete(sequence)
        reclaim()

    def record(self) -> Event:
        """An event behind everything submitted so far.

        Raises:
            LifetimeError: the stream is closed or busy.
        """
        return self.submit_work(self._record_event, counts=False)

    def _record_event(self) -> Event:
        self.progress.sequence += 1
        if self.is_async:
            return Event(self, self.progress.sequence, self._record())
        event = Event(self, self.progress.sequence, None)
        self.progress.complete(self.progress.sequence)
        return event

    def wait(self, event: Event) -> None:
        """Make work submitted from now on wait for ``event``.

        If the two streams are of different classes, or ``_wait`` cannot do it, the host waits before this returns.

        Raises:
            ExecutionError: the event has failed.
            LifetimeError: the stream is closed or busy.
        """
        self._check_open()
        event.raise_failure()
        if event.stream is self or event.done:
            event.raise_failure()
            return
        waits = type(self)._wait is not Stream._wait and type(event.stream) is type(self)
        if not (waits and self.submit_work(partial(self._wait, event.handle))):
            event.synchronize()

    def upload(self, buffer: Buffer, offset: int, data: Any) -> None:
        """Write the bytes of a contiguous array or buffer at byte ``offset`` of ``buffer``, in stream order.

        The stream keeps the array alive until the transfer is complete; do not change it before `synchronize`.

        Raises:
            LayoutError: ``data`` is not contiguous.
            BoundsError, HazardError: the range is outside of the buffer, or the buffer is read-only.
            LifetimeError: the buffer was freed or is not reachable, or the stream is closed or busy.
        """
        view = as_bytes(data)
        buffer.check(offset, len(view), write=True)
        if self._queues(buffer, len(view), type(self)._upload is not Stream._upload):
            self.submit_work(partial(self._upload, buffer, offset, view), view, buffer)
        else:
            buffer.upload(offset, view)

    def download(self, buffer: Buffer, offset: int, out: Any) -> None:
        """Read bytes from byte ``offset`` of ``buffer`` into a contiguous writable array, in stream order.

        ``out`` is filled after `synchronize`. Raises what `upload` raises.
        """
        view = as_bytes(out, writable=True)
        buffer.check(offset, len(view))
        if self._queues(buffer, len(view), type(self)._download is not Stream._download):
            self.submit_work(partial(self._download, buffer, offset, view), view, buffer)
        else:
            buffer.download(offset, view)

    def upload_2d(self, buffer: Buffer, offset: int, pitch: int, rows: Any) -> None:
        """Write rows at equal distances, as `Buffer.upload_2d`, in stream order.

        The stream keeps the array alive until the transfer is complete; do not change it before `synchronize`. Raises
        what `upload` and `Buffer.upload_2d` raise.
        """
        given = as_rows(rows, pitch)
        size = buffer.check_rows(offset, pitch, given.shape, write=True)
        own = type(self)._upload is not Stream._upload or type(self)._upload_2d is not Stream._upload_2d
        if not self._queues(buffer, given.size, own):
            buffer.upload_2d(offset, pitch, rows)
        elif size == given.size and given.flags.c_contiguous:
            self.upload(buffer, offset, given)
        else:
            self.submit_work(partial(self._upload_2d, buffer, offset, pitch, given), given, buffer)

    def download_2d(self, buffer: Buffer, offset: int, pitch: int, out: Any) -> None:
        """Read rows at equal distances, as `Buffer.download_2d`, in stream order.

        ``out`` is filled after `synchronize`. Raises what `download` and `Buffer.download_2d` raise.
        """
        given = as_rows(out, pitch, writable=True)
        size = buffer.check_rows(offset, pitch, given.shape)
        own = type(self)._download is not Stream._download or type(self)._download_2d is not Stream._download_2d
        if not self._queues(buffer, given.size, own):
            buffer.download_2d(offset, pitch, out)
        elif size == given.size and given.flags.c_contiguous:
            self.download(buffer, offset, given)
        else:
            self.submit_work(partial(self._download_2d, buffer, offset, pitch, given), given, buffer)

    def _queues(self, buffer: Buffer, size: int, own: bool) -> bool:
        """Whether a transfer is queued by a hook that the author has (``own``); if not, this has waited for the work
        before it."""
        check_reachable(self.device, buffer)
        if own and size and self.owns(buffer):
            return True
        self._check_can_submit()
        self.settle()
        return False

    def copy_from(
        self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int, *, source: Stream | None = None
    ) -> bool:
        """Copy ``size`` bytes from any buffer into one that this stream's device reaches, in stream order: by the
        device where it can, else by way of the host.

        The copy sees what was submitted to ``source`` before. Work that is submitted to ``source`` afterwards may run
        before the copy, unless it waits for an event of this stream. The stream keeps both buffers alive until the copy
        is complete.

        Args:
            source: the stream that writes ``src``. Without it the caller makes sure that the source is written: its
                producer is complete, or this stream waits for it.

        Returns:
            Whether the copy was queued. ``False``: it went by way of the host and is complete.

        Raises:
            BoundsError, HazardError: a range is outside of its buffer, or ``dst`` is read-only.
            LifetimeError: a buffer was freed, ``dst`` is not reachable, or a stream is closed or busy.
            ExecutionError: work of ``source`` has failed.
            LayoutError: a buffer stores whole tensors, and the range is not inside of one.
        """
        dst.check(dst_offset, size, write=True)
        src.check(src_offset, size)
        check_reachable(self.device, dst)
        self._check_can_submit()
        if not size:
            return self.queues_copies(dst, src)
        if source is not None and source is not self:
            self.wait(source.record())
        work = partial(self._copy_from, dst, dst_offset, src, src_offset, size)
        if self.queues_copies(dst, src) and self.submit_work(work, dst, src):
            return True
        self.settle()
        copy_bytes(dst, dst_offset, src, src_offset, size)
        return False

    def abort(self) -> None:
        """End running work early. May be called from any thread.

        The plan that is being submitted raises `Cancelled` after its current call. Work that an asynchronous device
        has already accepted is ended where its driver can do that (``_abort``).
        """
        self.submission.cancel(f"the work on {self.device.name} was ended by abort()")
        self._abort()

    def recover(self) -> None:
        """Clear `failure`, so that work can be submitted again. Events that have failed stay failed.

        Waits for queued work. If some of it fails while this waits, the stream is left with that new failure.
        """
        past, self.progress.epoch = self.progress.epoch, Epoch()
        self.settle()
        late = self.progress.epoch
        if late.failure is not None:
            # It concerns events on both sides of this call.
            past.first = late.first if past.failure is None else min(past.first, late.first)
            past.failure = past.failure or late.failure

    def close(self) -> None:
        """Wait for all work and release the driver's queue; plans of the stream can no longer be run.

        Closing twice does nothing.

        Raises:
            ExecutionError: work failed and that was not known before. The stream is closed nevertheless.
        """
        if self.closed:
            return
        failure_known = self.progress.epoch.failure is not None
        try:
            if failure_known:
                self.settle()
            else:
                self.synchronize()
        finally:
            self.closed = True
            self.device.live_streams.discard(self)
            self._close()
            self.progress.pending.clear()

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_supported(self, steps: Iterable[Step]) -> None:
        for step in steps:
            why = self.device.why_not(step)
            if why is not None:
                raise UnsupportedOpError(f"{self.device.name} does not run {step.op}", {self.device.name: why})

    def describe_pending(self) -> str:
        return f"work on {self.device.name}"

    def owns(self, buffer: Buffer) -> bool:
        """Whether the author's transfer hooks accept this buffer: plain memory of the device itself."""
        return buffer.device is self.device and buffer.type.is_raw

    def staging(self, size: int) -> memoryview:
        """Host memory for bytes on their way from one device to another. Each call returns the same memory, unless a
        larger size is asked for."""
        if len(self._staging_memory) < size:
            self._staging_memory = memoryview(bytearray(size))
        return self._staging_memory[:size]
