"""`throughput`: how fast a device runs the operations that it supports, beside a second device and its own limits.

What is run are the samples of the operations' definitions, those that profiles of devices are made of; of operations
without samples a case of the suite, lengthened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opweave.errors import OpweaveError, UnknownNameError, UnsupportedOpError
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS, OpDef
from opweave.graph.work import work
from opweave.scheduler.explain.page import Report, render
from opweave.units import human_time
from opweave_conformance.timing import seconds_of_step
from opweave_conformance.trial import step_of, the_node

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.tensor import Tensor
    from opweave_conformance.case import Case

__all__ = ["Rate", "Throughput", "throughput"]

LARGEST: Final = 64 << 20
"""Bytes that a node reads and writes at most, unless all of its samples are larger."""

ELEMENTS: Final = 1 << 20
SLOW_ELEMENTS: Final = 1 << 14
"""Elements of the largest operand of an operation without samples; and where references take long."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one node ran.

    Attributes:
        op, dtype: its operation, and the type of the sample.
        shapes: of the result and the sources, with those named that are no dense memory.
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
        bandwidth: the most bytes per second of an operation of the device.
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

    Its limits are measured too, whatever is selected: with the first elementwise operation that it runs, and with
    ``linear`` or else its first product. They are never less than what a row reached.

    Args:
        device: what is measured.
        second: a device that runs the same nodes, to compare with.
        only: patterns of names of operations; default: all.
        dtypes: names of types; default: all, of operations without samples f32 or else the first one that it runs.
        progress: called with the operation, how many nodes are done, and how many there are.

    Raises:
        UnknownNameError: a pattern that no operation matches, or a type that does not exist.
        UnsupportedOpError: the device runs none of these operations.
        AllocationError, ExecutionError: the device fails.
    """
    chosen, wanted = _chosen(only), [as_dtype(name).name for name in dtypes]
    nodes = [found for op in chosen for found in _nodes(op, device, wanted)]
    if not nodes:
        names = ", ".join(op.name for op in chosen) if only else "any operation"
        of_types = f" in {', '.join(wanted)}" if wanted else ""
        raise UnsupportedOpError(f"{device.name} runs none of {names}{of_types}; opweave conformance tells why")
    known = {(dtype, node.signature) for dtype, node in nodes}
    limiting = [
        found
        for found in _limiting(device, {dtype for dtype, _ in nodes})
        if (found[0], found[1].signature) not in known
    ]
    rows: list[Rate] = []
    for done, (dtype, node) in enumerate([*nodes, *limiting]):
        assert node.op is not None
        if progress is not None:
            progress(f"{node.op.name} {dtype}", done, len(nodes) + len(limiting))
        size, flops = work(node)
        beside = None if second is None or done >= len(nodes) else _seconds_or_none(second, node)
        rows.append(Rate(node.op.name, dtype, _shapes(node), size, flops, _seconds(device, node), beside))
    bandwidth = max(row.bytes_per_second for row in rows)
    peaks: dict[str, float] = {}
    for row in rows:
        if OPS[row.op].product:
            peaks[row.dtype] = max(peaks.get(row.dtype, 0.0), row.flops_per_second)
    shown = [replace(row, of_limit=_of_limit(row, bandwidth, peaks)) for row in rows[: len(nodes)]]
    return Throughput(device.name, "" if second is None else second.name, shown, bandwidth, peaks)


def _chosen(only: Sequence[str]) -> list[OpDef]:
    """The operations that match one of the patterns. Raises `UnknownNameError` for a pattern that none matches."""
    computed = [op for op in OPS.values() if not op.is_view]
    for pattern in only:
        if not any(fnmatchcase(op.name, pattern) for op in computed):
            raise UnknownNameError("operation that devices compute", pattern, [op.name for op in computed])
    return [op for op in computed if not only or any(fnmatchcase(op.name, pattern) for pattern in only)]


def _limiting(device: Device, dtypes: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """What measures the limits of a device in these types: the first elementwise operation that it runs, and
    ``linear`` or else its first product."""
    sampled = [op for op in OPS.values() if op.samples is not None]
    products = sorted((op for op in sampled if op.product), key=lambda op: op.name != "linear")  # it has most types
    for ops in [op for op in sampled if op.pointwise], products:
        yield from next(filter(None, (list(_nodes(op, device, dtypes)) for op in ops)), [])


def _nodes(op: OpDef, device: Device, dtypes: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The nodes of an operation that a device runs, in the types named (none: all) of which there are any."""
    if op.samples is None:
        yield from _lengthened(op, device, dtypes)
        return
    for sample in op.samples():
        # One whose time depends on bytes, and one whose time depends on floating-point operations, where there is one.
        makers = dict.fromkeys(make for make in (sample.build, sample.products) if make is not None)
        for node in (_largest(make()) for make in makers if not dtypes or sample.dtype in dtypes):
            if device.why_not(step_of(node)) is None:
                yield sample.dtype, node


