"""`Program`: a graph that was placed, planned and compiled, to be run many times.

Everything that can be decided was decided when it was built; what changes from run to run is kept by the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from opweave.contract.step import Arg
from opweave.errors import Cancelled, LifetimeError, SchedulerError, UnknownNameError, not_pickled
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import read_leaf, write_state
from opweave.runtime.buffer import Buffer
from opweave.runtime.changes import CHANGES, Placements
from opweave.runtime.host.operands import Adopted, bind_read
from opweave.scheduler.compile.reuse import EarlierProgram
from opweave.scheduler.place.prediction import MemoryUse
from opweave.scheduler.plan.splits import Copy, Partition, Split
from opweave.scheduler.run.executor import Executor
from opweave.scheduler.run.runs import ProgramState

if TYPE_CHECKING:
    from opweave.futures import Future
    from opweave.runtime.device import Device
    from opweave.scheduler.compile.lower import Show
    from opweave.scheduler.compile.run_list import RunList
    from opweave.scheduler.explain.report import Explanation
    from opweave.scheduler.place.prediction import Prediction
    from opweave.scheduler.plan.fuse import Groups

__all__ = ["Array", "MemoryMap", "PlannedGraph", "Program", "Region"]

Array = np.ndarray[Any, Any]
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # What a run returns. ``Program`` alone, in annotations, leaves it open.
    R_co = TypeVarWithDefault("R_co", covariant=True, default=Any)
else:
    R_co = TypeVar("R_co", covariant=True)


class Region(NamedTuple):
    """``size`` bytes from ``offset`` on in ``buffer``."""

    buffer: Buffer
    offset: int
    size: int


class MemoryMap(NamedTuple):
    """Where the values of a program lie, for tools that show or check it, by storage ids of ``Program.partition``.

    Attributes:
        places: storage id -> its bytes. Values that live only inside a fused group have none.
        workspaces: (index of the split, index of the group in it) -> the group's scratch memory.
        groups: for every split its groups, each the indices of the steps that run as one.
    """

    places: dict[int, Region]
    workspaces: dict[tuple[int, int], Region]
    groups: list[list[list[int]]]


class PlannedGraph:
    """A graph that was placed and divided into splits, without memory. Made by `Scheduler.partition`.

    Attributes:
        partition: the graph divided into splits.
    """

    __slots__ = ("_memory", "_slots", "partition")

    def __init__(self, partition: Partition, slots: int = 1) -> None:
        self.partition: Final = partition
        self._slots: Final = slots
        self._memory: dict[str, MemoryUse] | None = None  # once it was asked for

    @property
    def splits(self) -> Sequence[Split]:
        """The splits in the order they run."""
        return self.partition.splits

    @property
    def n_copies(self) -> int:
        """Copies between memories that each run makes."""
        return len(self.partition.copies)

    @property
    def predicted(self) -> Prediction:
        """What a run is predicted to take, by the profiles of the devices (``opweave_cost.profile``); of simulated
        devices by their declared figures.

        Raises:
            SchedulerError: ``opweave-cost``, which predicts, is not installed.
        """
        if self.partition.prediction is None:
            from opweave.scheduler.place.strategy import predictor  # most programs are not predicted

            # As a cached property: made when it is first asked for, and then shown by reports too.
            object.__setattr__(self.partition, "prediction", predictor().predict(self.partition))
        assert self.partition.prediction is not None
        return self.partition.prediction

    def _now(self, tensor: Tensor) -> Tensor:
        """The tensor in this program's graph that has the value of ``tensor``: another one behind weights in shards, or
        behind what is computed again."""
        return self.partition.annotated.stand_ins.get(tensor, tensor)

    def device_of(self, tensor: Tensor) -> Device:
        """The device on which a node runs or a leaf lies.

        Raises:
            SchedulerError: the tensor is not in this program.
        """
        target = self.partition.assignment.target_of.get(self._now(tensor))
        if target is None and tensor.base is not None:
            target = self.partition.assignment.target_of.get(self._now(tensor.base))
        if target is None:
            raise SchedulerError(f"{tensor.describe()} is not in this program, or lies on none of its devices")
        return self.partition.assignment.targets[target].device

    @property
    def copies(self) -> list[Copy]:
        """Copies between memories that each run would make."""
        return self.partition.copies

    def cause_of(self, tensor: Tensor) -> str:
        """Why it was placed on its device: a key of ``opweave.scheduler.CAUSES``. Raises `KeyError` if unknown."""
        return self.partition.assignment.causes[tensor]

    @property
    def memory(self) -> dict[str, MemoryUse]:
        """Bytes by device that a program built of this graph takes as the first one of its scheduler: planned as for
        the program, and not allocated. What libraries take for themselves is known once there is a program."""
        from opweave.scheduler.plan.allocate import allocate, memory_use  # importing opweave must not pay for these
        from opweave.scheduler.plan.fuse import fuse

        if self._memory is None:
            targets = self.partition.assignment.targets
            plan = allocate(self.partition, fuse(self.partition), [()] * len(targets), self._slots)
            self._memory = memory_use(self.partition, plan.nbytes)
        return self._memory

    def explain(self) -> Explanation:
        """As `Program.explain`, without the memory that a program takes."""
        from opweave.scheduler.explain.report import explain

        return explain(self.partition)


class Program(PlannedGraph, Generic[R_co]):
    """A compiled graph. Made by `Scheduler.build`; does not change. Thread-safe.

    Attributes:
        partition: the graph divided into splits.
        executor, internals, earlier: what runs it, what that keeps of it, and what later builds take over; for tools.
    """

    __slots__ = (
        "__weakref__", "_nbytes", "_on_close", "_placements", "_variant", "earlier", "executor", "internals",
    )  # fmt: skip

    def __init__(
        self,
        executor: Executor,
        state: ProgramState,
        groups: Groups,
        nbytes: Mapping[int, int],
        variant: Callable[[Collection[Tensor], Show], Program],
        on_close: Callable[[Program], None],
    ) -> None:
        super().__init__(state.partition, len(state.lists))
        self.executor: Final = executor
        self.internals: Final = state
        self.earlier: Final = EarlierProgram(state.partition, groups, state.lists)
        self._nbytes: Final = nbytes  # target index -> bytes of temporaries
        self._variant: Final = variant  # makes the same program with observed nodes
        self._on_close: Final = on_close
        self._placements: Final = Placements(state.partition.leaves)
        executor.add(state)

    def __repr__(self) -> str:
        return repr(self.internals)

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self)

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[Any, Any] | None = None, /, *, on_device: Any = False, **named: Any) -> R_co:
        """Run once.

        Args:
            feeds: input tensor or name -> array of its shape and dtype (numbers and sequences are converted). An array
                of another library in the memory of the device that reads it is taken there, by DLPack.
            on_device: ``True``: leave the outputs in the memory of the devices that computed them. (Its type is `Any`,
                so that type checkers accept ``run(**arrays)``.)
            named: as ``feeds``, by keyword (for an input of that name use ``feeds``).

        Returns:
            New arrays in the form of the outputs that the program was built for: one array, a tuple, or a dict. NumPy
            arrays, or with ``on_device`` objects with ``__dlpack__``, for ``torch.from_dlpack(...)`` and the like.

        Raises:
            UnsupportedOpError: ``on_device``, and a device exports no arrays of its memory.
            ShapeError, DTypeError, UnknownNameError, SchedulerError: feeds that do not fit, before anything runs.
            ExecutionError: a node failed; names it, its device, and states that may be half written. Those refuse to
                be read until they are written anew; everything else can be used again.
            Cancelled: `Scheduler.cancel` was called meanwhile.
            LifetimeError: the program or its scheduler was closed.
        """
        return self.executor.run(self.internals, feeds, named, on_device)  # type: ignore[no-any-return]

    def submit(
        self, feeds: Mapping[Any, Any] | None = None, /, *, on_device: Any = False, **named: Any
    ) -> Future[R_co]:
        """Run once, beside the caller; runs end in the order in which they were submitted.

        Fed arrays may be overwritten when this returns, except those of inputs that were made with ``borrowed=True``
        and those in the memory of a device. ``on_device`` is that of `run`.
        With ``Scheduler(parallel=True)`` successive runs overlap; at most twice as many as there are slots are under
        way, and a further one waits here.

        Returns:
            A future whose ``result()`` is what `run` returns or raises. (``asyncio.wrap_future`` makes it awaitable.)
            Its ``cancel()`` ends this run as `Scheduler.cancel` ends all, whether it has begun or not, but for one that
            overlaps with others: it goes on between them, and its result is dropped. ``cancelled()`` is then true.

        Raises:
            ShapeError, DTypeError, UnknownNameError, SchedulerError, LifetimeError: as `run`, at once.
        """
        return self.executor.submit(self.internals, feeds, named, on_device)

    def warm(self) -> None:
        """Make the preparations of the first run now, above all compiling. Values and states stay as they are.

        Shows progress on a terminal where that takes longer than a second.

        Raises:
            ExecutionError: compiling failed.
            LifetimeError: the program was closed.
        """
        self.executor.when_idle(self.internals.warm)

    # --- values between runs ----------------------------------------------------------------------------------------

    def write(self, tensor: Tensor | str, values: Any) -> None:
        """Set a state or a view of one, or an input for all later runs that do not feed it.

        Raises:
            ShapeError, DTypeError, LayoutError: values that do not fit.
            UnknownNameError: neither an input nor a state of this program.
        """
        shown = tensor if isinstance(tensor, Tensor) else None
        leaf = self._leaf(tensor if shown is None or not shown.is_view else shown.root)
        if leaf.leaf is not None and leaf.leaf.kind == "state":
            self.executor.when_idle(partial(write_state, leaf if shown is None else shown, values))
        else:
            feed = self.run_lists[0].feeds[leaf.name]
            value = feed.fit(values)
            if isinstance(value, Adopted):
                value = value.buffer.read().view(feed.dtype).reshape(feed.shape)
            self.internals.written[leaf.name] = np.array(value, copy=True)

    def read(self, tensor: Tensor | str) -> Array:
        """The present value of a state, weight or constant, or of an output after the last run, as a new array.

        Raises:
            SchedulerError: a value that is not kept; make it an output.
            UnknownNameError: a name of neither an input nor a state of this program.
        """
        if isinstance(tensor, Tensor) and self._now(tensor) in self.partition.graph.outputs:
            return self.executor.read_output(self.internals, self._now(tensor))
        leaf = self._leaf(tensor) if isinstance(tensor, str) else tensor
        return self.executor.when_idle(partial(read_leaf, leaf))

    def _leaf(self, tensor: Tensor | str) -> Tensor:
        annotated = self.partition.annotated
        known = (*annotated.graph.leaves, *annotated.sharded)  # in shards are states too, whose parts are in the graph
        leaves = {t.key: t for t in known if t.leaf and t.leaf.kind in ("input", "state")}
        name = tensor if isinstance(tensor, str) else tensor.key
        found = leaves.get(name)
        if found is None or (isinstance(tensor, Tensor) and tensor is not found):
            raise UnknownNameError("input or state of this program", name, leaves)
        return found

    @contextmanager
    def observe(
        self,
        callback: Callable[[Tensor, Any], object],
        nodes: Iterable[Tensor] | Callable[[Tensor], bool] | None = None,
        *,
        on_device: bool = False,
        ask: Callable[[Tensor], object] | None = None,
    ) -> Iterator[None]:
        """A ``with`` block in which runs of this program pass computed values to ``callback``, in the order in which
        they are computed.

        Between two observed nodes everything runs as usual, fused too. Observing does not change placement: the values
        are bit for bit those of a run that nobody observes, but for devices that round differently when they fuse.

        Args:
            callback: called with the node and its value, a new array unless ``on_device``; ``False`` ends the run
                (`Cancelled`), and an exception of it ends the run and is raised by it.
            nodes: which ones, or a function asked for each; ``None``: all. Those without elements are not shown.
            on_device: the callback is given an `ObservedValue`, which shows the value where it lies, in place of an
                array: it decides in each run whether to ``read()`` it, which alone copies it to the host.
            ask: called in each run with each of the nodes when it is computed; what returns False is not shown in this
                run, nor copied to the host.

        Raises:
            SchedulerError: nodes that this program does not compute, or somebody is observing it already.
        """
        from opweave.scheduler.run.observers import ObservedValue  # most programs are not observed

        graph = self.partition.graph  # not the steps: a concat whose pieces are copied to their places is none
        computed = {node: None for node in graph.nodes if node.base is None}
        if self.internals.observed is not None:
            raise SchedulerError(f"{self!r} is being observed already")
        if nodes is None:
            observed = set(computed)
        elif callable(nodes):
            observed = {node for node in computed if nodes(node)}
        else:
            observed = {self._now(node).root for node in nodes}
            for node in observed - set(computed):
                raise SchedulerError(f"{node.describe()} is not computed by this program")

        def show(node: Tensor, arg: Arg) -> None:
            if ask is not None and not ask(node):
                return
            value = ObservedValue(arg) if on_device else bind_read(arg)()
            try:
                ended = callback(node, value) is False
            finally:
                if isinstance(value, ObservedValue):
                    value.end()
            if ended:
                raise Cancelled(f"the run was ended by the observer of {node.describe()}")

        self.internals.check_open()
        variant = self._variant({node for node in observed if 0 not in node.shape}, show)
        self.executor.observe(self.internals, variant.internals)
        try:
            yield
        finally:
            self.executor.end_observing(self.internals)

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it was closed, by itself or with its scheduler."""
        return self.internals.closed

    @property
    def is_current(self) -> bool:
        """Whether it can be run and its leaves still lie where they lay when it was built, for the same usage.

        `Scheduler.build` of the same outputs makes a new program where this is false.
        """
        placements, state = self._placements, self.internals
        if placements.seen is not CHANGES.latest and not placements.hold():
            return False
        return not (state.closed or state.lists[0].ended)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What has to be fed, by name."""
        return {name: feed.tensor for name, feed in self.run_lists[0].feeds.items()}

    @property
    def slots(self) -> int:
        """How many runs have memory of their own for what passes between devices, so that they overlap."""
        return len(self.run_lists)

    @property
    def run_lists(self) -> Sequence[RunList]:
        """For tools: what a run does, in each of the `slots`."""
        return self.internals.lists

    @property
    def memory(self) -> dict[str, MemoryUse]:
        """Bytes by device: planned temporaries, weights and states that the program uses there, and what libraries took
        for its calls (packed constants, workspaces)."""
        from opweave.scheduler.plan.allocate import memory_use

        used = memory_use(self.partition, self._nbytes)
        for plan in self.run_lists[0].plans:
            name = plan.stream.device.name
            used[name] = used[name]._replace(library=used[name].library + plan.library_bytes)
        return used

    def memory_map(self, slot: int = 0) -> MemoryMap:
        """Where every value lies in one of the `slots`, and which steps run as one; raises `LifetimeError` if the
        program was closed."""
        sizes, bound = self.partition.sizes, self.run_lists[slot].bindings
        if bound is None:
            raise LifetimeError(f"{self!r} was closed and has no memory")
        places = {
            storage: Region(buffer, bound.offsets[storage], sizes[storage])
            for storage, buffer in enumerate(bound.buffers)
            if buffer is not None
        }
        scratch = {key: Region(arg.buffer, arg.offset, arg.size) for key, arg in bound.workspaces.items() if arg.buffer}
        groups = [[list(group.indices) for group in found] for found in self.earlier.groups.of_split]
        return MemoryMap(places, scratch, groups)

    def explain(self) -> Explanation:
        """Which node runs where and why, what is copied, and what memory it takes.

        Returns:
            A text that also has rows (``.nodes``, ``.copies``) and a page (``.save("why.html")``; notebooks show it).
        """
        from opweave.scheduler.explain.report import explain

        remarks: dict[int, list[str]] = {}
        for action in self.run_lists[0].actions.actions:
            if action.plan is not None and action.split is not None:
                remarks.setdefault(action.split.index, []).extend(action.plan.remarks)
        return explain(self.partition, self.memory, remarks=remarks)

    def close(self) -> None:
        """Drop the compiled plans, and free the memory that no other program uses. Closing twice does nothing.

        Raises:
            SchedulerError: called from within a run.
        """
        executor = self.executor
        if not executor.inherited:
            executor.check_closer()
            self._on_close(self)  # first: an interrupt must not let a closed program be found
            executor.when_idle(partial(executor.end, self.internals))
