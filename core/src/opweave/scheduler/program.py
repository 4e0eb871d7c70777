"""`Program`: a graph that was placed, planned and compiled, to be run many times.

Everything that can be decided is decided when it is built; `run` feeds, calls, and fetches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import length_hint
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np

from opweave.contract.buffer import Buffer
from opweave.contract.space import CHANGES
from opweave.contract.step import Call
from opweave.dlpack import host_view
from opweave.errors import (
    AllocationError,
    Cancelled,
    DTypeError,
    ExecutionError,
    LifetimeError,
    SchedulerError,
    ShapeError,
    UnknownNameError,
)
from opweave.graph.tensor import Tensor
from opweave.leaves import read_leaf, write_state
from opweave.scheduler.actions import Action, Feed
from opweave.scheduler.allocate import MemoryUse
from opweave.scheduler.bind import Binder
from opweave.scheduler.joint import Joint
from opweave.scheduler.lower import RunList, run_lists
from opweave.scheduler.partition import Partition, Split
from opweave.scheduler.placements import Placements
from opweave.scheduler.running import Run
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.cost.predict import Prediction
    from opweave.futures import Future
    from opweave.scheduler.report import Explanation
    from opweave.scheduler.scheduler import Scheduler

__all__ = ["MemoryMap", "Program", "Region"]

Array = np.ndarray[Any, Any]
Outputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


class Region(NamedTuple):
    """``size`` bytes from ``offset`` on in ``buffer``."""

    buffer: Buffer
    offset: int
    size: int


class MemoryMap(NamedTuple):
    """Where the values of a program lie, for tools that show or check it. Places are those of ``Program.partition``.

    Attributes:
        places: place -> its bytes. Values that live only inside a fused group have none.
        workspaces: (index of the split, index of the group in it) -> the group's scratch memory.
        groups: for every split its groups, each the indices of the items that run as one.
    """

    places: dict[int, Region]
    workspaces: dict[tuple[int, int], Region]
    groups: list[list[list[int]]]


class Program:
    """Made by `Scheduler.build`. Thread-safe: runs of one scheduler's programs take turns.

    Attributes:
        partition: the graph as it was cut.
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_closed",
        "_copied",
        "_feeds",
        "_form",
        "_latest",
        "_leases",
        "_lists",
        "_moves",
        "_offsets",
        "_pins",
        "_placements",
        "_planned",
        "_progress",
        "_scheduler",
        "_scratch",
        "_single",
        "_states",
        "_targets",
        "_turn",
        "_watching",
        "_written",
        "partition",
    )  # fmt: skip

    def __init__(
        self,
        scheduler: Scheduler,
        partition: Partition,
        outputs: Outputs,
        pins: Mapping[Tensor, int],
        show: Callable[[Tensor, Call], None] | None = None,
    ) -> None:
        self._scheduler: Final = scheduler
        self._progress: Final = scheduler._progress
        self._pins: Final = pins
        self._watching: Program | None = None  # the same with observers, while there are any
        self.partition: Final = partition
        self._form: Final = outputs
        self._single: Final = isinstance(outputs, Tensor)
        self._closed = False
        self._targets: Final = partition.assignment.targets
        self._written: dict[str, Array] = {}  # fed to runs that do not say otherwise
        self._latest: RunList | None = None  # of the last run, if it was a good one
        binder = _bind(partition, scheduler, show)
        self._lists: Final = run_lists(binder, overlapping=scheduler.parallel, count=scheduler._count_copied)
        self._turn = 0
        self._planned: Final = binder.planned
        self._leases: Final = binder.leases
        self._buffers: Final = binder.buffers
        self._offsets: Final = binder.offsets
        self._moves: Final = binder.moves
        self._scratch: Final = binder.scratch
        self._feeds: Final = self._lists[0].feeds
        # Copies of chosen rows count what they move when they do.
        self._copied: Final = sum(copy.nbytes for copy in partition.copies if copy.ids is None)
        scheduler._alive.add(self)
        leaves = [tensor.leaf for tensor in partition.graph.leaves]
        self._states: Final = [leaf for leaf in leaves if leaf is not None and leaf.kind == "state"]
        self._placements: Final = Placements(partition.graph.leaves)

    def __repr__(self) -> str:
        nodes, splits = len(self.partition.graph.nodes), len(self.partition.splits)
        return f"<Program of {nodes} nodes in {splits} splits{', closed' if self._closed else ''}>"

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[Any, Any] | None = None, /, **named: Any) -> Any:
        """Run once.

        Args:
            feeds: input tensor or name -> array of its shape and dtype (numbers and sequences are converted).
            named: the same by keyword.

        Returns:
            New arrays in the form of the outputs that the program was built for: one array, a tuple, or a dict.

        Raises:
            ShapeError, DTypeError, UnknownNameError, SchedulerError: feeds that do not fit, before anything runs.
            ExecutionError: a node failed; names it, its device, and states that may be half written. Those refuse to
                be read until they are written anew; everything else can be used again.
            Cancelled: `Scheduler.cancel` was called meanwhile.
            LifetimeError: the program or its scheduler was closed.
        """
        progress = self._progress
        with progress.lock:
            # Run again with nothing in between: there is nothing to look at but what was fed.
            if progress.ready is self and not progress.queued and not TRACE.listening:
                return self._make(self._fitting(feeds, named) if feeds is not None or named or self._feeds else ())
        watching = self._watching
        if watching is not None:
            with self._unless_ended(watching):
                return watching.run(feeds, **named)
        scheduler = self._scheduler
        if scheduler._behind:
            return self.submit(feeds, **named).result()  # behind what was submitted before
        with scheduler._lock:
            ready = self._fitting(feeds, named)
            if not scheduler.parallel:
                return self._run_here(ready)
            run = self._begin(ready, snapshot=False)
        return self._ended(run)

    def submit(self, feeds: Mapping[Any, Any] | None = None, /, **named: Any) -> Future[Any]:
        """Run once, beside the caller; runs end in the order in which they were submitted.

        Fed arrays may be overwritten when this returns, except those of inputs that were made with ``borrowed=True``.
        With ``Scheduler(parallel=True)`` successive runs overlap; at most twice as many as there are slots are under
        way, and a further one waits here.

        Returns:
            A future whose ``result()`` is what `run` returns or raises. (``asyncio.wrap_future`` makes it awaitable.)

        Raises:
            ShapeError, DTypeError, UnknownNameError, SchedulerError, LifetimeError: as `run`, at once.
        """
        watching = self._watching
        if watching is not None:
            with self._unless_ended(watching):
                return watching.submit(feeds, **named)
        scheduler = self._scheduler
        scheduler._check_caller()
        if self._closed:
            scheduler._check_open()
            raise LifetimeError(f"{self!r} was closed")
        if scheduler.parallel:
            with scheduler._lock:
                scheduler._check_open()
                ready = self._fitting(feeds, named)
                try:
                    run = self._begin(ready, snapshot=True)
                except (ExecutionError, Cancelled) as error:
                    # It may be the failure of a run before this one, which came to light while this one was queued.
                    return scheduler._hand_over(_raise, error)
                return scheduler._hand_over(self._ended, run)
        ready = [(feed, _kept(feed, value)) for feed, value in self._fitting(feeds, named)]
        return scheduler._hand_over(self._run_queued, ready)

    def _run_queued(self, ready: list[tuple[Feed, Array]]) -> Any:
        with self._scheduler._lock:
            return self._run_here(ready)

    def _run_here(self, ready: list[tuple[Feed, Array]]) -> Any:
        """A whole run. The caller holds the scheduler's lock, and keeps it until everything is done."""
        if self._lists[0].joint is None or TRACE.listening:
            return self._ended(self._begin(ready, snapshot=False))
        self._admit()
        return self._make(ready)

    def _make(self, ready: Sequence[tuple[Feed, Array]]) -> Any:
        """Feed, make the calls in one row, and fetch.

        As short as can be: among kernels that fill the caches, each line of code and each object that a run touches
        takes its time to come back.
        """
        progress, listed = self._progress, self._lists[0]
        progress.ready = None
        if self._states:
            self._check_states()
        joint = listed.joint
        if joint is None:
            raise self._given_up(listed)
        submission, thread = joint.submission, get_ident()
        if submission.thread not in (0, thread):
            raise joint.stream._busy_error()
        feed = None
        rest = iter(joint.calls)
        with submission.lock:
            before, outer = submission.thread, submission.remaining  # of a plan that this run is a part of
            try:
                progress.runner = submission.thread = thread
                progress.begun += 1
                if self._copied:
                    progress.copied += self._copied
                progress.cut = ""
                if outer is None:
                    submission.cancel_reason = ""
                submission.remaining = rest
                for feed, value in ready:
                    if feed.view is not None:
                        feed.view[...] = value  # half the time of np.copyto
                    elif feed.put is not None:
                        feed.put(value)
                feed = None
                joint.stream._run(rest)
                if progress.cut or submission.cancel_reason:
                    raise Cancelled(progress.cut or submission.cancel_reason)
            except BaseException as error:
                progress.cut = progress.cut or submission.cancel_reason
                run = Run(self, listed)
                run.feeding = feed
                failure = self._failed(run, error, len(joint.calls) - length_hint(rest) - 1, joint)
                raise failure from failure.__cause__
            finally:
                submission.remaining = outer
                submission.thread = before
                progress.runner = 0
        self._latest = listed
        progress.last = progress.ready = self
        if self._single:
            fetch = listed.fetches[0]
            try:
                return fetch.read()
            except Exception as error:
                raise fetch.failed(error) from error
        return self._formed([fetch.get() for fetch in listed.fetches])

    def _ended(self, run: Run) -> Any:
        if not run.ended:
            self._scheduler._conclude(run)
        return self._formed(run.arrays())

    def _begin(self, ready: list[tuple[Feed, Array]], *, snapshot: bool) -> Run:
        """Feed, and make or queue the calls. The caller holds the scheduler's lock."""
        self._admit()
        scheduler, progress, listed = self._scheduler, self._progress, self._lists[self._turn]
        self._turn = (self._turn + 1) % len(self._lists)
        run = Run(self, listed)
        calls = _told(listed) if TRACE.listening else listed.calls
        self._latest = None
        rest = iter(calls)
        try:
            progress.runner = get_ident()
            progress.begun += 1
            progress.copied += self._copied
            progress.cut = ""
            progress.rest = rest
            if progress.last is not self:
                scheduler._switch(self, listed)
            run.feed(ready, snapshot=snapshot)
            for call in rest:
                call()
            if progress.cut:
                raise Cancelled(progress.cut)
            run.close()
        except BaseException as error:
            failure = self._failed(run, error, len(calls) - length_hint(rest) - 1)
            raise failure from failure.__cause__
        finally:
            progress.rest = None
            progress.runner = 0
        scheduler._note(run)
        return run

    def _admit(self) -> None:
        """Whether a run may begin now; waits until there is room for it."""
        scheduler = self._scheduler
        scheduler._check_caller()
        self._progress.ready = None
        if self._closed:
            scheduler._check_open()
            raise LifetimeError(f"{self!r} was closed")
        self._check_states()
        if scheduler._flying:
            scheduler._make_room()
        if self._lists[self._turn].ended:
            raise self._given_up(self._lists[self._turn])

    def _check_states(self) -> None:
        for state in self._states:
            if state.damaged:
                raise ExecutionError(state.damaged, states=(state.name,))

    def _given_up(self, listed: RunList) -> LifetimeError:
        return LifetimeError(f"{self!r} cannot run: {listed.ended}")

    def _failed(self, run: Run, error: BaseException, index: int, joint: Joint | None = None) -> BaseException:
        """Leave everything usable after call number ``index`` failed (negative: none did); gives what to raise."""
        action = None
        # A run that was cut short does not know where: its list was run to its end without calling.
        if index >= 0 and not self._progress.cut:
            if joint is not None:
                error, action = joint.blame(index, error)
            else:
                action = run.listed.actions[index]
        if run.feeding is not None and run.feeding.target is not None:
            action = Action("feed", run.feeding.target, None, tensor=run.feeding.tensor)
        self._latest = None
        return self._scheduler._settle(run, error, action)

    def _fitting(self, feeds: Mapping[Any, Any] | None, named: Mapping[str, Any]) -> list[tuple[Feed, Array]]:
        """A value for every input, checked."""
        given = {**named}
        if feeds is not None:
            if type(feeds) is not dict and not isinstance(feeds, Mapping):
                what = type(feeds).__name__
                raise SchedulerError(f"values are fed as {{input or its name: array}}, or by name, not as {what}")
            given = {(key if type(key) is str else _name(key)): value for key, value in feeds.items()} | given
        ready: list[tuple[Feed, Array]] = []
        for name, feed in self._lists[self._turn].feeds.items():
            value = given.pop(name, None)
            if value is None:
                value = self._written.get(name)
                if value is None:
                    raise SchedulerError(f"no value for {feed.tensor.describe()}: run({{{name!r}: array}})")
            if type(value) is not np.ndarray or value.shape != feed.shape or value.dtype != feed.dtype:
                value = _fit(feed, value)
            ready.append((feed, value))
        if given:
            name = str(next(iter(given)))
            raise UnknownNameError("input of this program", name, self._feeds)
        return ready

    def _formed(self, arrays: list[Array]) -> Any:
        form = self._form
        if self._single:
            return arrays[0]
        if isinstance(form, Mapping):
            return dict(zip(form, arrays, strict=True))
        return tuple(arrays)

    # --- values between runs ----------------------------------------------------------------------------------------

    def write(self, tensor: Tensor | str, values: Any) -> None:
        """Set a state, or an input for all later runs that do not feed it.

        Raises:
            ShapeError, DTypeError: values that do not fit.
            SchedulerError: neither an input nor a state of this program.
        """
        leaf = self._leaf(tensor)
        if leaf.leaf is not None and leaf.leaf.kind == "state":
            self._scheduler._when_quiet(partial(write_state, leaf, values))
        else:
            feed = self._feeds[leaf.name]
            self._written[leaf.name] = np.array(_fit(feed, values), copy=True)

    def read(self, tensor: Tensor | str) -> Array:
        """The present value of a state, weight or constant, or of an output after the last run, as a new array.

        Raises:
            SchedulerError: a value that is not kept; make it an output.
        """
        watching = self._watching
        if watching is not None:
            with self._unless_ended(watching):
                return watching.read(tensor)
        if isinstance(tensor, Tensor) and tensor in self.partition.graph.outputs:
            return self._scheduler._when_quiet(partial(self._read_output, tensor))
        leaf = self._leaf(tensor) if isinstance(tensor, str) else tensor
        return self._scheduler._when_quiet(partial(read_leaf, leaf))

    def _read_output(self, tensor: Tensor) -> Array:
        if self._latest is None or self._progress.last is not self:
            raise SchedulerError(f"{tensor.describe()} has no value: run the program first, and read it "
                                 "before another program of its scheduler runs")  # fmt: skip
        return self._latest.fetches[self.partition.graph.outputs.index(tensor)].read()

    def _leaf(self, tensor: Tensor | str) -> Tensor:
        leaves = {t.name: t for t in self.partition.graph.leaves if t.leaf and t.leaf.kind in ("input", "state")}
        name = tensor if isinstance(tensor, str) else tensor.name
        found = leaves.get(name)
        if found is None or (isinstance(tensor, Tensor) and tensor is not found):
            raise UnknownNameError("input or state of this program", name, leaves)
        return found

    # --- looking on -------------------------------------------------------------------------------------------------

    @contextmanager
    def observe(
        self,
        callback: Callable[[Tensor, Array], object],
        nodes: Iterable[Tensor] | Callable[[Tensor], bool] | None = None,
    ) -> Iterator[None]:
        """A ``with`` block in which runs of this program show computed values, in the order in which they are made.

        Between two observed nodes everything runs as usual, fused too. The values are bit for bit those of a run that
        nobody looks at, but for devices that round differently when they fuse.

        Args:
            callback: called with the node and its value, a new array; ``False`` ends the run (`Cancelled`), and what it
                raises ends the run and comes out of it.
            nodes: which ones, or a function that says so for each; ``None``: all.

        Raises:
            SchedulerError: nodes that this program does not compute, or somebody is observing it already.
        """
        computed = {item.node: None for split in self.splits for item in split.items if item.node is not None}
        if self._watching is not None:
            raise SchedulerError(f"{self!r} is being observed already")
        if nodes is None:
            observed = set(computed)
        elif callable(nodes):
            observed = {node for node in computed if nodes(node)}
        else:
            observed = {node.root for node in nodes}
            for node in observed - set(computed):
                raise SchedulerError(f"{node.describe()} is not computed by this program")

        def show(node: Tensor, read: Call) -> None:
            if callback(node, read()) is False:
                raise Cancelled(f"the run was ended by the observer of {node.describe()}")

        scheduler = self._scheduler
        with scheduler._lock:
            if self._closed:
                raise LifetimeError(f"{self!r} was closed")
            cut = scheduler._partition(self.partition.graph.outputs, self._pins, self.partition.placed, observed)
            watching = Program(scheduler, cut, self._form, self._pins, show)
            watching._written = self._written
            self._watching = watching
            self._progress.ready = None
        try:
            yield
        finally:
            self._watching = None
            watching.close()

    @contextmanager
    def _unless_ended(self, watching: Program) -> Iterator[None]:
        """A ``with`` block that is left without a word if another thread ends its observing meanwhile."""
        try:
            yield
        except LifetimeError:
            if self._closed or not watching._closed:
                raise

    def _forget_marks(self) -> None:
        """Nothing is under way any more, and marks of the past may be failed ones."""
        for listed in self._lists:
            listed.marks[:] = [None] * len(listed.marks)

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether it can be run and its leaves still lie where they lay when it was built, for the same usage.

        `Scheduler.build` of the same outputs makes a new program where this is false.
        """
        placements = self._placements
        if placements.seen is not CHANGES.latest and not placements.hold():
            return False
        return not (self._closed or self._lists[0].ended)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What has to be fed, by name."""
        return {name: feed.tensor for name, feed in self._feeds.items()}

    @property
    def splits(self) -> list[Split]:
        """The splits in the order they run."""
        return self.partition.splits

    @property
    def n_copies(self) -> int:
        """Copies between memories that each run makes."""
        return len(self.partition.copies)

    @property
    def slots(self) -> int:
        """How many runs have memory of their own for what passes between devices, so that they overlap."""
        return len(self._lists)

    @property
    def memory(self) -> dict[str, MemoryUse]:
        """Bytes by device: planned temporaries, weights and states that the program uses there."""
        result = {target.name: [self._planned.get(target.index, 0), 0, 0] for target in self._targets}
        for index, (tensor, space) in self.partition.owners.items():
            for target in self._targets if tensor.leaf is not None else ():
                if target.device.reaches(space):
                    column = 2 if tensor.leaf is not None and tensor.leaf.kind == "state" else 1
                    result[target.name][column] += self.partition.sizes[index]
                    break
        return {name: MemoryUse(*columns) for name, columns in result.items()}

    @property
    def predicted(self) -> Prediction:
        """What a run is predicted to take, by the profiles of the devices (`opweave.profile`)."""
        from opweave.cost.predict import prediction_of

        return prediction_of(self.partition)

    def memory_map(self, slot: int = 0) -> MemoryMap:
        """Where every value lies in one of the `slots`, and which steps run as one."""
        sizes = self.partition.sizes
        places = {p: Region(b, self._offsets[p], sizes[p]) for p, b in enumerate(self._buffers) if b is not None}
        places |= {p: Region(b, offset, sizes[p]) for p, (b, offset) in self._moves[slot].items()}
        scratch = {key: Region(arg.buffer, arg.offset, arg.size) for key, arg in self._scratch.items() if arg.buffer}
        groups = [[[i] for i in range(len(split.items))] for split in self.splits]
        for action in self._lists[0].actions:
            if action.items is not None and action.split is not None:
                groups[action.split.index] = [list(indices) for indices in action.items]
        return MemoryMap(places, scratch, groups)

    def device_of(self, tensor: Tensor) -> Device:
        """The device on which a node runs or a leaf lies.

        Raises:
            SchedulerError: the tensor is not in this program.
        """
        return device_of(self.partition, tensor)

    def explain(self) -> Explanation:
        """Which node runs where and why, what is copied, and what memory it takes.

        Returns:
            A text that also has rows (``.nodes``, ``.copies``) and a page (``.save("why.html")``; notebooks show it).
        """
        from opweave.scheduler.report import explain

        remarks: dict[int, list[str]] = {}
        for action in self._lists[0].actions:
            if action is not None and action.plan is not None and action.split is not None:
                remarks.setdefault(action.split.index, []).extend(action.plan.remarks)
        return explain(self.partition, self.memory, remarks=remarks)

    def close(self) -> None:
        """Give up the compiled plans, and the memory that no other program uses. Closing twice does nothing.

        Raises:
            SchedulerError: called from within a run.
        """
        if not self._scheduler._inherited:
            self._scheduler._check_closer()
            self._scheduler._when_quiet(self._end)

    def _end(self) -> None:
        """`close`, where nothing is under way."""
        if not self._closed:
            self._scheduler._forget(self)  # first: an interrupt must not let a closed program be found
            self._closed = True
            self._latest = None
            for listed in self._lists:
                listed.close()
            for lease in self._leases:
                lease.release()