def _largest(nodes: Sequence[Tensor]) -> Tensor:
    return max([node for node in nodes if work(node)[0] <= LARGEST] or nodes[:1], key=lambda node: work(node))


def _lengthened(op: OpDef, device: Device, dtypes: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Of an operation without samples the cases of the suite that move most bytes, one in each type named, or in the
    first that the device runs."""
    # Imported here because making the cases takes time.
    from opweave_conformance.cases import cases_for
    from opweave_conformance.fuzz.draw import SLOW
    from opweave_conformance.levels.operations import column

    elements = SLOW_ELEMENTS if op.family in SLOW else ELEMENTS
    cases: dict[str, list[Case]] = {}
    for case in cases_for(op.name):
        cases.setdefault(column(case), []).append(case)
    for dtype in dtypes or sorted(cases, key=lambda name: name != "f32"):
        built = [node for case in cases.get(dtype, ()) for node in _built(case, elements)]
        runs = [node for node in built if device.why_not(step_of(node)) is None]
        if runs:
            yield dtype, max(runs, key=_how_telling)
            if not dtypes:
                return


def _how_telling(node: Tensor) -> tuple[bool, bool, tuple[int, int]]:
    """Dense operands rather than others; of elementwise operations one axis, of others rows; and much work."""
    assert node.op is not None
    return all(x.is_dense for x in node.srcs), (len(node.shape) == 1) == node.op.pointwise, work(node)


def _built(case: Case, elements: int) -> Iterator[Tensor]:
    """The node of a case whose first axis is as long as ``elements`` in its largest operand allow; as it is, where its
    options belong to its lengths."""
    count, largest = max([(prod(operand.shape), operand.shape) for operand in case.operands], default=(0, ()))
    if largest and count:
        old, new = largest[0], max(elements * largest[0] // count, 1)
        longer = [
            o._replace(shape=tuple([new if n == old else n for n in o.shape]), high=new if o.high == old else o.high)
            for o in case.operands
        ]
    else:
        longer = list(case.operands)
    for operands in (longer, case.operands):
        try:
            node = the_node(case.build(*[operand.tensor(f"x{i}") for i, operand in enumerate(operands)]))
        except (OpweaveError, ValueError, AssertionError):
            continue
        if work(node)[0] <= LARGEST:
            yield node
            return


def _shapes(node: Tensor) -> str:
    """Of the result and the sources, as the table shows them."""
    return " ".join(f"{list(x.shape)}{'' if x.is_dense else ' strided'}" for x in (node, *node.srcs))


def _of_limit(row: Rate, bandwidth: float, peaks: dict[str, float]) -> float | None:
    by_bytes = row.nbytes / bandwidth
    by_flops = row.flops / peaks[row.dtype] if OPS[row.op].product and peaks[row.dtype] else 0.0
    return max(by_bytes, by_flops) / row.seconds or None


def _seconds_or_none(device: Device, node: Tensor) -> float | None:
    try:
        return _seconds(device, node)
    except OpweaveError:  # what is compared with may lack it, or fail: it is not what is measured
        return None


def _seconds(device: Device, node: Tensor) -> float:
    assert node.signature is not None
    return seconds_of_step(device, node.signature)
