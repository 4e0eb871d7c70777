"""Where steps run: a queue of work (`Stream`), steps compiled for it (`Plan`), marks on its timeline (`Event`).

An author subclasses `Stream` only for a device that works asynchronously, fuses steps or compiles them together. `Plan`
and `Event` are finished classes around what the author's hooks return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import length_hint
from sys import is_finalizing
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, TypeVar

from opweave.contract.buffer import Buffer
from opweave.contract.discarding import reclaim
from opweave.contract.fusing import check_fusion
from opweave.contract.space import Usage, as_bytes
from opweave.contract.step import Arg, Call, Group, Step
from opweave.contract.submission import Submission
from opweave.errors import (
    Cancelled,
    ExecutionError,
    LayoutError,
    LifetimeError,
    OpweaveError,
    UnsupportedOpError,
    raise_backend_failure,
)
from opweave.graph.dtypes import u8
from opweave.lifecycle import INHERITED, closed_at_exit, told_of_forks

if TYPE_CHECKING:
    from opweave.contract.device import Device

__all__ = ["Event", "Plan", "StepError", "Stream"]

T = TypeVar("T")


class Epoch:
    """A stretch of a stream's timeline until `Stream.recover`, with the failure that ended it, if one did.

    Attributes:
        first: the first mark that the failure concerns.
        failure: what was raised.
    """

    __slots__ = ("failure", "first")

    def __init__(self) -> None:
        self.first = 0
        self.failure: BaseException | None = None


class Event:
    """A mark on a stream's timeline. Made by `Stream.record`.

    A mark of a failed stream is failed, also after the stream has recovered: waiting for it raises what the stream
    raised, it never hangs. A failure that comes to light while waiting concerns every mark that was not known to be
    reached. All methods may be called from any thread.
    """

    __slots__ = ("__weakref__", "_epoch", "_handle", "sequence", "stream")

    def __init__(self, stream: Stream, sequence: int, handle: Any) -> None:
        self.stream: Final = stream
        self.sequence: Final = sequence
        self._epoch: Final = stream._epoch
        self._handle = handle

    @property
    def failure(self) -> BaseException | None:
        """Why the work before this mark failed, or ``None``."""
        epoch = self._epoch
        return epoch.failure if epoch.first <= self.sequence else None

    @property
    def done(self) -> bool:
        """Whether everything before the mark is complete (or has failed), without waiting."""
        stream = self.stream
        if self.sequence <= stream._reached or self.failure is not None:
            return True
        try:
            reached = stream._query(self._handle)
        except Exception as error:
            stream._fail(error, self.sequence, self._epoch)
            return True
        if reached:
            stream._reach(self.sequence)
        return reached

    def synchronize(self) -> None:
        """Wait on the host until the work before the mark is complete; raises its failure."""
        self._raise()
        stream = self.stream
        if self.sequence > stream._reached:
            try:
                stream._join(self._handle)
            except Exception as error:
                # Nobody knows which work it was: it concerns every mark that was not seen complete. The stream itself
                # may have recovered from it meanwhile, because another thread waited too.
                stream._fail(error, min(stream._reached + 1, self.sequence), self._epoch)
                if isinstance(error, OpweaveError):
                    raise
                device = stream.device.name
                raise ExecutionError(f"work on {device} failed: {error}", device=device) from error
            stream._reach(self.sequence)
        self._raise()

    def _raise(self) -> None:
        failure = self.failure
        if failure is not None:
            raise ExecutionError(
                f"work on {self.stream!r} before this event failed: {failure}", device=self.stream.device.name
            ) from failure

    def __repr__(self) -> str:
        reached = self.sequence <= self.stream._reached
        state = "failed" if self.failure else "done" if reached else "pending"
        return f"<Event {self.sequence} of {self.stream.device.name}, {state}>"


class Plan:
    """Steps compiled for one stream, to be run many times. Made by `Stream.compile`.

    Args:
        buffers: what the calls use; freeing one of them ends the plan.

    Attributes:
        stream: where it runs.
        size: number of groups; one call each unless the stream compiled several into one.
    """

    __slots__ = ("__weakref__", "_calls", "_ended", "size", "stream")

    def __init__(self, stream: Stream, calls: Sequence[Call], size: int, buffers: Iterable[Buffer] = ()) -> None:
        self.stream: Final = stream
        self.size: Final = size
        self._calls: list[Call] | None = list(calls)
        self._ended = "its stream was closed"
        for buffer in buffers:
            buffer._note(self)

    def run(self, around: Callable[[int, Call], Call] | None = None) -> None:
        """Submit every step in order; on a synchronous stream they are done when it returns.

        Args:
            around: for tools: gives, for a call and its index, the one to make instead.

        Raises:
            StepError: a call failed; ``__cause__`` is what it raised and ``.step`` the failing group's index.
            Cancelled: `Stream.abort` was called meanwhile.
            LifetimeError: the plan or its stream was closed, a buffer of it was freed, or another thread is submitting
                to the stream.
        """
        calls, stream = self._calls, self.stream
        if calls is None or stream._closed:
            stream._check_inherited()
            raise LifetimeError(f"{self!r} cannot run: {self._ended}")
        if around is not None:
            calls = [around(i, call) for i, call in enumerate(calls)]
        submission = stream._submission
        if submission.taken:
            raise stream._taken()
        with submission.lock:
            try:
                stream._launch(self, calls)
            finally:
                stream._sequence += 1

    def close(self) -> None:
        """Forget the calls, after the stream is done with them. Closing twice does nothing.

        Work that failed is not raised here but stays on the stream.
        """
        if self._calls is not None:
            self.stream.settle()
            self._calls, self._ended = None, "it was closed"

    @property
    def remarks(self) -> list[str]:
        """What its calls have to say about themselves (their attribute ``remark``): that they run as one graph, say."""
        return [remark for call in self._calls or () if (remark := getattr(call, "remark", ""))]

    def _orphan(self, why: str) -> None:
        """Memory that the calls use is gone."""
        if self._calls is not None:
            self._calls, self._ended = None, why

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<Plan of {self.size} groups on {self.stream.device.name}>"


class StepError(ExecutionError):
    """A call of a plan failed.

    Attributes:
        step: index of the failing group in the plan, ``None`` where the stream compiled several into one call.
        error: what the call raised.
        plan: the plan.
    """

    def __init__(self, step: int | None, error: Exception, plan: Plan | None = None) -> None:
        self.step, self.error, self.plan = step, error, plan
        super().__init__(f"{type(error).__name__}: {error}")


class Stream:
    """An ordered queue of work on a device. Made by ``device.open()``.

    The base class is a synchronous stream: work is done when the call returns. An asynchronous device overrides
    ``_synchronize`` and what it can do besides; what is overridden is what it can.

    Threads: one thread at a time submits (``compile run record wait upload download copy_from``); a second one is
    refused. ``synchronize settle abort failure`` and all of `Event` may be called from any thread meanwhile, so an
    author's ``_synchronize _join _query _abort`` are called from any thread.

    Failures: a call that fails, and work that turns out to have failed, make the stream failed. Its marks from there on
    are failed, and `synchronize` raises until `recover`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Stream:
        # State lives here so that authors need not call super().__init__.
        self = super().__new__(cls)
        self._submission = Submission()
        self._closed = False
        self._sequence = 0
        self._reached = 0
        self._over = 0
        self._epoch = Epoch()
        self._pending = {}
        self._passing = memoryview(b"")
        self._inherited = False
        told_of_forks(self)
        closed_at_exit(self)
        return self

    has_thread = False
    """Whether its work runs on a thread of this process; see `WorkerStream`."""

    _submission: Submission
    _closed: bool
    _sequence: int  # of the last mark or other piece of work that was submitted
    _reached: int  # the last of them that is known to be complete
    _over: int  # the last of them that is known to be under way no more, complete or failed
    _epoch: Epoch
    _pending: dict[int, list[Any]]  # what queued transfers need alive, by the first mark behind them
    _passing: memoryview  # host memory for what passes through
    _inherited: bool  # from the parent process

    def __init__(self, device: Device) -> None:
        self.device: Final = device

    # --- what it can do ---------------------------------------------------------------------------------------------

    @property
    def is_async(self) -> bool:
        """Whether work may still be under way when a call returns."""
        return type(self)._synchronize is not Stream._synchronize

    @property
    def has_events(self) -> bool:
        """Whether other streams can wait for a mark without the host."""
        return type(self)._record is not Stream._record

    @property
    def closed(self) -> bool:
        return self._closed

    def queues_uploads(self, buffer: Buffer) -> bool:
        """Whether `upload` to ``buffer`` only queues; if not it waits for the stream and then writes."""
        return type(self)._upload is not Stream._upload and self._owns(buffer)

    def queues_copies(self, dst: Buffer, src: Buffer) -> bool:
        """Whether `copy_from` may work between these two, without the host."""
        return type(self)._copy_from is not Stream._copy_from and self._owns(dst) and src.type.is_raw

    @property
    def transferring(self) -> bool:
        """Whether transfers were queued that are not known to be done."""
        return bool(self._pending)

    @property
    def failure(self) -> BaseException | None:
        """What made the stream fail since the last `recover`, or ``None``."""
        return self._epoch.failure

    def __repr__(self) -> str:
        return f"<Stream of {self.device.name}{', closed' if self._closed else ''}>"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Queued transfers may still read and write arrays that nobody else keeps alive. While the interpreter ends
        # there is nothing to be done: what was open was closed before, and threads that would do the work are gone.
        if is_finalizing():
            return
        try:
            self.close()
        except Exception:
            self._closed = True

    # --- work -------------------------------------------------------------------------------------------------------

    def fuse(self, steps: Sequence[Step]) -> list[Group]:
        """The steps, grouped in the order in which they will run; see `_fuse`.

        Raises:
            ExecutionError: it raised.
            Broken: the author's ``_fuse`` lost, repeated or invented a step, or put one before what it depends on.
        """
        try:
            groups = list(self._fuse(steps))
        except Exception as error:
            raise_backend_failure(error, self.device.name, "fusing steps")
        if type(self)._fuse is not Stream._fuse:
            check_fusion(self, steps, groups)
        return groups

    def compile(self, groups: Sequence[Group | Step]) -> Plan:
        """Compile bound steps into a plan.

        Raises:
            UnsupportedOpError: a step that the device does not support, named with the reason.
            LifetimeError: the stream is closed, or an operand is unbound, freed, or in memory that the device cannot
                reach.
            BoundsError: an operand that reaches out of its buffer.
            HazardError: a result in read-only memory.
            LayoutError: an operand in memory of a special form that the device does not take.
            ExecutionError: the device's code failed while it prepared a kernel; names the operation.
        """
        reclaim()
        ready: Sequence[Group] = [Group((g,)) if isinstance(g, Step) else g for g in groups]
        buffers = self._check_operands(ready)
        if self.device.has_own_rules:
            # A kernel table refuses what it does not run when it binds; it does not know rules beside it.
            self._check_supported([step for group in ready for step in group.steps])
        return self._submit(partial(self._plan, ready, buffers), submits=False)

    def _plan(self, groups: Sequence[Group], buffers: set[Buffer]) -> Plan:
        try:
            calls = self._compile(groups)
        except Exception as error:
            raise_backend_failure(error, self.device.name, "compiling a plan")
        plan = Plan(self, calls, len(groups), buffers)
        self._compiled(plan)
        return plan

    def run(self, steps: Sequence[Step]) -> None:
        """Check, compile and run steps once. Steps whose result has no elements are left out.

        Raises:
            UnsupportedOpError: a step that the device does not support, named with the reason.
            LifetimeError, BoundsError, HazardError: as `compile`.
            ExecutionError: as `Plan.run`.
        """
        steps = [step for step in steps if 0 not in step.out.shape]
        self._check_supported(steps)
        groups = self.fuse(steps)
        need = max([group.workspace for group in groups], default=0)
        if not need:
            self.compile(groups).run()
            return
        with self.device.alloc(need, Usage.COMPUTE) as scratch:  # freed when the work is done
            args = [Arg(scratch, 0, u8, (g.workspace,), (1,)) if g.workspace else None for g in groups]
            self.compile([g._replace(scratch=arg) for g, arg in zip(groups, args, strict=True)]).run()

    def synchronize(self) -> None:
        """Wait until everything submitted is done.

        Raises:
            ExecutionError: something failed since the last `recover`.
        """
        self._check_inherited()
        known = self._epoch.failure
        self.settle()
        failure = self._epoch.failure
        if failure is not None:
            when = "failed" if known is None else "failed before"
            raise ExecutionError(f"work on {self.device.name} {when}: {failure}", device=self.device.name) from failure

    def settle(self) -> None:
        """Wait until nothing submitted is under way any more. Failures are noted (`failure`), not raised."""
        if self._closed or not self.is_async:
            return
        mark = self._sequence
        # Swapped out before waiting: a transfer that another thread queues meanwhile stays in the new table.
        done, self._pending = self._pending, {}
        try:
            self._synchronize()
        except BaseException as error:
            for first, kept in done.items():
                self._pending.setdefault(first, []).extend(kept)
            if not isinstance(error, Exception):
                raise  # an interrupt: the transfers go on
            self._fail(error, self._reached + 1)
            self._over = max(self._over, mark)
        else:
            self._reach(mark)
        reclaim()

    def record(self) -> Event:
        """A mark after everything submitted so far."""
        return self._submit(self._mark, counts=False)

    def _mark(self) -> Event:
        self._sequence += 1
        if self.is_async:
            return Event(self, self._sequence, self._record())
        event = Event(self, self._sequence, None)
        self._reach(self._sequence)
        return event

    def wait(self, event: Event) -> None:
        """Let later work of this stream wait for ``event``; raises at once if the event has failed.

        Streams that cannot wait for each other's marks wait on the host.
        """
        self._check_open()
        event._raise()
        if event.stream is self or event.done:
            event._raise()
            return
        waits = type(self)._wait is not Stream._wait and type(event.stream) is type(self)
        if not (waits and self._submit(partial(self._wait, event._handle))):
            event.synchronize()

    def upload(self, buffer: Buffer, offset: int, data: Any) -> None:
        """Write bytes in stream order. The array is kept alive until done; do not change it before `synchronize`."""
        view = as_bytes(data)
        buffer.check(offset, len(view), write=True)
        self._check_reach(buffer)
        if self.queues_uploads(buffer):
            self._submit(partial(self._upload, buffer, offset, view), view, buffer)
            return
        self._check_turn()
        self.settle()
        buffer.upload(offset, view)

    def download(self, buffer: Buffer, offset: int, out: Any) -> None:
        """Read bytes in stream order into ``out``, which is complete after `synchronize`."""
        view = as_bytes(out, writable=True)
        buffer.check(offset, len(view))
        self._check_reach(buffer)
        if type(self)._download is not Stream._download and self._owns(buffer):
            self._submit(partial(self._download, buffer, offset, view), view, buffer)
            return
        self._check_turn()
        self.settle()
        buffer.download(offset, view)

    def copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        """Copy bytes from another buffer into one of this stream's device in stream order, without the host.

        The caller has the source's producer done, or this stream wait for it. Both buffers are kept until done.

        Returns:
            Whether it could; if not, nothing was queued.
        """
        dst.check(dst_offset, size, write=True)
        src.check(src_offset, size)
        self._check_reach(dst)
        if not self.queues_copies(dst, src):
            self._check_open()
            return False
        if not size:
            self._check_turn()
            return True
        return bool(self._submit(partial(self._copy_from, dst, dst_offset, src, src_offset, size), dst, src))

    def abort(self) -> None:
        """End running work early, from any thread: the plan that is being submitted raises `Cancelled` after its
        present step. What an asynchronous device has taken is ended where the device can."""
        self._submission.end(f"the work on {self.device.name} was ended by abort()")
        self._abort()

    def recover(self) -> None:
        """Forget the failure that is known: what is submitted from here on is judged anew. Failed marks stay failed.

        Waits for queued work first; if some of it fails only then, that is a failure of its own and stays.
        """
        past, self._epoch = self._epoch, Epoch()
        self.settle()
        late = self._epoch
        if late.failure is not None:
            # It concerns marks on either side.
            past.first = late.first if past.failure is None else min(past.first, late.first)
            past.failure = past.failure or late.failure

    def close(self) -> None:
        """Finish and give the stream back; its plans can no longer be run. Closing twice does nothing.

        Raises:
            ExecutionError: work failed that nobody had been told about. The stream is closed all the same.
        """
        if self._closed:
            return
        told = self._epoch.failure is not None
        try:
            if told:
                self.settle()
            else:
                self.synchronize()
        finally:
            self._closed = True
            self.device._streams.discard(self)
            self._close()
            self._pending.clear()

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_supported(self, steps: Iterable[Step]) -> None:
        for step in steps:
            why = self.device.why_not(step)
            if why is not None:
                raise UnsupportedOpError(f"{self.device.name} does not run {step.op}", {self.device.name: why})

    def _check_open(self) -> None:
        if self._closed:
            self._check_inherited()
            raise LifetimeError(f"{self!r} was closed")

    def _check_inherited(self) -> None:
        if self._inherited:
            raise LifetimeError(f"{self!r} {INHERITED}")

    def _inherit(self) -> None:
        # What is queued was never done as far as this process can know; nobody may wait for it.
        self._inherited = self._closed = True
        self._fail(LifetimeError(f"{self!r} {INHERITED}"), self._reached + 1)

    def _under_way(self) -> str:
        return f"work on {self.device.name}"

    def _check_reach(self, buffer: Buffer) -> None:
        if not self.device.reaches(buffer.space):
            raise LifetimeError(f"{self.device.name} cannot reach {buffer!r} in {buffer.space!r}")

    def _owns(self, buffer: Buffer) -> bool:
        """Whether the author's hooks know this buffer: plain memory of the device itself."""
        return buffer.device is self.device and buffer.type.is_raw

    def _staging(self, size: int) -> memoryview:
        """Host memory for bytes on their way from one device to another: the same at every call, if it is enough."""
        if len(self._passing) < size:
            self._passing = memoryview(bytearray(size))
        return self._passing[:size]

    def _check_operands(self, groups: Sequence[Group]) -> set[Buffer]:
        """The buffers of bound steps, checked. Inside a group of several, values may live without memory."""
        buffers: set[Buffer] = set()
        seen: set[int] = set()  # args that were checked; plans of many steps share most of them
        for group in groups:
            steps = group.steps
            inner: set[int] = set()
            for step in steps:
                out = step.out
                for arg in step.srcs:
                    if id(arg) not in seen and not (arg.buffer is None and arg.value in inner):
                        buffers.add(self._check_arg(step, arg))
                        seen.add(id(arg))
                if out.buffer is None and len(steps) > 1 and out.value >= 0:
                    inner.add(out.value)
                elif id(out) not in seen or (out.buffer is not None and out.buffer.readonly):
                    buffers.add(self._check_arg(step, out, write=True))
                    seen.add(id(out))
            if group.workspace:
                scratch = group.scratch
                if scratch is None or scratch.span < group.workspace:
                    raise LifetimeError(f"{steps[0].op} needs {group.workspace:,} bytes of workspace (Group.scratch)")
                buffers.add(self._check_arg(steps[0], scratch, write=True))
        return buffers

    def _check_arg(self, step: Step, arg: Arg, write: bool = False) -> Buffer:
        buffer = arg.buffer
        if buffer is None:
            raise LifetimeError(f"an operand of {step.op} {step.label!r} has no memory: {arg!r}")
        buffer.check(arg.offset, arg.span, write=write)
        self._check_reach(buffer)
        if not buffer.type.is_raw and (write or not self.device.reads(buffer.type)):
            what = "write" if write else "read"
            raise LayoutError(f"{step.op} {step.label!r} cannot {what} {buffer!r} itself, which keeps tensors in a "
                              "form of its own; copy to or from plain memory")  # fmt: skip
        return buffer

    def _taken(self) -> LifetimeError:
        return LifetimeError(f"another thread is submitting to {self!r}; one thread at a time submits to a stream")

    def _launch(self, plan: Plan, calls: list[Call]) -> None:
        """Make the calls of a plan, whose turn it is."""
        submission = self._submission
        before, outer = submission.thread, submission.rest  # of a run that this plan is a part of
        rest = iter(calls)
        try:
            submission.thread = get_ident()
            if outer is None:
                submission.cut = ""
            submission.rest = rest
            self._run(rest)
            if submission.cut:
                raise Cancelled(submission.cut)
        except BaseException as error:
            index = len(calls) - length_hint(rest) - 1
            if not isinstance(error, Exception) or isinstance(error, Cancelled):
                self._fail(error)
                raise
            known = len(calls) == plan.size and index >= 0 and not submission.cut
            failure = self._step_error(plan, index if known else None, error)
            self._fail(failure.error)
            raise failure from failure.error
        finally:
            submission.rest = outer
            submission.thread = before

    def _step_error(self, plan: Plan, step: int | None, error: Exception) -> StepError:
        """What a call of ``plan`` raised, as it is told."""
        told = self._translate(error)
        if told is not error:
            told.__cause__ = error
        failure = StepError(step, told, plan)
        failure.__cause__ = told
        return failure

    def _fail(self, error: BaseException, first: int = 0, epoch: Epoch | None = None) -> None:
        """Note a failure that concerns marks of an epoch (default: the present one) from ``first`` on (default: those
        that are recorded from now on)."""
        epoch = epoch or self._epoch
        if epoch.failure is None:
            epoch.first = first or self._sequence + 1
            epoch.failure = error
        elif first:
            epoch.first = min(epoch.first, first)

    def _reach(self, mark: int) -> None:
        self._reached = max(self._reached, mark)
        self._over = max(self._over, mark)
        if self._pending:
            for first in list(self._pending):  # any thread may be here, and each takes out only what is done
                if first <= mark:
                    self._pending.pop(first, None)

    def _check_turn(self) -> None:
        """Whether this thread may submit now: on an open stream to which no other one is submitting."""
        self._check_open()
        if self._submission.taken:
            raise self._taken()

    def _submit(self, work: Callable[[], T], *kept: object, submits: bool = True, counts: bool = True) -> T:
        """What ``work`` returns, which submits to the stream; a submission that fails is noted.

        No context manager, whose own ``__enter__`` and ``__exit__`` could be interrupted; see `opweave.concurrency`.

        Args:
            kept: what has to live until the work is done, if anything was queued (``work`` did not return ``False``).
            submits: whether a failure is one of the stream.
            counts: whether it is a piece of work behind the former ones.
        """
        self._check_turn()
        submission = self._submission
        keeps = bool(kept) and self.is_async
        with submission.lock:
            before = submission.thread
            try:
                submission.thread = get_ident()
                result = work()
                # Only after queueing: `settle` relies on everything in the table being queued.
                if keeps and result is not False:
                    self._pending.setdefault(self._sequence + 1, []).append(kept)
                return result
            except Exception as error:
                if not submits:
                    raise
                self._fail(error)
                if isinstance(error, OpweaveError):
                    raise
                raise ExecutionError(f"{self.device.name} failed: {error}", device=self.device.name) from error
            except BaseException:  # an interrupt; nobody knows whether the work was queued
                if keeps:
                    self._pending.setdefault(self._sequence + 1, []).append(kept)
                raise
            finally:
                submission.thread = before
                self._sequence += submits and counts

    # --- what an author may override --------------------------------------------------------------------------------

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        """Group a split's steps before memory is planned. Default: one group a step, with its kernel's workspace.

        Returns the given steps in groups, in an order that keeps every read and write of one value (``Arg.value``) as
        it was; `pointwise_groups` finds the simplest ones. A value that only its own group uses gets no memory: its
        args stay unbound.
        """
        return [Group((step,), self.device._workspace(step)) for step in steps]

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        """One call for each group (or fewer, where a device compiles several into one). A call may have an attribute
        ``remark``, a text that `Program.explain` shows."""
        calls = []
        for group in groups:
            try:
                calls.append(self._bind(group))
            except Exception as error:
                node = " + ".join([f"{step.op} {step.label!r}" if step.label else step.op for step in group.steps])
                raise_backend_failure(error, self.device.name, "preparing a kernel", node)
        return calls

    def _compiled(self, plan: Plan) -> None:
        """Hear of the plan that was made of what `_compile` gave: for streams that learn of a failing step only later,
        and then raise a `StepError` that names the plan. Keep no more than a weak reference."""

    def _bind(self, group: Group) -> Call:
        """The call for one group. Default: the kernel of its only step."""
        return self.device.kernels.bind(self, group)

    def _run(self, calls: Iterator[Call]) -> None:
        """Make a plan's calls in order. Override it for what has to hold while they run: a current context, a mode."""
        for call in calls:
            call()

    def _inlines(self, other: Stream) -> bool:
        """Whether ``_run`` may make calls of ``other``'s plans too, between its own. Both are synchronous.

        Default: where neither needs anything while they are made.
        """
        return type(self)._run is Stream._run and type(other)._run is Stream._run

    def _translate(self, error: Exception) -> Exception:
        """What a plan's call raised, as it is told: a driver's status as `DeviceLostError`, say. Default: as it is.

        ``error`` becomes the ``__cause__`` of what this returns.
        """
        return error

    def _synchronize(self) -> None:
        """Wait until all submitted work is done. Overriding it makes the stream asynchronous."""

    def _record(self) -> Any:
        """A handle of a mark here; default: none, and waiting for the mark waits for the stream."""
        return None

    def _wait(self, handle: Any) -> bool:
        """Wait, in the stream, for a mark of another stream of this class; ``False`` if that is not possible."""
        return False

    def _join(self, handle: Any) -> None:
        """Wait, on the host, for a mark of this stream."""
        self._synchronize()

    def _query(self, handle: Any) -> bool:
        """Whether a mark of this stream is reached, without waiting."""
        return False

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        raise NotImplementedError

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        raise NotImplementedError

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        """Copy into this device's memory from any buffer, in stream order; ``False``: not possible from there."""
        return False

    def _abort(self) -> None:
        """End running work early."""

    def _close(self) -> None:
        """Give the driver's queue back."""
