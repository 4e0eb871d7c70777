"""`Scheduler`: runs one graph over several devices."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar
from weakref import WeakSet

from opweave import registry
from opweave.concurrency import Lock, Worker
from opweave.contract.device import Device
from opweave.contract.execution import Stream
from opweave.contract.memory import BufferType
from opweave.contract.space import WORKING
from opweave.contract.submission import Submission, end_iterator
from opweave.contract.worker import WorkerStream
from opweave.errors import Cancelled, HazardError, LifetimeError, SchedulerError
from opweave.graph.graph import Graph
from opweave.graph.tensor import Placement, Tensor
from opweave.host.device import HostDevice
from opweave.leaves import withdraw
from opweave.lifecycle import INHERITED, closed_at_exit, expect_waiting, keep_for_ever, told_of_forks
from opweave.scheduler.actions import settle_failure
from opweave.scheduler.arena import Arena, Lease
from opweave.scheduler.assign import assign
from opweave.scheduler.partition import Copy, Partition, Split, partition
from opweave.scheduler.program import Outputs, Program, device_of
from opweave.scheduler.running import Progress
from opweave.scheduler.target import Target, check_buffer_type
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.cost.predict import Prediction
    from opweave.futures import Future
    from opweave.scheduler.actions import Action
    from opweave.scheduler.lower import RunList
    from opweave.scheduler.report import Explanation
    from opweave.scheduler.running import Run

__all__ = ["PlannedGraph", "Scheduler", "Stats"]

T = TypeVar("T")

Where = Device | Stream | str

CANCELLED: Final = "the run was ended by cancel()"

PROGRAMS_KEPT: Final = 64
"""How many programs a scheduler remembers, so that building the same outputs again costs nothing."""


class Stats(NamedTuple):
    """What a scheduler has done since it was made.

    Attributes:
        built, reused: programs that were built, and builds that gave one that was there.
        runs: runs that began.
        copied: bytes that they copied between memories.
        allocated: bytes taken for temporaries.
    """

    built: int
    reused: int
    runs: int
    copied: int
    allocated: int


MOST_SLOTS: Final = 64
"""Runs that may overlap: each has memory of its own for inputs and for what crosses devices."""


class PlannedGraph:
    """A graph that was placed and cut, without memory. Made by `Scheduler.split`."""

    def __init__(self, parts: Partition) -> None:
        self.partition: Final = parts

    @property
    def splits(self) -> list[Split]:
        return self.partition.splits

    @property
    def copies(self) -> list[Copy]:
        return self.partition.copies

    @property
    def n_copies(self) -> int:
        return len(self.partition.copies)

    def device_of(self, tensor: Tensor) -> Device:
        """The device on which a node would run or a leaf would lie."""
        return device_of(self.partition, tensor)

    def cause_of(self, tensor: Tensor) -> str:
        """Why it was placed there: a key of ``opweave.scheduler.CAUSES``."""
        return self.partition.assignment.causes[tensor]

    @property
    def predicted(self) -> Prediction:
        """As `Program.predicted`; also for simulated devices."""
        from opweave.cost.predict import prediction_of

        return prediction_of(self.partition)

    def explain(self) -> Explanation:
        """As `Program.explain`, but for memory."""
        from opweave.scheduler.report import explain

        return explain(self.partition)


class Scheduler:
    """Places each operation on a device that supports it, copies across the seams, plans the memory, says why.

    Args:
        devices: devices, streams or names, earlier ones preferred. Streams that it opens itself are closed with it.
        parallel: let successive runs of a program overlap, each device working on another one (`Program.submit`).
            Every device gets a thread, inputs and values at the seams get memory for several runs. ``True``: as many
            slots as there are devices (2 to 4), a number: so many.
        op_offload: a device may bring weights from host memory for operations that it runs much faster.
        buffer_types: device or its name -> the kind of memory for its temporaries, where not its ordinary one.
        placement: ``"priority"``: by the rules of `opweave.scheduler.assign`, earlier devices preferred. ``"cost"``: as
            a run is predicted to take least time by the devices' profiles (`opweave.profile`), which are measured at
            the first build where there are none.

    Raises:
        SchedulerError: no devices, one named twice, a buffer type that its device cannot reach or kernels cannot write,
            no such placement or number of slots.
        UnknownNameError, PluginError: a name that is no device, or one of a plugin that failed.
    """

    def __init__(
        self,
        devices: Where | Sequence[Where],
        *,
        parallel: bool | int = False,
        op_offload: bool = True,
        buffer_types: Mapping[Device | str, BufferType] | None = None,
        placement: Literal["priority", "cost"] = "priority",
    ) -> None:
        if placement not in ("priority", "cost"):
            raise SchedulerError(f"placement is 'priority' or 'cost', not {placement!r}")
        self.placement: Final = placement
        if not isinstance(parallel, int) or not 0 <= parallel <= MOST_SLOTS:
            raise SchedulerError(
                f"parallel is True, False or a number of slots, not {parallel!r:.60} (at most {MOST_SLOTS})"
            )
        if not isinstance(buffer_types, (Mapping, type(None))):
            raise SchedulerError(f"buffer_types are a mapping of devices to kinds of memory, not {buffer_types!r:.60}")
        if not isinstance(devices, (Device, Stream, Iterable)):
            raise SchedulerError(f"a scheduler runs on devices, streams, or names of devices, not on {devices!r:.60}")
        given = [devices] if isinstance(devices, (Device, Stream, str)) else list(devices)
        if not given:
            raise SchedulerError("a scheduler needs at least one device")
        kinds = {k if isinstance(k, str) else k.name: v for k, v in (buffer_types or {}).items()}
        resolved = [registry.device(d) if isinstance(d, str) else d for d in given]
        for item in resolved:
            if not isinstance(item, (Device, Stream)):
                raise SchedulerError(f"a scheduler runs on devices, streams, or names of devices, not on {item!r}")
        names = [d.name if isinstance(d, Device) else d.device.name for d in resolved if isinstance(d, Device)]
        if len(set(names)) != len(names):
            raise SchedulerError(f"a device is named twice: {', '.join(names)}; give two streams of it instead")
        self._progress: Final = Progress()
        submission = Submission()  # one turn for all of its own streams, of which it uses one after the other
        self._lock: Final = self._progress.lock
        self._giving: Final = Lock()
        self._flying: Final[deque[Run]] = deque()
        self._ender: Worker | None = None  # the thread in which submitted runs end
        self._alive: Final[WeakSet[Program]] = WeakSet()
        self._builds = [0, 0]
        self._closed = False
        self._inherited = False
        self._pins: dict[Tensor, int] = {}
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._host: Final = HostDevice()
        self._targets: Final[list[Target]] = []
        try:
            for index, item in enumerate(resolved):
                device = item if isinstance(item, Device) else item.device
                kind = kinds.pop(device.name, None)
                check_buffer_type(device, kind)
                stream = item if isinstance(item, Stream) else item.open(worker=True) if parallel else item.open()
                if parallel and not isinstance(stream, WorkerStream):
                    raise SchedulerError(f"{stream!r} has no thread of its own, which parallel=True needs: "
                                         "give the device, or device.open(worker=True)")  # fmt: skip
                target = Target(index, stream, kind, owned=stream is not item)
                if target.owned and not stream.is_async:
                    stream._submission = submission
                self._targets.append(target)
            if kinds:
                raise SchedulerError(f"buffer types for devices that are not here: {', '.join(kinds)}")
        except BaseException:
            self._close_streams()
            raise
        self._op_offload: Final = op_offload
        self._buffer_types: Final = dict(buffer_types or {})
        self.parallel: Final = bool(parallel)
        self.n_slots: Final = (
            1 if not parallel else min(max(len(self._targets), 2), 4) if parallel is True else int(parallel)
        )
        self._arenas: Final = [Arena(target) for target in self._targets]
        self._reserved: Final[list[Lease]] = []
        told_of_forks(self)
        closed_at_exit(self, first=True)

    def __repr__(self) -> str:
        return f"<Scheduler over {', '.join(target.name for target in self._targets)}>"

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def devices(self) -> tuple[Device, ...]:
        """In order of priority."""
        return tuple(target.device for target in self._targets)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """One for each device, in the same order."""
        return tuple(target.stream for target in self._targets)

    def buffer_type(self, device: Where) -> BufferType:
        """The kind of memory that temporaries of a device lie in."""
        return self._targets[self._index(device)].buffer_type

    def buffer_size(self, device: Where) -> int:
        """Bytes that are allocated for temporaries on a device."""
        return self._arenas[self._index(device)].nbytes

    # --- building ---------------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor, device: Where | None) -> None:
        """Let a node run on one device from the next build on; ``None`` lifts the pin."""
        with self._lock:
            self._pins.pop(tensor, None)
            if device is not None:
                self._pins.update(self._resolve_pins({tensor: device}))

    def build(
        self,
        outputs: Outputs,
        pins: Mapping[Tensor, Where] | None = None,
        placements: Iterable[Placement] = (),
    ) -> Program:
        """A program that computes ``outputs``: a tensor, a sequence or a mapping of tensors.

        Asking for the same outputs again gives the same program, unless leaves were placed elsewhere meanwhile or their
        buffers got another usage.

        Args:
            pins: computed tensor -> the device that must run it.
            placements: memory for computed tensors that the caller decided (`opweave.place`).

        Raises:
            UnsupportedOpError: a node that no device runs, with every device's reason.
            HazardError: reads and writes of one state that have no order.
            AllocationError: a device has no room.
            SchedulerError: pins to devices that are not here, leaves without bytes, a simulated device.
        """
        with self._lock:
            self._check_open()
            for target in self._targets:
                if target.device.simulated:
                    from opweave.whatif.simulate import simulated_error

                    raise simulated_error(target.device)
            tensors, form = _form(outputs)
            pinned = {**self._pins, **self._resolve_pins(pins or {})}
            placed = _check_placements(placements)
            key = (form, tensors, tuple(pinned.items()), tuple(placed.values()))
            known = self._programs.get(key)
            if known is not None and known.is_current:
                self._programs.move_to_end(key)
                self._builds[1] += 1
                return known
            start = perf_counter_ns()
            with _COLLECTOR.away():
                program = Program(self, self._partition(tensors, pinned, placed), outputs, pinned)
            if TRACE.listening:
                TRACE.emit("build", repr(program), start, perf_counter_ns(), nodes=len(program.partition.graph.nodes))
            registry.program_built(program)
            self._programs[key] = program
            self._programs.move_to_end(key)
            self._builds[0] += 1
            while len(self._programs) > PROGRAMS_KEPT:
                self._programs.popitem(last=False)
            for arena in self._arenas:
                arena.reclaim()
            return program

    def split(self, outputs: Outputs, pins: Mapping[Tensor, Where] | None = None) -> PlannedGraph:
        """Place and cut without taking memory; leaves need no bytes."""
        with self._lock:
            self._check_open()
            tensors, _ = _form(outputs)
            return PlannedGraph(self._partition(tensors, {**self._pins, **self._resolve_pins(pins or {})}, {}))

    def reserve(self, *outputs: Outputs) -> dict[str, int]:
        """Take memory for the largest graphs that will come, so that later builds allocate nothing. Kept until `reset`.

        Returns:
            Bytes allocated for temporaries by device.

        Raises:
            AllocationError: a device has no room.
        """
        for output in outputs:
            self._reserved.extend(lease.again() for lease in self.build(output)._leases)
        return {target.name: arena.nbytes for target, arena in zip(self._targets, self._arenas, strict=True)}

    def _partition(
        self,
        tensors: tuple[Tensor, ...],
        pins: Mapping[Tensor, int],
        placed: Mapping[Tensor, Placement],
        observed: Collection[Tensor] = (),
    ) -> Partition:
        graph = Graph(tensors)
        if self.placement == "cost":
            from opweave.cost.place import place_by_cost  # importing opweave must not pay for it

            return place_by_cost(graph, self._targets, pins, self._op_offload, placed, observed)
        return partition(graph, assign(graph, self._targets, pins, self._op_offload, placed), placed, observed)

    def _resolve_pins(self, pins: Mapping[Tensor, Where]) -> dict[Tensor, int]:
        if not isinstance(pins, Mapping):
            raise SchedulerError(f"pins are a mapping of computed tensors to devices, not {pins!r:.60}")
        resolved = {}
        for tensor, where in pins.items():
            if not isinstance(tensor, Tensor) or tensor.root.op is None:
                raise SchedulerError(f"only computed tensors are pinned, not {tensor!r}; place leaves when making them")
            resolved[tensor.root] = self._index(where)
        return resolved

    def _index(self, where: Where) -> int:
        if not isinstance(where, (str, Device, Stream)):
            raise SchedulerError(f"a device, a stream or the name of a device, not {where!r:.60}")
        name = where if isinstance(where, str) else where.name if isinstance(where, Device) else where.device.name
        for target in self._targets:
            if where is target.device or where is target.stream:
                return target.index
        if isinstance(where, str):
            wanted = name.lower()
            for target in self._targets:
                if target.name.lower() == wanted or target.name.lower().split(":")[0] == wanted:
                    return target.index
        raise SchedulerError(f"{name!r} is not a device of {self!r}")

    # --- runs -------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What was built, run, allocated and copied so far."""
        built, reused = self._builds
        progress = self._progress
        return Stats(built, reused, progress.begun, progress.copied, sum(arena.allocated for arena in self._arenas))

    def synchronize(self) -> None:
        """Wait until all submitted runs have ended and all streams are done.

        Runs that failed raise from their futures and not here.
        """
        self._when_quiet(self._synchronize_streams)

    def _synchronize_streams(self) -> None:
        for target in self._targets:
            for stream in target.streams:
                stream.synchronize()

    def cancel(self) -> None:
        """End the runs that are under way, from any thread; they raise `Cancelled`.

        A plan ends after its present step, where the device can; states that it writes may be half written.
        """
        progress = self._progress
        if progress.runner or self._flying:
            progress.cut = CANCELLED
            if progress.rest is not None:
                end_iterator(progress.rest)
            for target in self._targets:
                for stream in target.streams:
                    stream.abort()

    def _check_caller(self) -> None:
        """Whether this thread may run something now: not from within a run."""
        if self._on_worker or self._progress.runner == get_ident():
            raise SchedulerError("a program cannot be run from within a run of its own scheduler")

    def _check_closer(self, *, whole: bool = False) -> None:
        """Whether this thread may close programs now, or the whole scheduler."""
        if self._on_worker or self._progress.runner == get_ident():
            raise SchedulerError("neither a scheduler nor its programs can be closed from within a run")
        if whole and self._on_ender:
            raise SchedulerError("a scheduler cannot be closed from a callback of one of its futures, which holds up "
                                 "the runs behind it")  # fmt: skip

    @property
    def _on_worker(self) -> bool:
        """Whether this thread is one that runs wait for."""
        return WORKING.active and any(isinstance(s, WorkerStream) and s.is_current for s in self.streams)

    @property
    def _on_ender(self) -> bool:
        """Whether this thread is the one in which runs end."""
        return self._ender is not None and self._ender.is_current

    def _hand_over(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have the thread in which runs end do something; it ends in the order in which it was handed over."""
        from opweave.futures import Task  # importing opweave must not pay for it

        with self._giving:
            self._check_open()
            if self._ender is None:
                expect_waiting()
                self._ender = Worker("opweave runs")
                if not self.parallel:  # then they are whole runs
                    self._progress.queued = self._ender.jobs
            task: Task[Any] = Task(work, *args)
            self._ender.put(task)
            return task.future

    @property
    def _behind(self) -> bool:
        """Whether this thread has to wait for runs that were submitted; callbacks of futures hold them up."""
        return bool(self._progress.queued) and not self._on_ender

    def _count_copied(self, size: int) -> None:
        self._progress.copied += size

    def _make_room(self) -> None:
        """Wait until one more run may be under way."""
        while len(self._flying) > (2 * self.n_slots - 1 if self.parallel else 0):
            self._conclude(self._flying[0])

    def _switch(self, program: Program, listed: RunList) -> None:
        """Have the streams wait for runs of another program: their memory lies over each other."""
        for run in self._flying:
            for end in run.ends:
                for stream in listed.streams:
                    stream.wait(end)
        self._progress.last = program

    def _note(self, run: Run) -> None:
        """All of a run was submitted."""
        if run.ends:
            self._flying.append(run)
        else:
            run.ended = True
            run.program._latest = run.listed

    def _conclude(self, run: Run) -> None:
        """Wait for a run, and for those before it. Its failure is noted on it, not raised."""
        for other in [*self._flying]:
            if run.ended:
                return
            error: BaseException | None = None
            try:
                other.wait()
            except Exception as failure:
                error = failure
            with self._lock:
                if not other.ended:
                    if error is not None:
                        self._settle(other, error, None)
                    else:
                        other.ended = True
                        other.program._latest = other.listed
                        self._flying.remove(other)
            if other is run:
                return

    def _settle(self, run: Run, error: BaseException, action: Action | None) -> BaseException:
        """Leave everything usable after a run failed, and those that were under way with it; gives what to raise."""
        failed = []
        for other in [*self._flying, run]:
            if other.ended or other in failed:
                continue
            if other is not run:
                try:
                    other.wait()
                except Exception:
                    failed.append(other)
                else:
                    other.ended = True
            else:
                failed.append(run)
        splits: list[Split] = []
        for other in failed:
            last = action.split if other is run and action is not None else None
            splits += other.program.partition.splits[: None if last is None else last.index + 1]
        actions = [a for other in failed for a in other.listed.actions]
        reason = settle_failure(error, action, actions, self._targets, splits, anywhere=bool(self._progress.cut))
        if self._progress.cut and isinstance(reason, Cancelled):
            reason = Cancelled(self._progress.cut)
        for other in failed:
            if other is failed[0]:
                other.fail(reason)
            else:
                other.fail_with(reason)
        self._flying.clear()
        for program in self._alive:
            program._forget_marks()
        assert run.error is not None
        return run.error

    def _when_quiet(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, called while nothing is under way, after everything that was submitted before.

        The caller does not hold the lock, which those runs want.
        """
        if self._inherited:
            self._check_open()
        if self._on_worker:
            raise SchedulerError("within a run that goes on meanwhile values are not read, written or waited for")
        if self._behind and self._progress.runner != get_ident():
            with suppress(LifetimeError):  # closed meanwhile: then they have ended
                self._hand_over(int).result()
        with self._lock:
            while self._flying:
                self._conclude(self._flying[0])
            return work()

    # --- end --------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Close all programs, lift all pins and give their memory back; the scheduler can be used again."""
        self._check_closer()
        self._when_quiet(self._end_all)

    def _end_all(self) -> None:
        for program in list(self._alive):  # those too that are no longer remembered
            program._end()
        self._programs.clear()
        self._pins.clear()
        self._reserved.clear()
        for arena in self._arenas:
            arena.free()

    def without(self, device: Where) -> Scheduler:
        """A scheduler over the other devices, for going on when one is lost. This one is closed.

        Leaves that lie on the device are taken from it: weights go back to the host arrays that they were made of, and
        from there to wherever new programs want them. States keep their values where the device can still be read; if
        not, they refuse reads until they are written anew. Graphs stay as they are: build their outputs again.

        Args:
            device: one of this scheduler, e.g. ``error.device`` of an `ExecutionError`.

        Raises:
            SchedulerError: not a device of this scheduler, or the only one; weights whose only copy is lost; called as
                `close` may not be.
        """
        self._check_closer(whole=True)
        lost = self._targets[self._index(device)]
        rest = [target for target in self._targets if target is not lost]
        if not rest:
            raise SchedulerError(f"{lost.name} is the only device of {self!r}")
        self._when_quiet(partial(self._withdraw_leaves, lost.device))
        with suppress(Exception):  # a lost device may refuse to be closed in order; nothing is left to save on it
            self.close()
        kinds = {k: v for k, v in self._buffer_types.items() if (k if isinstance(k, str) else k.name) != lost.name}
        return Scheduler(
            [target.device if target.owned else target.stream for target in rest],
            parallel=self.n_slots if self.parallel else False,
            op_offload=self._op_offload,
            buffer_types=kinds,
            placement=self.placement,
        )

    def _withdraw_leaves(self, device: Device) -> None:
        leaves = {t: None for program in list(self._alive) for t in program.partition.graph.leaves}
        for tensor in leaves:
            withdraw(tensor, device)

    def close(self) -> None:
        """Close programs and the streams that it opened, and free its memory, after submitted runs have ended.

        Closing twice does nothing.

        Raises:
            SchedulerError: called from within a run, or from a callback of one of its futures.
        """
        if self._inherited:
            return
        self._check_closer(whole=True)
        with self._giving:
            self._closed = True  # nothing is submitted from here on
        if self._ender is not None:
            self._ender.close()
            self._ender.ended.wait()  # without the lock, which the runs want
        with self._lock:
            try:
                self.reset()
            finally:
                self._close_streams()

    def _close_streams(self) -> None:
        with ExitStack() as stack:  # all of them, whatever one of them raises
            for target in reversed(self._targets):
                stack.callback(target.close)

    def _forget(self, program: Program) -> None:
        for key, known in list(self._programs.items()):
            if known is program:
                del self._programs[key]
        if self._progress.last is program:
            self._progress.last = self._progress.ready = None

    def _check_open(self) -> None:
        if self._closed:
            raise LifetimeError(f"{self!r} {INHERITED if self._inherited else 'was closed'}")

    def _inherit(self) -> None:
        self._inherited = self._closed = True
        progress = self._progress
        progress.ready = progress.last = progress.rest = None
        progress.queued, progress.runner = (), 0
        self._flying.clear()
        ender, self._ender = self._ender, None
        for job in ender.jobs if ender is not None else ():
            job.future.abandon(LifetimeError(f"the run {INHERITED}"))  # type: ignore[attr-defined]
        for program in self._alive:
            program._closed = True
        if not all(target.device.survives_fork for target in self._targets):
            keep_for_ever([*self._alive, *self._programs.values(), *self._arenas])  # with objects of the driver in them

    def _under_way(self) -> str:
        """The node that is being computed, as far as it is known."""
        from opweave.scheduler.underway import step_under_way

        return step_under_way(self._targets, self._progress, list(self._alive))


def _check_placements(placements: Iterable[Placement]) -> dict[Tensor, Placement]:
    """Placements of computed tensors, checked against each other."""
    placed: dict[Tensor, Placement] = {}
    if not isinstance(placements, Iterable):
        raise SchedulerError(f"placements are a sequence of what ow.place made, not {placements!r:.60}")
    for made in placements:
        if not isinstance(made, Placement):
            raise SchedulerError(f"placements are what ow.place made; one of them is {made!r:.60}")
        if made.tensor.op is None or made.tensor.memory is not made.tensor:
            raise SchedulerError(f"{made.tensor.describe()} is not a computed tensor with memory of its own")
        made.buffer.check(made.offset, made.buffer.type.alloc_size(made.tensor))
        for other in placed.values():
            apart = (
                made.offset + made.tensor.nbytes <= other.offset or other.offset + other.tensor.nbytes <= made.offset
            )
            if other.buffer is made.buffer and not apart:
                raise HazardError(f"{made.tensor.describe()} is placed over {other.tensor.describe()}")
        placed[made.tensor] = made
    return placed


def _form(outputs: Outputs) -> tuple[tuple[Tensor, ...], Any]:
    """The output tensors, and a hashable word for the form in which results are returned."""
    if isinstance(outputs, Tensor):
        return (outputs,), "one"
    if not isinstance(outputs, Iterable):
        raise SchedulerError(f"outputs are a tensor, a sequence or a mapping of tensors, not {outputs!r:.60}")
    tensors: tuple[Tensor, ...] = tuple(outputs.values() if isinstance(outputs, Mapping) else outputs)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise SchedulerError(f"outputs are tensors, one, a sequence or a mapping; one of them is {tensor!r:.60}")
    return tensors, tuple(outputs) if isinstance(outputs, Mapping) else "many"


class _Collector:
    """Keeps Python's collector of cycles out of builds, which make many objects that stay and no garbage.

    What a large build made is put where it is not walked through soon, which would cost as much as the build. The
    collector does not count these objects, and would not come for those that were given up; so they are counted here.
    """

    LARGE: Final = 100_000
    """Objects from which a build is large: less is collected in a millisecond or two."""

    MANY: Final = 2_000_000
    """Objects of large builds after which everything is walked through, before the next build."""

    def __init__(self) -> None:
        self.parked = 0

    @contextmanager
    def away(self) -> Iterator[None]:
        if not gc.isenabled():
            yield
            return
        if self.parked > self.MANY:
            gc.collect()
            self.parked = 0
        gc.disable()
        try:
            yield
        finally:
            made = gc.get_count()[0]
            if made > self.LARGE and not gc.get_freeze_count():
                # There and back, objects arrive in the oldest generation without having been walked through.
                gc.freeze()
                gc.unfreeze()
                self.parked += made
            gc.enable()


_COLLECTOR: Final = _Collector()
