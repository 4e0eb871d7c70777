"""`profile_run`: runs a program some times and says how long each of its steps and transfers takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.errors import SchedulerError
from opweave.function import Function
from opweave.graph.blocks import Blocks
from opweave.graph.layout import nbytes
from opweave.graph.work import traffic, window_bytes
from opweave.runtime.worker import WorkerStream
from opweave.scheduler import Program, Scheduler
from opweave.scheduler.compile.run_list import CallList
from opweave.scheduler.explain.report import where
from opweave.tracing import TRACE
from opweave.units import human_bytes
from opweave_cost.cost_model import CostModel, decisive_dtype
from opweave_cost.predict import where_lies
from opweave_cost.run_profile import RunProfile, RunRow
from opweave_cost.store import profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opweave.contract.step import Call
    from opweave.graph.tensor import Tensor
    from opweave.runtime.device import Device
    from opweave.runtime.memory import BufferType
    from opweave.runtime.stream import Stream
    from opweave.scheduler.compile.run_list import Action, Feed, Fetch
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.splits import Copy, Split, SplitStep, StorageView
    from opweave.tracing import TraceEvent
    from opweave_cost.cost_model import Profile

__all__ = ["profile_run", "step_times"]


def profile_run(
    program: Program | Function,
    feeds: Mapping[Any, Any] | Iterable[Any] | None = None,
    /,
    *,
    runs: int = 10,
    limits: bool = True,
    **named: Any,
) -> RunProfile:
    """Run a program some times and measure each of its steps and transfers.

    The program itself is run for the time of a whole run. For the parts it is built a second time, on streams that
    this opens, and the device is waited for after each part, so that its time is its own also on devices that work
    while the host goes on: kernel times by the device's clock where its plugin reports them (`opencl`, `torch` on
    CUDA), else from submitting to the end, which on such devices includes some microseconds of waiting. What a device
    fuses is one row. The parts may therefore take longer together than a run, in which they overlap.

    States keep their values. The second program needs memory for its temporaries while this runs.

    Args:
        program: what `Scheduler.build` gave, or a function made by `opweave.compile`: then its program for these
            arguments.
        feeds, named: as for `Program.run`; of a function its arguments, in a sequence or by name.
        runs: how many runs are measured, after one that is not; times are medians.
        limits: compare with what the devices allow, by their profiles (``opweave_cost.profile``), which are measured if
            there are none yet.

    Raises:
        SchedulerError: neither a program nor such a function, a number of runs below 1; ``feeds`` as in `Program.run`.
        ShapeError, DTypeError, UnknownNameError, ExecutionError, LifetimeError: as `Program.run`.
        AllocationError: no room for the second program.
    """
    if isinstance(program, Function):
        args = () if isinstance(feeds, Mapping) else tuple(feeds or ())
        program, feeds = program.prepare(args, {**(feeds if isinstance(feeds, Mapping) else {}), **named})
        named = {}
    if not isinstance(program, Program):
        raise SchedulerError(
            f"profile_run takes a program, as scheduler.build(outputs) gives it, or a compiled function, not "
            f"{type(program).__name__}"
        )
    if not isinstance(feeds, (Mapping, type(None))):
        raise SchedulerError(f"a program is fed a mapping of inputs to arrays, not {type(feeds).__name__}")
    if not isinstance(runs, int) or runs < 1:
        raise SchedulerError(f"runs is a number of runs, at least 1, not {runs!r}")
    whole: list[float] = []
    with _states_kept(program):
        program.run(feeds, **named)
        for _ in range(runs):
            start = perf_counter_ns()
            program.run(feeds, **named)
            whole.append((perf_counter_ns() - start) / 1e9)
        with _Measuring(program) as measured:
            for _ in range(runs + 1):
                measured.program.run(feeds, **named)
            model = measured.model() if limits else None
            rows = measured.rows(model)
    targets = program.partition.assignment.targets
    of_limit = () if model is None else tuple(map(_limit, model.profiles))
    return RunProfile(rows, tuple(whole), tuple(t.name for t in targets), of_limit)


def step_times(program: Program, runs: int, run: Callable[[Program], Any]) -> list[tuple[Target, list[Tensor], float]]:
    """The least seconds of each step, or of what a device fuses, with its target and nodes; ``run`` runs a program."""
    with _Measuring(program) as measured:
        for _ in range(runs + 1):
            run(measured.program)
        steps = [part for part in measured.parts if part.kind == "step"]
    nodes = [[item.node for item in part.items if item.node is not None] for part in steps]
    return [(part.target, of, min(part.seconds[1:])) for part, of in zip(steps, nodes, strict=True) if of]


@contextmanager
def _states_kept(program: Program) -> Iterator[None]:
    leaves = program.partition.graph.leaves
    values = {t: program.read(t) for t in leaves if t.leaf is not None and t.leaf.kind == "state"}
    try:
        yield
    finally:
        for state, value in values.items():
            blocks = state.dtype.is_quantized
            program.write(state, Blocks(value, state.shape, state.dtype) if blocks else value)


class _Part:
    """A part of a run that is timed: the row without its figures, and what it took each time."""

    def __init__(
        self, target: Target, kind: str, name: str, split: Split | None, items: Sequence[SplitStep] = ()
    ) -> None:
        self.target: Final = target
        self.kind: Final = kind
        self.name: Final = name
        self.split: Final = split
        self.items: Final = items
        self.copy: Copy | None = None
        self.note = ""
        self.nbytes = 0
        self.seconds: list[float] = []


class _Measuring:
    """A second program on streams of its own, whose calls note how long they take."""

    def __init__(self, program: Program) -> None:
        self.parts: Final[list[_Part]] = []
        self._heard: Final[list[TraceEvent]] = []
        with ExitStack() as stack:
            # On streams that are opened while it listens, devices that can time their kernels do so.
            stack.enter_context(TRACE.listen(self._hear))
            targets = program.partition.assignment.targets
            streams = [stack.enter_context(stream) for stream in _opened(targets)]
            memory: dict[Device | str, BufferType] = {target.device: target.buffer_type for target in targets}
            scheduler = stack.enter_context(Scheduler(streams, buffer_types=memory))
            self.program: Final = scheduler.rebuild(program)
            self._executor: Final = self.program.executor
            self._time_all()
            self._stack: Final = stack.pop_all()

    def __enter__(self) -> _Measuring:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _hear(self, event: TraceEvent) -> None:
        if event.kind == "kernel":
            self._heard.append(event)

    # --- timing -----------------------------------------------------------------------------------------------------

    def _time_all(self) -> None:
        run_list = self.program.run_lists[0]
        for name, feed in run_list.feeds.items():
            if feed.target is not None:
                run_list.feeds[name] = self._timed_feed(feed, feed.target)
        calls, actions = run_list.actions.calls, run_list.actions.actions
        timed = [self._timed_action(call, action) for call, action in zip(calls, actions, strict=True)]
        # Without their plans, traces that others record do not wrap the calls.
        run_list.calls = run_list.actions = CallList(timed, [action._replace(plan=None) for action in actions])
        run_list.fetches[:] = [self._timed_fetch(fetch) for fetch in run_list.fetches]

    def _timed_feed(self, feed: Feed, target: Target) -> Feed:
        part = self._part(_Part(target, "input", feed.tensor.name, None))
        part.nbytes = feed.tensor.nbytes
        view = feed.view
        put = feed.put if view is None else partial(np.copyto, view)
        return replace(feed, view=None, put=lambda array: self._time(part, partial(put, array), target.stream))

    def _timed_fetch(self, fetch: Fetch) -> Fetch:
        if fetch.target is None:
            return fetch
        part = self._part(_Part(fetch.target, "output", fetch.tensor.name, None))
        part.nbytes = fetch.tensor.nbytes
        return replace(fetch, read=partial(self._time, part, fetch.read, fetch.target.stream))

    def _timed_action(self, call: Call, action: Action) -> Call:
        target, split = action.target, action.split
        assert split is not None
        if action.copy is not None:
            copy = action.copy
            part = self._part(_Part(target, "copy", copy.tensor.name, split))
            part.copy, part.nbytes = copy, copy.nbytes
            beside = target.copier if copy.cause == "weight-fetch" else None
            return partial(self._time, part, call, beside or target.stream)
        if action.plan is None:
            return call
        groups = [[split.steps[i] for i in group.indices] for group in action.groups]
        if action.plan.n_calls != len(groups):
            # Compiled into other calls than groups: the split is the smallest part that can be timed.
            part = self._part(_Part(target, "step", f"split {split.index}", split, split.steps))
            return partial(self._time, part, call, target.stream)
        parts = [self._part(_Part(target, "step", _name(items), split, items)) for items in groups]
        return partial(action.plan.run, lambda i, step: partial(self._time, parts[i], step, target.stream))

    def _part(self, part: _Part) -> _Part:
        self.parts.append(part)
        return part

    def _time(self, part: _Part, call: Callable[[], Any], stream: Stream) -> Any:
        copied = self._executor.copied
        self._heard.clear()
        start = perf_counter_ns()
        result = call()
        stream.synchronize()
        took = perf_counter_ns() - start
        kernels = [event.end - event.start for event in self._heard if event.data["device"] == part.target.name]
        part.seconds.append((sum(kernels) if part.kind == "step" and kernels else took) / 1e9)
        if part.copy is not None and part.copy.ids is not None:
            part.nbytes = self._executor.copied - copied  # only the rows whose ids were given
        return result

    # --- rows -------------------------------------------------------------------------------------------------------

    def model(self) -> CostModel:
        """What the program's devices allow, by their profiles."""
        targets = self.program.partition.assignment.targets
        return CostModel(targets, [profile(target.device) for target in targets])

    def rows(self, model: CostModel | None) -> list[RunRow]:
        """A row for each part, by all runs but the first."""
        took = [median(part.seconds[1:]) for part in self.parts]
        total = sum(took) or 1.0
        return [
            self._row(part, seconds, seconds / total, model) for part, seconds in zip(self.parts, took, strict=True)
        ]

    def _row(self, part: _Part, seconds: float, share: float, model: CostModel | None) -> RunRow:
        partition, at, size, flops = self.program.partition, part.target.index, part.nbytes, 0
        least: float | None = None
        ops: tuple[str, ...] = ()
        scope = ""
        if part.kind == "step":
            size, flops, peak = self._work(part.items, part.target, None if model is None else model.profiles[at])
            least = None if model is None else max(size / model.profiles[at].peak_bandwidth[0], peak)
            ops = tuple(item.op for item in part.items)
            nodes = [item.node for item in part.items if item.node is not None]
            scope = nodes[-1].scope if nodes else ""
        elif model is not None and part.copy is not None:
            device, space = where_lies(partition, part.copy.src)
            to = where_lies(partition, part.copy.dst)[0]  # of write-backs another device than that of the split
            least = model.move(device, space, next((t.index for t in model.targets if t.device is to), at), size)
        elif model is not None and not part.target.space.host:
            least = model.feed(at, size) if part.kind == "input" else model.fetch(part.target.device, size)
        note = ""
        if part.copy is not None:
            source, target = (where(partition, view.storage) for view in (part.copy.src, part.copy.dst))
            note = f"{source} -> {target} ({part.copy.cause})"
        return RunRow(
            name=part.name, seconds=seconds, share=share, nbytes=size, flops=flops, least=least,
            split=None if part.split is None else part.split.index, device=part.target.name, kind=part.kind,
            ops=ops, scope=scope, note=note,
        )  # fmt: skip

    def _work(self, items: Sequence[SplitStep], target: Target, profile: Profile | None) -> tuple[int, int, float]:
        """Bytes that a group reads and writes, without those that stay inside it; its flops, and the seconds that they
        take at the device's full speed."""
        internal, capabilities = self.program.earlier.groups.internal, self.program.partition.assignment.capabilities
        written, flops, peak = 0, 0, 0.0
        read: dict[StorageView, float] = {}
        # Storage that stays inside -> the share of it that is read: where a cast converts weights for a step that
        # selects rows of them, only these rows are read and converted.
        shares: dict[int, float] = {}
        for item in reversed(items):
            if item.node is None or item.node.op is None:
                written += 2 * nbytes(item.out.shape, item.out.dtype)
                continue
            share = shares.get(item.out.storage, 1.0)
            sizes, result = traffic(item.node)
            count = 0 if 0 in item.node.shape else int(share * item.node.op.flops(item.node))
            flops += count
            if profile is not None:
                dtype = decisive_dtype(capabilities.signature(item.node))
                peak += count / profile.peak_flops(dtype, capabilities.support(target, item.node).precision)
            for source, size in zip(item.srcs, sizes, strict=True):
                whole = window_bytes((source.dtype, source.shape, source.strides))
                if source.storage not in internal:
                    read[source] = min(read.get(source, 0.0) + share * size, whole)
                elif whole:
                    shares[source.storage] = min(shares.get(source.storage, 0.0) + share * size / whole, 1.0)
            written += 0 if item.out.storage in internal else result
        return int(sum(read.values())) + written, flops, peak


def _limit(profile: Profile) -> str:
    """What the limit of a device's steps is, for the reader of a report."""
    bandwidth, size = profile.peak_bandwidth
    doubt = "; doubtful, measured while other programs used the processors" if profile.is_doubtful else ""
    return (
        f"{profile.device}: {bandwidth / 1e9:.3g} GB/s of the memory or cache that holds additions of "
        f"{human_bytes(int(size))}, and the fastest products{doubt}"
    )


def _opened(targets: Sequence[Target]) -> list[Stream]:
    before, TRACE.detailed = TRACE.detailed, True
    try:
        return [_open(target) for target in targets]
    finally:
        TRACE.detailed = before


def _open(target: Target) -> Stream:
    stream = target.stream.inner if isinstance(target.stream, WorkerStream) else target.stream
    # Without ``profiling``: False would switch timing by the device's clock off, unset it is on while traces are heard.
    return target.device.open(**{name: value for name, value in stream.opened_with.items() if name != "profiling"})


def _name(items: Sequence[SplitStep]) -> str:
    last = items[-1].node
    return last.name if last is not None else "pack"
