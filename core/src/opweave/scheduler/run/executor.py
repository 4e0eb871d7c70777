"""`Executor`: runs the programs of one scheduler.

It owns everything that changes while programs run: the lock, the runs in flight (`RunsInFlight`), observers, and of
each program one `ProgramState`. `Executor.run` has the only loop that makes calls: the caller of `Program.run`, the
thread in which submitted runs end, observers and traces all use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import numpy as np

from opweave.concurrency import Lock, Worker
from opweave.errors import Cancelled, ExecutionError, LifetimeError, SchedulerError
from opweave.graph.tensor import Tensor
from opweave.lifecycle import INHERITED, keep_forever, notify_after_fork, start_exit_thread
from opweave.runtime.reclaim import WORKING
from opweave.runtime.submission import Submission
from opweave.runtime.worker import WorkerStream
from opweave.scheduler.compile.run_list import Action, Feed, RunList, fitted, snapshot
from opweave.scheduler.run.runs import ProgramState, Run, RunsInFlight
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.futures import Future, RunFuture, RunTask, Task
    from opweave.scheduler.compile.run_list import CallList
    from opweave.scheduler.place.target import Target

__all__ = ["Executor"]

T = TypeVar("T")

Array = np.ndarray[Any, Any]

CANCELLED: Final = "the run was ended by cancel()"


class Executor:
    """Runs programs; thread-safe.

    Attributes:
        targets: the devices and streams on which its programs run.
        lock: held while a run is submitted, and by whoever builds or changes something.
        ownership: which thread submits to the streams that the scheduler has opened; they share it.
        begun: runs that began.
        copied: bytes that they copied between memories.
        closed: whether nothing is submitted any more.
        inherited: whether this process is a child that was forked from the one that made it.
    """

    __slots__ = (
        "__weakref__", "_cancels", "_completion_thread", "_handing_over", "_in_flight", "_last", "_own_future",
        "_parallel", "_queued", "_ready", "_room", "_runner", "_switching", "begun", "closed", "copied", "inherited",
        "lock", "ownership", "targets",
    )  # fmt: skip

    def __init__(self, n_slots: int, *, parallel: bool) -> None:
        self.lock: Final = Lock()
        self.ownership: Final = Submission()
        self.begun = 0
        self.copied = 0
        self.closed = self.inherited = False
        self.targets: Final[list[Target]] = []
        self._parallel: Final = parallel
        self._room: Final = 2 * n_slots if parallel else 1  # runs that may be under way
        self._runner = 0  # the thread that is submitting a run, 0: none is
        self._cancels = 0  # how often runs were cancelled: a run that began before the latest time ends
        self._own_future: RunFuture[Any] | None = None  # of the submitted run that is being made
        self._switching: Final = Lock()  # held by whoever ends that run alone, or clears that
        self._last: ProgramState | None = None  # the program whose values are in memory
        self._ready: ProgramState | None = None  # the program that can run again with nothing to check but its feeds
        self._in_flight: Final = RunsInFlight(self.lock, self.targets)
        self._handing_over: Final = Lock()
        self._completion_thread: Worker | None = None
        self._queued: Collection[Any] = ()  # whole runs that wait for that thread
        notify_after_fork(self)

    # --- runs -------------------------------------------------------------------------------------------------------

    def run(
        self,
        state: ProgramState,
        feeds: Mapping[Any, Any] | None,
        named: Mapping[str, Any],
        on_device: bool = False,
        *,
        wait: bool = True,
        future: RunFuture[Any] | None = None,
    ) -> Any:
        """Run a program once: feed, make the calls, fetch.

        Where a program runs again and nothing happened in between, this is kept short: kernels displace code and
        objects from the processor's caches, and each that a run touches has to be loaded again.

        Args:
            on_device: leave the outputs in the memory of their devices.
            wait: ``False``, only with overlapping runs: return the `Run` when everything is queued. Arrays that were
                fed may then be overwritten, unless their input is borrowed.
            future: what the caller of `submit` was given, who may have cancelled it.

        Returns:
            The outputs; without ``wait`` the `Run`, but for programs without any work, as all that they compute has no
            elements.
        """
        if (self._queued or WORKING.active) and self._is_behind(wait):
            return self.submit(state, feeds, named, on_device).result()
        cancels = self._cancels
        with self.lock:
            if self._ready is state and not TRACE.listening:
                run_list = state.lists[0]
                calls = run_list.calls
                values: Sequence[tuple[Feed, Array]] = fitted(run_list, state.written, feeds, named)
            else:
                state, run_list, calls, values = self._prepare(state, feeds, named, wait)
            self._ready, ownership = None, self.ownership
            if on_device or run_list.states or run_list.ended or ownership.thread or self._cancels != cancels:
                self._check(state, run_list, on_device, cancels)
            run = feed = None
            started, rest = False, iter(calls.calls)
            with ownership.lock:
                # Set where a kernel of another plan runs this program: that plan was run on a stream of this scheduler.
                outer, outer_calls, before = ownership.remaining, ownership.calls, ownership.thread
                try:
                    self._runner = ownership.thread = get_ident()
                    ownership.cancel_reason = "" if outer is None else ownership.cancel_reason
                    ownership.calls, ownership.remaining = calls.calls, rest
                    self._own_future = future or self._own_future
                    if self._cancels != cancels or (future is not None and future.decided):
                        raise Cancelled(CANCELLED)
                    started = True
                    self.begun += 1
                    self.copied += run_list.copied
                    if run_list.streams:
                        run = self._queue_waits(state, run_list, on_device)
                    for feed, value in values:
                        if (view := feed.view) is not None:
                            view[...] = value  # half the time of np.copyto
                        else:
                            feed.put(value)
                    feed = None
                    calls.run(rest)
                    if ownership.cancel_reason or self._cancels != cancels or (future is not None and future.decided):
                        raise Cancelled(CANCELLED)
                    if run is not None:
                        self._queue_ends(run, cancels)
                except BaseException as error:
                    cancelled = self._cancels != cancels or (future is not None and future.decided)
                    run = run or Run(state, run_list)
                    failure = self._failed(run, cancelled, calls, rest, feed, error) if started else error
                    raise failure from failure.__cause__
                finally:
                    ownership.calls, ownership.remaining, ownership.thread = outer_calls, outer, before
                    self._runner = 0
            if run is None or not self._parallel:
                # With the lock: the next run writes over them.
                return self._outputs_now(state, run_list, on_device) if run is None else self._outputs(run)
        return self._outputs(run) if wait else run

    def _is_behind(self, wait: bool) -> bool:
        """Whether a run goes behind those that were submitted before. Raises `SchedulerError` within a run, without the
        lock, which that run may hold."""
        if self._on_worker:
            self.check_caller()
        return bool(self._queued) and wait and not self._on_completion_thread

    def _check(self, state: ProgramState, run_list: RunList, on_device: bool, cancels: int) -> None:
        """Raise what keeps a run from beginning. ``cancels``: how often runs were cancelled before it was asked for."""
        if on_device:
            for fetch in run_list.fetches:
                fetch.call(on_device)  # raises now what fetching would raise after the run
        if self._cancels != cancels:
            raise Cancelled(CANCELLED)
        for leaf in run_list.states:
            if leaf.damaged:
                raise ExecutionError(leaf.damaged, states=(leaf.name,))
        if run_list.ended:
            raise LifetimeError(f"{state!r} cannot run: {run_list.ended}")
        if self.ownership.busy:
            raise self.targets[0].stream.busy_error()

    def _queue_ends(self, run: Run, cancels: int) -> None:
        """What follows the calls of a run on asynchronous streams, which is in flight from here on."""
        run.queue_ends()
        self._in_flight.append(run)
        if self._cancels != cancels:  # before `cancel` could see the run there
            run.cancel_reason = CANCELLED

    def submit(
        self, state: ProgramState, feeds: Mapping[Any, Any] | None, named: Mapping[str, Any], on_device: bool = False
    ) -> Future[Any]:
        """Run a program once, beside the caller, behind what was submitted before."""
        from opweave.futures import RunTask  # importing opweave must not pay for it

        self.check_caller()
        self._check_program(state)
        if not self._parallel:
            ready = fitted(state.lists[0], state.written, feeds, named)
            kept = {feed.tensor.key: value for feed, value in snapshot(ready, all_=True)}
            return self._put(RunTask(self._cancel_one, state, self._run_submitted, state, kept, on_device))
        with self.lock:
            self.check_open()
            try:
                run = self.run(state, feeds, named, wait=False, on_device=on_device)
            except (ExecutionError, Cancelled) as error:
                # It may be the failure of an earlier run, which was found while this one was queued.
                return self._put(RunTask(self._cancel_one, None, _raise, error))
            if not isinstance(run, Run):
                return self._put(RunTask(self._cancel_one, None, lambda _: run))
            return self._put(RunTask(self._cancel_one, run, lambda _: self._outputs(run)))

    def _run_submitted(
        self, future: RunFuture[Any], state: ProgramState, feeds: Mapping[Any, Any], on_device: bool
    ) -> Any:
        """A run in the completion thread."""
        try:
            return self.run(state, feeds, {}, on_device, future=future)
        finally:
            with self._switching:  # whoever ends this run alone must not hit the next one
                self._own_future = None

    def _prepare(
        self, state: ProgramState, feeds: Mapping[Any, Any] | None, named: Mapping[str, Any], wait: bool
    ) -> tuple[ProgramState, RunList, CallList, Sequence[tuple[Feed, Array]]]:
        """Program, list, calls and values of a run behind one of another program, or of one that may overlap others.

        Checks that a run may begin, and waits until fewer runs are in flight than may be.
        """
        state = state.observed or state
        run_list = state.lists[state.slot]
        values = fitted(run_list, state.written, feeds, named)
        if not wait:
            values = snapshot(values)
        self.check_caller()
        self._check_program(state)
        self._ready = None
        in_flight = self._in_flight
        while in_flight and (len(in_flight) >= self._room or in_flight[0].cancel_reason):
            in_flight.conclude(in_flight[0])
        if not run_list.streams:
            self._last = state
        calls = run_list.calls
        if TRACE.listening:
            from opweave.scheduler.run.trace import traced_calls  # most runs are not traced

            calls = traced_calls(run_list)
        return state, run_list, calls, values

    def _queue_waits(self, state: ProgramState, run_list: RunList, on_device: bool) -> Run:
        """A run on asynchronous streams, after queueing what they have to wait for."""
        state.slot = (state.slot + 1) % len(state.lists)
        state.latest = None
        if self._last is not state:
            self._last = state
            # Programs share the memory of their temporaries.
            for other in self._in_flight:
                for end in other.ends:
                    for stream in run_list.streams:
                        stream.wait(end)
        for wait in run_list.before:
            wait()
        return Run(state, run_list, on_device)

    def _outputs_now(self, state: ProgramState, run_list: RunList, on_device: bool) -> Any:
        """The outputs of a run that has ended with its calls; the program can run again with nothing to check."""
        state.latest = run_list
        self._ready = state
        if not state.single or on_device:
            return state.in_form([fetch.get(on_device) for fetch in run_list.fetches])
        fetch = run_list.fetches[0]
        try:
            return fetch.read()
        except Exception as error:
            raise fetch.failed(error) from error

    def _outputs(self, run: Run) -> Any:
        """The outputs of a run, in the form in which the caller wants them; waits for its end."""
        if not run.ended:
            self._in_flight.conclude(run)
        if run.error is not None:
            raise run.error
        arrays = run.arrays
        for i, fetch in enumerate(run.run_list.fetches):
            if fetch.stream is None and arrays[i] is None:
                arrays[i] = fetch.get(run.on_device)
        return run.state.in_form(arrays)

    # --- failures and cancellation ----------------------------------------------------------------------------------

    def _failed(
        self,
        run: Run,
        cancelled: bool,
        calls: CallList,
        rest: Iterable[object],
        feed: Feed | None,
        error: BaseException,
    ) -> BaseException:
        """Make everything usable again after submitting a run raised ``error``; returns what to raise.

        Args:
            cancelled: whether `cancel` or its future ended it.
            rest: the calls that were not made.
            feed: the input that was being fed.
        """
        action = None
        run.state.latest = None
        run.cancel_reason = CANCELLED if cancelled else run.cancel_reason or self.ownership.cancel_reason
        index = len(calls.calls) - 1 - sum(1 for _ in rest)
        # Cancelling skips the rest of the calls, so that their number does not say where the run was.
        if index >= 0 and not run.cancel_reason:
            action, error = calls.locate(index, error)
        if feed is not None and feed.target is not None:
            action = Action("feed", feed.target, None, tensor=feed.tensor)
        return self._in_flight.settle(run, error, action)

    def cancel(self) -> None:
        """End all runs that have begun or were submitted, from any thread: they raise `Cancelled`, futures at once."""
        self._cancels += 1
        tasks = [task for task in self._tasks if task.future.drop()]
        for run in [*self._in_flight]:
            run.cancel_reason = CANCELLED
        for task in tasks:
            if task.future.running() or isinstance(task.run, Run):
                self._damage(task.run)
        self._interrupt()
        for task in tasks:
            task.future.end_with(CANCELLED)
        self._conclude_dropped()

    def _cancel_one(self, future: RunFuture[Any]) -> None:
        """End a run whose future was cancelled. Of runs that overlap only the last one that is left can be ended early;
        others are in the queues of devices between each other, and go on to their end."""
        run = next((task.run for task in self._tasks if task.future is future), None)
        with self._switching:
            in_flight = [*self._in_flight]
            alone = all(other is run or other.cancel_reason for other in in_flight) and run in in_flight
            if alone or self._own_future is future:
                for other in in_flight:
                    other.cancel_reason = CANCELLED
                self._damage(run)
                self._interrupt()
        self._conclude_dropped()

    def _interrupt(self) -> None:
        """Let streams end what they are doing."""
        if self._runner or self._in_flight:
            self.ownership.cancel(CANCELLED)
            for target in self.targets:
                for stream in target.streams:
                    stream.abort()

    def _damage(self, run: object) -> None:
        """Mark what a run that was dropped writes: the work may go on, and is waited for before that is written."""
        from opweave.scheduler.run.failures import damage_states, written_by  # most runs are not ended early

        state = run.state if isinstance(run, Run) else run
        if isinstance(state, ProgramState) and not (isinstance(run, Run) and run.ended):
            damage_states(written_by(state.partition.splits), CANCELLED, self._wait_for_dropped)

    def _conclude_dropped(self) -> None:
        """Let the completion thread see the end of runs whose futures nobody will ask it for."""
        if self._in_flight and self._completion_thread is not None:
            with suppress(LifetimeError, IndexError):  # closed meanwhile, or ended
                self._hand_over(self._in_flight.conclude, self._in_flight[-1])

    def _wait_for_dropped(self) -> None:
        """Wait for runs that were ended early, which may not be possible at once."""
        with suppress(LifetimeError):  # in a forked child, where nothing goes on
            self.when_idle(int)

    @property
    def _tasks(self) -> list[RunTask[Any]]:
        """The runs that were submitted and have not ended, the first one first."""
        thread = self._completion_thread
        if thread is None:
            return []
        from opweave.futures import RunTask

        return [job for job in thread.jobs.copy() if isinstance(job, RunTask)]

    # --- the thread in which submitted runs end ---------------------------------------------------------------------

    def _hand_over(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Let the completion thread call ``work``, after everything that was handed over before."""
        from opweave.futures import Task  # importing opweave must not pay for it

        return self._put(Task(work, *args))

    def _put(self, task: Task[Any]) -> Future[Any]:
        with self._handing_over:
            self.check_open()
            if self._completion_thread is None:
                start_exit_thread()
                self._completion_thread = Worker("opweave runs")
                if not self._parallel:  # then they are whole runs
                    self._queued = self._completion_thread.jobs
            self._completion_thread.put(task)
            return task.future

    @property
    def _on_completion_thread(self) -> bool:
        return self._completion_thread is not None and self._completion_thread.is_current

    @property
    def _on_worker(self) -> bool:
        """Whether this thread is one that runs wait for."""
        return WORKING.active and any(isinstance(t.stream, WorkerStream) and t.stream.is_current for t in self.targets)

    # --- between runs -----------------------------------------------------------------------------------------------

    def when_idle(self, work: Callable[[], T]) -> T:
        """Call ``work`` while no run is in flight, after everything that was submitted before, and return its result.

        The caller must not hold the lock, which those runs take.
        """
        if self.inherited:
            self.check_open()
        if self._on_worker:
            raise SchedulerError("within a run that goes on meanwhile values are not read, written or waited for")
        if self._queued and not self._on_completion_thread and self._runner != get_ident():
            with suppress(LifetimeError):  # closed meanwhile: then they have ended
                self._hand_over(int).result()
        with self.lock:
            while self._in_flight:
                self._in_flight.conclude(self._in_flight[0])
            return work()

    def synchronize(self) -> None:
        """Wait until all submitted runs have ended and all streams are done."""
        self.when_idle(self._synchronize_streams)

    def _synchronize_streams(self) -> None:
        for target in self.targets:
            for stream in target.streams:
                stream.synchronize()

    def read_output(self, state: ProgramState, output: Tensor) -> Array:
        """The value of an output after the last run; raises `SchedulerError` if there is none any more."""

        def read() -> Array:
            shown = state.observed or state
            if shown.latest is None or self._last is not shown:
                raise SchedulerError(f"{output.describe()} has no value: run the program first, and read it "
                                     "before another program of its scheduler runs")  # fmt: skip
            return shown.latest.fetches[shown.partition.graph.outputs.index(output)].read()

        return self.when_idle(read)

    # --- programs ---------------------------------------------------------------------------------------------------

    def add(self, state: ProgramState) -> None:
        """Register a program. The executor refers to it weakly: its `Program` keeps it alive."""
        self._in_flight.programs.add(state)
        for run_list in state.lists:
            run_list.when_idle = self.when_idle

    @property
    def states(self) -> list[ProgramState]:
        """All registered programs that are alive."""
        return list(self._in_flight.programs)

    def observe(self, state: ProgramState, observed: ProgramState) -> None:
        """Let later runs of a program run ``observed`` instead."""
        with self.lock:
            state.check_open()
            if state.observed is not None:
                raise SchedulerError(f"{state!r} is being observed already")
            observed.written = state.written
            state.observed = observed
            self._ready = None

    def end_observing(self, state: ProgramState) -> None:
        """Runs that are submitted from here on are not observed any more."""
        observed = state.observed
        assert observed is not None
        self.check_closer()

        def end() -> None:
            state.observed = None
            self.end(observed)

        try:
            self.when_idle(end)
        finally:
            state.observed = None

    def end(self, state: ProgramState) -> None:
        """Close a program, where nothing is under way."""
        if state.closed:
            return
        state.closed = True
        state.latest = None
        if self._last is state:
            self._last = self._ready = None
        for run_list in state.lists:
            run_list.close()
        for lease in state.leases:
            lease.release()

    def close(self) -> None:
        """Refuse further runs, and wait for those that were submitted."""
        with self._handing_over:
            self.closed = True
        if self._completion_thread is not None:
            self._completion_thread.close()
            self._completion_thread.ended.wait()  # without the lock, which the runs take

    def after_fork(self) -> None:
        self.inherited = self.closed = True
        self._ready = self._last = None
        self.ownership.remaining = None
        self._queued, self._runner = (), 0
        self._in_flight.clear()
        thread, self._completion_thread = self._completion_thread, None
        for job in thread.jobs if thread is not None else ():
            job.future.abandon(LifetimeError(f"the run {INHERITED}"))  # type: ignore[attr-defined]
        for state in self._in_flight.programs:
            state.closed = True
        if not all(target.device.survives_fork for target in self.targets):
            keep_forever(self._in_flight.programs)  # with objects of the driver in them

    def step_under_way(self) -> str:
        """The node that is being computed, as far as it is known."""
        from opweave.scheduler.run.trace import step_under_way

        return step_under_way(self.targets, self.ownership, self.states)

    def count_copied(self, size: int) -> None:
        self.copied += size

    # --- who may do what --------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `LifetimeError` where the scheduler was closed."""
        if self.closed:
            over = ", ".join(target.name for target in self.targets)
            raise LifetimeError(f"<Scheduler over {over}> {INHERITED if self.inherited else 'was closed'}")

    def _check_program(self, state: ProgramState) -> None:
        if state.closed:
            self.check_open()  # says more where the whole scheduler was closed
            state.check_open()

    def check_caller(self) -> None:
        """Raise `SchedulerError` if this thread is within a run, and therefore must not run a program."""
        if self._on_worker or self._runner == get_ident():
            raise SchedulerError("a program cannot be run from within a run of its own scheduler")

    def check_closer(self, *, whole: bool = False) -> None:
        """Raise `SchedulerError` unless this thread may close programs now; with ``whole`` the scheduler."""
        if self._on_worker or self._runner == get_ident():
            raise SchedulerError("neither a scheduler nor its programs can be closed from within a run")
        if whole and self._on_completion_thread:
            raise SchedulerError("a scheduler cannot be closed from a callback of one of its futures, which holds up "
                                 "the runs behind it")  # fmt: skip


def _raise(_: object, error: BaseException) -> NoReturn:
    raise error