def _bind(partition: Partition, scheduler: Scheduler, show: Callable[[Tensor, Call], None] | None) -> Binder:
    """Memory and operands for as many slots as the scheduler wants, or for one where there is too little memory."""
    slots = 1 if show is not None else scheduler.n_slots
    if slots > 1:
        try:
            return Binder(partition, scheduler._arenas, scheduler._host, slots)
        except AllocationError as error:
            warnings.warn(f"too little memory for {slots} slots, so that runs will not overlap: {error}",
                          RuntimeWarning, stacklevel=4)  # fmt: skip
    return Binder(partition, scheduler._arenas, scheduler._host, show=show)


def device_of(partition: Partition, tensor: Tensor) -> Device:
    target = partition.assignment.target_of.get(tensor)
    if target is None and tensor.base is not None:
        target = partition.assignment.target_of.get(tensor.base)
    if target is None:
        raise SchedulerError(f"{tensor.describe()} is not in this program, or lies on none of its devices")
    return partition.assignment.targets[target].device


def _told(listed: RunList) -> list[Call]:
    from opweave.scheduler.telling import told_calls

    return told_calls(listed)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _name(key: Any) -> Any:
    return key.name if isinstance(key, Tensor) else key


def _kept(feed: Feed, value: Array) -> Array:
    """``value``, or a copy of it where the caller may overwrite it."""
    leaf = feed.tensor.leaf
    return value if leaf is not None and leaf.borrowed else np.array(value, copy=True)


def _fit(feed: Feed, value: Any) -> Array:
    """``value`` as an array for ``feed``; arrays must have the dtype, Python numbers are converted."""
    if isinstance(value, Tensor):
        raise DTypeError(f"{feed.tensor.describe()} is fed with arrays, not with tensors")
    try:
        foreign = hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, np.generic))
        array = host_view(value) if foreign else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"cannot feed {feed.tensor.describe()} with {type(value).__name__}: {error}") from None
    if array.dtype != feed.dtype:
        if hasattr(value, "dtype") or array.dtype.kind not in "bif":
            raise DTypeError(
                f"{feed.tensor.describe()} takes {feed.dtype}, not {array.dtype}; convert with array.astype(...)"
            )
        if feed.dtype.kind in "iub" and array.dtype.kind == "f":
            raise DTypeError(f"{feed.tensor.describe()} takes {feed.dtype}, not floating-point numbers")
        array = array.astype(feed.dtype)
    if array.shape != feed.shape:
        raise ShapeError(f"{feed.tensor.describe()} takes shape {feed.shape}, not {array.shape}")
    return array
