"""Measuring a device's profile: representative operations at several sizes, and transfers.

Figures are minima of several runs, since other load can make a run longer but never shorter. Only the time to start a
device that was idle is a median: it depends on how deeply the device's threads sleep, and programs meet all such cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Arg, Group
from opweave.errors import OpweaveError
from opweave.graph.dtypes import u8
from opweave.graph.opdef import OPS, SAMPLE_IDS, Sample
from opweave.graph.work import work
from opweave.scheduler.place.capabilities import at_precision
from opweave.scheduler.place.support import unbound_step
from opweave.scheduler.place.target import Target
from opweave_cost.contention import seconds_waited
from opweave_cost.cost_model import Curve, OpCost, Profile, measured_type

if TYPE_CHECKING:
    from opweave.contract import Buffer, Device, Stream
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Signature, Tensor

__all__ = ["Bound", "Progress", "measure", "seconds_of_step"]

Points = dict[float, float]
"""Work -> seconds."""

Progress = Callable[[str, int, int], None]
"""Called with the name of what is measured next, the number of measurements done, and their total number."""

PASSES: Final = 2
"""How often the whole table is measured: load that disturbs one pass may be gone in the next."""
RUNS: Final = (3, 15)
"""Least and most runs of a point; between them as many as take about `POINT_SECONDS`."""
POINT_SECONDS: Final = 0.01
MOST_SECONDS: Final = 0.05
"""No further run of a point begins after so many seconds."""
RUN_SECONDS: Final = 5e-4
"""A run repeats small steps until it takes about this long."""
MOST_STEPS: Final = 64
"""Steps of a run at most, unless starting it takes longer than these."""
STARTED_STEPS: Final = 4096
"""Steps of a run at most, where starting it takes long, as on a device of another process, which answers messages."""
MORE_STEPS: Final = 8
"""Factor by which a run gets more steps until they take longer than starting it, whose variations would hide them."""
SWITCHES: Final = 3
"""How many operations the overhead of a plan is measured with."""
SLOW: Final = 0.05
"""If a step takes more than this many seconds, larger sizes of its operation are not measured."""


def measure(device: Device, progress: Progress | None = None) -> Profile:
    """Run representative operations and transfers on a device, which takes seconds.

    Raises:
        AllocationError: the device has no memory for operands of some MiB.
        UnsupportedOpError: the device supports none of the operations.
    """
    stream = device.open()
    try:
        began, waited = perf_counter(), seconds_waited()
        made = _Measurement(device, Target(0, stream, None, owned=True), progress).run()
        # Threads that ended meanwhile took what they had waited with them.
        return made._replace(contention=max(0.0, seconds_waited() - waited) / (perf_counter() - began))
    finally:
        stream.close()


class _Measurement:
    def __init__(self, device: Device, target: Target, progress: Progress | None) -> None:
        self.device, self.target, self.stream = device, target, target.stream
        self.progress: Final = progress
        self.done = 0
        self.samples: Final = [(op, sample) for op in OPS.values() if op.samples for sample in op.samples()]
        self.pause: Final = _Pause()
        self.overhead = self.switch = self.waiting = inf

    def run(self) -> Profile:
        up: Points = {}
        down: Points = {}
        by_bytes: dict[tuple[str, str], Points] = {}
        by_flops: dict[tuple[str, str], Points] = {}
        for _ in range(PASSES):
            self._report("transfers")
            self._transfers(up, down)
            switches = 0
            for op, sample in self.samples:
                self._report(f"{op.name} {sample.dtype}")
                try:
                    nodes = sample.build()
                    if op.pointwise and sample.dtype == "f32" and switches < SWITCHES:
                        self._measure_switch(nodes[0])
                        switches += 1
                    products = sample.products() if sample.products is not None else None
                    for precision in ("exact", *op.rough):
                        key = op.name, measured_type(sample.dtype, precision)
                        self._points(nodes, precision, 0, by_bytes.setdefault(key, {}))
                        if products is not None:
                            self._points(products, precision, 1, by_flops.setdefault(key, {}))
                except (OpweaveError, MemoryError, NotImplementedError):
                    continue  # not measured: predicted from `OpDef.runs_like`
        self._report("")
        costs: dict[str, dict[str, OpCost]] = {}
        for op, sample in self.samples:
            for precision in ("exact", *op.rough):
                dtype = measured_type(sample.dtype, precision)
                made = _cost(sample, by_bytes.get((op.name, dtype)), by_flops.get((op.name, dtype)))
                if made is not None:
                    costs.setdefault(op.name, {})[dtype] = made
        upload = _curve(up)
        if "add" not in costs:
            costs["add"] = next(iter(costs.values()), {"f32": OpCost(upload)})
        again = self.overhead if self.overhead < inf else 0.0
        return Profile(
            self.device.name, again + self.switch if self.switch < inf else again, upload, _curve(down), costs,
            again=again, ahead=self._waited,
        )  # fmt: skip

    def _report(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, self.done, PASSES * (1 + len(self.samples)))
        self.done += 1

    def _transfers(self, up: Points, down: Points) -> None:
        rng = np.random.default_rng(0)
        for size in (4 << 10, 64 << 10, 1 << 20, 8 << 20):
            data = rng.integers(0, 256, size, np.uint8)  # noise: a slow connection may compress what it is given
            buffer = self.device.alloc(size)
            try:
                if self.stream.reads_ahead:  # a run takes them along, and waits only once, for its end
                    self.waiting = min(self.waiting, *_times(self.stream.synchronize))
                _note(up, size, max(min(_times(partial(self._upload, buffer, data))) - self._waited, 0.0))
                _note(down, size, min(_times(partial(buffer.download, 0, data))))
            finally:
                buffer.free()

    @property
    def _waited(self) -> float:
        """Seconds of waiting for a stream that has nothing to do, where runs take transfers along; else 0."""
        return self.waiting if self.waiting < inf else 0.0

    def _upload(self, buffer: Buffer, data: np.ndarray[Any, Any]) -> None:
        """As programs bring inputs, and wait for it."""
        if self.stream.reads_ahead:
            self.stream.upload(buffer, 0, data)
            self.stream.synchronize()
        else:
            buffer.upload(0, data)

    def _measure_switch(self, node: Tensor) -> None:
        """Measure what running a plan takes beyond its steps: directly after another run, and how much longer bringing
        a value, running and fetching the result take after a pause."""
        with Bound(self.target, node, "exact") as bound:
            one = seconds_of_step(self.stream, bound)
            many, count = self._seconds_of_many(bound, MOST_STEPS, one)
            step = max(many - one, 0.0) / (count - 1)
            self.overhead = min(self.overhead, max(one - step, 0.0))
            result, source = bound.buffers[:2]
            given, got = np.ones(source.size, np.uint8), np.ones(result.size, np.uint8)
            plan = self.stream.compile([bound.group])

            def visit() -> None:
                if self.stream.reads_ahead:
                    self.stream.upload(source, 0, given)
                    plan.run()
                    self.stream.download(result, 0, got)
                    self.stream.synchronize()
                    return
                source.upload(0, given)
                plan.run()
                self.stream.synchronize()
                result.download(0, got)

            try:
                longer = median(_times(visit, self.pause)) - min(_times(visit))
            finally:
                plan.close()
            self.switch = min(self.switch, max(longer, 0.0))

    def _seconds_of_many(self, bound: Bound, count: int, start: float) -> tuple[float, int]:
        """The least seconds of a run of ``count`` steps, or of so many more that they take longer than the ``start`` of
        the run; and the number of steps."""
        while True:
            seconds = seconds_of_step(self.stream, bound, count)
            if seconds >= 2 * start or count < MOST_STEPS or count >= STARTED_STEPS:
                return seconds, count
            count *= MORE_STEPS

    def _points(self, nodes: list[Tensor], precision: Precision, unit: int, points: Points) -> None:
        """Measure nodes by bytes (``unit`` 0) or floating-point operations (1), where the device computes them in just
        this precision."""
        overhead = self.overhead if self.overhead < inf else 0.0
        for node in nodes:
            support = self.target.support(_signature(node, precision))
            if support.reason is not None or support.precision != precision:
                continue
            with Bound(self.target, node, precision) as bound:
                seconds = seconds_of_step(self.stream, bound)
                count = int(min(MOST_STEPS, RUN_SECONDS / max(seconds - overhead, 1e-7)))
                if count > 1:
                    seconds, count = self._seconds_of_many(bound, count, overhead)
            each = max(seconds - overhead, 1e-9) / max(count, 1)
            _note(points, work(node)[unit], each)
            if each > SLOW:
                break


def seconds_of_step(stream: Stream, bound: Bound, count: int = 1) -> float:
    """The least seconds of a plan with ``count`` identical steps."""
    plan = stream.compile([bound.group] * count)

    def run() -> None:
        plan.run()
        stream.synchronize()

    try:
        return min(_times(run))
    finally:
        plan.close()


def _signature(node: Tensor, precision: Precision) -> Signature:
    assert node.signature is not None
    return node.signature if precision == "exact" else at_precision(node, node.signature, precision)


def _note(points: Points, amount: float, seconds: float) -> None:
    points[amount] = min(seconds, points.get(amount, inf))


def _cost(sample: Sample, by_bytes: Points | None, by_flops: Points | None) -> OpCost | None:
    if not by_bytes:
        return None
    if sample.products is sample.build:
        # Both curves would have the same nodes: all of their time is attributed to their flops.
        return OpCost(Curve(((0.0, min(by_bytes.values())),)), _curve(by_flops) if by_flops else None)
    return OpCost(_curve(by_bytes), _curve(by_flops) if by_flops else None)


class Bound:
    """A step with operands in memory of its own, freed at the end of a ``with`` block."""

    def __init__(self, target: Target, node: Tensor, precision: Precision) -> None:
        signature = _signature(node, precision)
        support = target.support(signature)
        step = unbound_step(signature, target.device, support)
        self.buffers: list[Buffer] = []
        try:
            out, *srcs = [self._bind(target, arg) for arg in (step.out, *step.srcs)]
            scratch = None
            if support.workspace:
                self.buffers.append(target.buffer_type.alloc(support.workspace))
                scratch = Arg(self.buffers[-1], 0, u8, (support.workspace,), (1,))
        except BaseException:
            self.__exit__()
            raise
        self.group: Final = Group((step._replace(out=out, srcs=tuple(srcs)),), support.workspace, scratch)

    def _bind(self, target: Target, arg: Arg) -> Arg:
        buffer = target.buffer_type.alloc(max(arg.nbytes, 1))
        self.buffers.append(buffer)
        if arg.dtype.is_float:
            buffer.upload(0, np.full(arg.shape, 0.5, arg.dtype.numpy))
        elif arg.dtype.is_integer:
            # Valid indices: of every expert, of rows that exist.
            buffer.upload(0, (np.arange(arg.size) % SAMPLE_IDS).astype(arg.dtype.numpy))
        else:
            buffer.clear()
        return Arg(buffer, 0, arg.dtype, arg.shape, arg.strides, None, arg.value)

    def __enter__(self) -> Bound:
        return self

    def __exit__(self, *exc: object) -> None:
        for buffer in self.buffers:
            buffer.free()


def _times(call: Callable[[], Any], before: Callable[[], Any] | None = None) -> list[float]:
    """The seconds of several calls, after a warm-up call; ``before`` is called before each, untimed."""
    call()
    times: list[float] = []
    end = perf_counter() + MOST_SECONDS
    while len(times) < RUNS[0] or (
        len(times) < RUNS[1] and len(times) * min(times) < POINT_SECONDS and perf_counter() < end
    ):
        if before is not None:
            before()
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return times


class _Pause:
    """Keeps the host busy for a millisecond or two. In a program a device is idle about so long between its splits:
    its threads go to sleep, and caches fill with other data."""

    def __init__(self) -> None:
        self.here, self.there = np.ones(1 << 20, np.float32), np.ones(1 << 20, np.float32)

    def __call__(self) -> None:
        for _ in range(4):
            np.copyto(self.there, self.here)


def _curve(points: Points) -> Curve:
    """The curve through measured points, without those that took as long as more work: they were disturbed."""
    kept: list[tuple[float, float]] = []
    for amount, seconds in sorted(points.items(), reverse=True):
        if not kept or seconds < kept[-1][1]:
            kept.append((float(amount), seconds))
    if len(kept) == 1 and kept[0][0] > 0:
        kept.append((0.0, 0.0))
    return Curve(tuple(reversed(kept)))
