"""`throughput`: how fast a device runs the operations that it supports, beside a second device and its own limits.

What is run are the samples of the operations' definitions, those that profiles of devices are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opweave.errors import OpweaveError, UnsupportedOpError
from opweave.graph.opdef import OPS
from opweave.graph.work import work
from opweave.scheduler.explain.page import Report, render
from opweave.units import human_time
from opweave_conformance.timing import seconds_of_step
from opweave_conformance.trial import step_of

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.tensor import Tensor

__all__ = ["Rate", "Throughput", "throughput"]

LARGEST: Final = 64 << 20
"""Bytes that a node reads and writes at most, unless all of its samples are larger."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one node ran.

    Attributes:
        op, dtype: its operation, and the type of the sample.
        shapes: of the result and the sources.
        nbytes, flops: what it reads and writes at least, and its floating-point operations.
        seconds: the least time of a run.
        beside: that of the second device, ``None`` where it does not run it.
        of_limit: share of the time that the device's limits allow; ``None`` until they are known.
    """

    op: str
    dtype: str
    shapes: str
    nbytes: int
    flops: int
    seconds: float
    beside: float | None = None
    of_limit: float | None = None

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def times(self) -> float | None:
        """How many times as fast as the second device."""
        return None if self.beside is None else self.beside / self.seconds


@dataclass(frozen=True, slots=True, repr=False)
class Throughput(Report):
    """What `throughput` measured.

    Attributes:
        device, second: names of the device and of the one beside it (``""``: none).
        rows: in the order of operations and types.
        bandwidth: the most bytes per second of an elementwise operation of the device.
        peaks: type -> the most floating-point operations per second of a product of the device in it.
    """

    device: str
    second: str
    rows: Sequence[Rate]
    bandwidth: float
    peaks: dict[str, float]

    @property
    def summary(self) -> str:
        peaks = "".join(f", {rate / 1e9:.3g} GFLOP/s in products of {dtype}" for dtype, rate in self.peaks.items())
        return f"{self.device}, measured limits: {self.bandwidth / 1e9:.3g} GB/s{peaks}"

    @property
    def text(self) -> str:
        """A table with a line for each node."""
        second = f"{'x ' + self.second:>10}" if self.second else ""
        width = max([len(row.op) for row in self.rows], default=9)
        lines = [self.summary, f"{'operation':<{width}}  type         time     GB/s  GFLOP/s  of limit{second}  shapes"]
        for row in self.rows:
            flops = f"{row.flops_per_second / 1e9:.3g}" if row.flops else ""
            limit = f"{row.of_limit:.0%}" if row.of_limit is not None else ""
            times = (f"{row.times:>10.2f}" if row.times is not None else " " * 10) if self.second else ""
            lines.append(
                f"{row.op:<{width}}  {row.dtype:<7} {human_time(row.seconds):>9}  {row.bytes_per_second / 1e9:>7.3g}  "
                f"{flops:>7}  {limit:>8}{times}  {row.shapes}"
            )
        return "\n".join(lines)

    def dicts(self) -> list[dict[str, Any]]:
        """``rows`` with the rates among the values."""
        rates = ("bytes_per_second", "flops_per_second", "times")
        return [asdict(row) | {name: getattr(row, name) for name in rates} for row in self.rows]

    def html(self, **about: Any) -> str:
        """One self-contained HTML page; ``about`` is shown at its top."""
        return render(Path(__file__).with_name("bench.html.j2"), report=self, about=about)


def throughput(
    device: Device,
    second: Device | None = None,
    only: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> Throughput:
    """Measure every operation that a device runs, on its largest sample in each type.

    Args:
        device: what is measured.
        second: a device that runs the same nodes, to compare with.
        only: patterns of names of operations; default: all.
        dtypes: names of types; default: all.
        progress: called with the operation, how many nodes are done, and how many there are.

    Raises:
        UnsupportedOpError: the device runs none of these samples.
        AllocationError, ExecutionError: the device fails.
    """
    nodes = [
        (dtype, node)
        for op, dtype, node in _samples()
        if (not only or any(fnmatchcase(op, pattern) for pattern in only)) and (not dtypes or dtype in dtypes)
        if device.why_not(step_of(node)) is None
    ]
    if not nodes:
        raise UnsupportedOpError(f"{device.name} runs none of the samples of {', '.join(only) or 'the operations'}")
    rows: list[Rate] = []
    for done, (dtype, node) in enumerate(nodes):
        assert node.op is not None
        if progress is not None:
            progress(f"{node.op.name} {dtype}", done, len(nodes))
        size, flops = work(node)
        shapes = " ".join(str(list(x.shape)) for x in (node, *node.srcs))
        beside = None if second is None else _seconds_or_none(second, node)
        rows.append(Rate(node.op.name, dtype, shapes, size, flops, _seconds(device, node), beside))
    bandwidth = max((row.bytes_per_second for row in rows if OPS[row.op].pointwise), default=0.0)
    peaks: dict[str, float] = {}
    for row in rows:
        if OPS[row.op].product:
            peaks[row.dtype] = max(peaks.get(row.dtype, 0.0), row.flops_per_second)
    rows = [replace(row, of_limit=_of_limit(row, bandwidth, peaks)) for row in rows]
    return Throughput(device.name, "" if second is None else second.name, rows, bandwidth, peaks)


def _samples() -> Iterator[tuple[str, str, Tensor]]:
    """The largest nodes of moderate size: of each operation and type one whose time depends on bytes, and one whose
    time depends on floating-point operations, where there is one."""
    for op in list(OPS.values()):
        for sample in op.samples() if op.samples is not None else ():
            chosen = [_largest(sample.build())]
            if sample.products is not None and sample.products is not sample.build:
                chosen.append(_largest(sample.products()))
            for node in chosen:
                yield op.name, sample.dtype, node


def _largest(nodes: Sequence[Tensor]) -> Tensor:
    return max([node for node in nodes if work(node)[0] <= LARGEST] or nodes[:1], key=lambda node: work(node))


def _of_limit(row: Rate, bandwidth: float, peaks: dict[str, float]) -> float | None:
    by_bytes = row.nbytes / bandwidth if bandwidth else 0.0
    by_flops = row.flops / peaks[row.dtype] if OPS[row.op].product else 0.0
    return max(by_bytes, by_flops) / row.seconds or None


def _seconds_or_none(device: Device, node: Tensor) -> float | None:
    try:
        return _seconds(device, node)
    except OpweaveError:  # what is compared with may lack it, or fail: it is not what is measured
        return None


def _seconds(device: Device, node: Tensor) -> float:
    assert node.signature is not None
    return seconds_of_step(device, node.signature)
