"""What an executor keeps of each program (`ProgramState`) and of runs that have not ended (`Run`, `RunsInFlight`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import numpy as np

from opweave.concurrency import Lock
from opweave.errors import Cancelled, ExecutionError, LifetimeError, raise_backend_failure
from opweave.graph.tensor import Tensor
from opweave.progress import shown

if TYPE_CHECKING:
    from opweave.runtime.submission import Event
    from opweave.scheduler.compile.arena import Lease
    from opweave.scheduler.compile.run_list import Action, RunList
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.splits import Partition, Split

__all__ = ["ProgramState", "Run", "RunsInFlight"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class ProgramState:
    """What an executor keeps of a program: what it runs, and what changes from run to run.

    Attributes:
        partition: the graph divided into splits.
        lists: the run list of every slot.
        form: the outputs as the caller gave them, which is the form of results.
        single: whether that is one tensor.
        leases: memory for temporaries, as long as the program is open.
        written: input name -> the array for runs that are not fed one.
        slot: which list the next run uses.
        latest: the list of the last run, if that succeeded.
        observed: the same program with observers, while there are any.
        closed: whether it was closed.
    """

    # One small object: kernels displace it from the caches, and each cache line that a run touches is loaded anew.
    partition: Partition
    lists: list[RunList]
    leases: list[Lease]
    form: Any
    single: bool = field(init=False)
    written: dict[str, Array] = field(default_factory=dict)
    slot: int = 0
    latest: RunList | None = None
    observed: ProgramState | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self.single = isinstance(self.form, Tensor)

    def __repr__(self) -> str:
        nodes, splits = len(self.partition.graph.nodes), len(self.partition.splits)
        return f"<Program of {nodes} nodes in {splits} splits{', closed' if self.closed else ''}>"

    def check_open(self) -> None:
        """Raise `LifetimeError` where the program was closed."""
        if self.closed:
            raise LifetimeError(f"{self!r} was closed")

    def warm(self) -> None:
        """Have the calls of every slot compile before the first run, by ``Stream._warm``."""
        self.check_open()
        work = [(plan.stream, call) for run_list in self.lists for plan in run_list.plans for call in plan.calls]
        merging = [run_list for run_list in self.lists if run_list.calls.numbers is not None]
        work += [(run_list.plans[0].stream, call) for run_list in merging for call in run_list.calls.calls]
        for stream, call in shown(work, "compiling"):
            try:
                stream._warm(call)
            except Exception as error:
                raise_backend_failure(error, stream.device.name, "compiling before the first run")

    def in_form(self, arrays: list[Array]) -> Any:
        """Outputs in the form in which they were asked for: one array, a dict or a tuple."""
        if self.single:
            return arrays[0]
        return dict(zip(self.form, arrays, strict=True)) if isinstance(self.form, Mapping) else tuple(arrays)


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """A run that was submitted to asynchronous streams, or one that failed.

    Attributes:
        state, run_list: of which program, in which slot.
        ends: events of all its streams, behind everything.
        arrays: outputs that its streams have fetched.
        error: why it failed, once that is known.
        ended: whether it is known to have ended, successfully or not.
        cancel_reason: why it was asked to end early, ``""``: it was not.
        on_device: whether outputs stay in the memory of their devices.
    """

    state: ProgramState
    run_list: RunList
    on_device: bool = False
    ends: list[Event] = field(default_factory=list)
    arrays: list[Any] = field(init=False)
    error: BaseException | None = None
    ended: bool = False
    cancel_reason: str = ""

    def __post_init__(self) -> None:
        self.arrays = [None] * len(self.run_list.fetches)

    def queue_ends(self) -> None:
        """Queue what follows the calls: fetching, and the events by which the end is known."""
        run_list = self.run_list
        for i, fetch in enumerate(run_list.fetches):
            if fetch.ahead is not None and not self.on_device:
                self.arrays[i] = fetch.ahead()
            elif fetch.stream is not None:
                fetch.stream.call(partial(_store, self.arrays, i, fetch.call(self.on_device)))
        for record in run_list.after:
            record()
        self.ends = [stream.record() for stream in run_list.streams]

    def wait(self) -> None:
        """Wait for the end on all streams; raises what the first of them failed with. Where only the failed one had
        ended, others would still be working while the executor lets streams recover."""
        failure: Exception | None = None
        for end in self.ends:
            try:
                end.synchronize()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def fail(self, error: BaseException) -> None:
        self.error, self.ended = error, True

    def fail_with(self, other: BaseException) -> None:
        """End, because a run under way at the same time failed."""
        if isinstance(other, Cancelled):
            self.fail(other)
            return
        error = ExecutionError(f"this run was under way when another one failed: {other}")
        error.__cause__ = other
        self.fail(error)


class RunsInFlight(deque[Run]):
    """The runs on asynchronous streams that are not known to have ended, the first one first.

    Args:
        lock: the executor's, held while runs are submitted.
        targets: where they run.

    Attributes:
        programs: the executor's programs that are alive.
    """

    __slots__ = ("_lock", "_targets", "programs")

    def __init__(self, lock: Lock, targets: Sequence[Target]) -> None:
        super().__init__()
        self._lock: Final = lock
        self._targets: Final = targets
        self.programs: Final[WeakSet[ProgramState]] = WeakSet()

    def conclude(self, run: Run) -> None:
        """Wait for a run, and for those before it. Its failure is noted on it, not raised."""
        for other in [*self]:
            if run.ended:
                return
            error: BaseException | None = None
            try:
                other.wait()
            except Exception as failure:
                error = failure
            with self._lock:
                if not other.ended:
                    if other.cancel_reason:  # also where the device could not end its work early
                        error = error or Cancelled(other.cancel_reason)
                    if error is not None:
                        self.settle(other, error, None)
                    else:
                        other.ended = True
                        other.state.latest = other.run_list
                        self.remove(other)
            if other is run:
                return

    def _failed_with(self, run: Run) -> list[Run]:
        """The runs in flight that have failed, or were ended early, and ``run``, which has; others end well."""
        failed: list[Run] = []
        for other in [*self, run]:
            if other.ended or other in failed:
                continue
            if other is run:
                failed.append(run)
                continue
            try:
                other.wait()
            except Exception:
                failed.append(other)
            else:
                if other.cancel_reason:
                    failed.append(other)
                else:
                    other.ended = True
        return failed

    def settle(self, run: Run, error: BaseException, action: Action | None) -> BaseException:
        """Make everything usable again after a run failed, and with it those in flight; returns what to raise."""
        from opweave.scheduler.run.failures import settle_failure  # most programs never fail

        failed = self._failed_with(run)
        splits: list[Split] = []
        for other in failed:
            last = action.split if other is run and action is not None else None
            splits += other.state.partition.splits[: None if last is None else last.index + 1]
        actions = [a for other in failed for a in other.run_list.actions.actions]
        cancel_reason = next((other.cancel_reason for other in failed if other.cancel_reason), "")
        reason = settle_failure(error, action, actions, self._targets, splits, anywhere=bool(cancel_reason))
        if cancel_reason and isinstance(reason, Exception):
            cause = None if isinstance(reason, Cancelled) else reason  # what a call that was ended has raised
            reason = Cancelled(cancel_reason)
            reason.__cause__ = cause
        for other in failed:
            if other is failed[0]:
                other.fail(reason)
            else:
                other.fail_with(reason)
        self.clear()
        for state in self.programs:
            for run_list in state.lists:
                run_list.forget_events()
        assert run.error is not None
        return run.error


def _store(arrays: list[Any], index: int, read: Callable[[], Any]) -> None:
    arrays[index] = read()
