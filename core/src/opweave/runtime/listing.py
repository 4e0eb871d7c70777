"""What a group reads and writes (`listed`), and what it computes in whatever memory (`structure_of`).

Compilers of whole groups need both: the one to know their arguments, the other to compile equal groups only once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.contract.step import Arg, Group, Step
from opweave.graph.dtypes import u8
from opweave.graph.layout import dense_strides, is_dense
from opweave.graph.opdef import OPS

if TYPE_CHECKING:
    from opweave.runtime.buffer import Buffer

__all__ = ["Structure", "listed", "structure_of"]


class Structure(NamedTuple):
    """A group without its memory. Groups whose structures have one ``key`` compute the same function of their operands.

    Attributes:
        steps: unbound. ``Arg.value`` numbers the operands and the values between steps, ``Arg.offset`` counts from the
            start of the operand or value.
        inputs: what the function takes, in the order of ``Group.reads``: dense, at offset 0.
        outputs: what it returns, in the order of ``Group.writes``.
        donated: positions in ``inputs`` of arrays that nobody else uses from then on.
    """

    steps: tuple[Step, ...]
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    donated: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        """Equal for equal structures; labels of steps do not count, nor who else needs their results."""
        steps = tuple(
            [
                tuple([_frozen(v) for name, v in zip(step._fields, step, strict=True) if name not in ("live", "label")])
                for step in self.steps
            ]
        )
        return steps, self.inputs, self.outputs, self.donated


class Region:
    """Bytes of one buffer that windows of a group cover, and those windows."""

    def __init__(self, buffer: Buffer, start: int, end: int) -> None:
        self.buffer: Final = buffer
        self.start: Final = start
        self.end = end
        self.windows: list[Arg] = []

    def covered_by(self, arg: Arg) -> bool:
        """Whether a window is all of the region, in row-major order."""
        dense = is_dense(arg.shape, arg.strides, arg.dtype)
        return dense and arg.offset == self.start and arg.offset + arg.span == self.end

    def operand(self, windows: Sequence[Arg]) -> Arg:
        """The region as one dense operand: with dtype and shape of a window that is all of it, else flat."""
        found = next((w for w in windows if self.covered_by(w)), None)
        if found is not None:
            strides = dense_strides(found.shape, found.dtype)
            return Arg(self.buffer, self.start, found.dtype, found.shape, strides, found.handle, found.value)
        first = windows[0]
        size, dtype = self.end - self.start, first.dtype
        if size % dtype.itemsize or any(w.dtype is not dtype for w in windows):
            dtype = u8
        shape = (size // dtype.itemsize * dtype.block,)
        return Arg(self.buffer, self.start, dtype, shape, dense_strides(shape, dtype), first.handle, first.value)


class Regions:
    """The regions of the bound operands of some steps.

    Args:
        wholes: value number -> all of the value, where that is known; regions do not cut through these.
    """

    def __init__(self, steps: Sequence[Step], wholes: Mapping[int, Arg]) -> None:
        by_buffer: dict[int, list[Arg]] = {}
        for step in steps:
            for arg in (step.out, *step.srcs):
                if arg.buffer is not None:
                    # In front, so that `Region.operand` takes its dtype and shape.
                    whole = wholes.get(arg.value)
                    by_buffer.setdefault(id(arg.buffer), []).extend([arg] if whole is None else [whole, arg])
        self._of: Final[dict[int, list[Region]]] = {}
        for key, windows in by_buffer.items():
            regions: list[Region] = []
            for arg in sorted(windows, key=lambda w: w.offset):
                end, buffer = arg.offset + arg.span, arg.buffer
                assert buffer is not None
                if regions and arg.offset < regions[-1].end:
                    regions[-1].end = max(regions[-1].end, end)
                else:
                    regions.append(Region(buffer, arg.offset, end))
            self._of[key] = regions
            for arg in windows:
                self.around(arg).windows.append(arg)

    def around(self, arg: Arg) -> Region:
        """The region of a bound operand."""
        return next(r for r in self._of[id(arg.buffer)] if r.start <= arg.offset < r.end)


def listed(
    group: Group,
    wholes: Mapping[int, Arg] | None = None,
    constant: Set[int] = frozenset(),
    dead: Set[int] = frozenset(),
    donatable: Set[int] = frozenset(),
) -> Group:
    """The group with its operands listed (`Group.reads` and what follows it).

    Args:
        wholes: value number -> the dense operand that is all of it, where that is known.
        constant, dead, donatable: the numbers of the values of which this holds; see `Group`.
    """
    wholes = wholes or {}
    regions = Regions(group.steps, wholes)
    reads: dict[Region, None] = {}
    written: dict[Region, list[Arg]] = {}
    values: dict[Region, set[int]] = {}
    for step in group.steps:
        for arg in step.srcs:
            if arg.buffer is not None:
                region = regions.around(arg)
                values.setdefault(region, set()).add(arg.value)
                if region not in written:
                    reads[region] = None
        if step.out.buffer is not None:
            region = regions.around(step.out)
            values.setdefault(region, set()).add(step.out.value)
            if region not in written and (_writes_state(step) or not region.covered_by(step.out)):
                reads[region] = None  # parts of it stay as they are
            written.setdefault(region, []).append(step.out)
    operands = [_as_read(region, written.get(region, ())) for region in reads]

    def having(numbers: Set[int]) -> frozenset[int]:
        return frozenset(i for i, r in enumerate(reads) if r not in written and values[r] <= numbers)

    return group._replace(
        reads=tuple(operands),
        writes=tuple([_as_written(region, outs, region in reads) for region, outs in written.items()]),
        constant=having(constant), dead=having(dead), donatable=having(donatable),
    )  # fmt: skip


def _as_read(region: Region, outs: Sequence[Arg]) -> Arg:
    """A region as the steps find it. Where results take over the memory of a source, windows of both are in it."""
    results = {out.value for out in outs if region.covered_by(out)}
    sources = [w for w in region.windows if w.value not in results]
    return region.operand(sources or region.windows)


def _as_written(region: Region, outs: Sequence[Arg], is_read: bool) -> Arg:
    """A region as the steps leave it: as the last result that covers it, else as it was before."""
    covering = [out for out in reversed(outs) if region.covered_by(out)]
    if not is_read:
        values = {out.value for out in outs}
        return region.operand([w for w in region.windows if w.value in values] or region.windows)
    return region.operand(covering) if covering else _as_read(region, outs)


def _writes_state(step: Step) -> bool:
    op = OPS.get(step.op)
    return op is not None and op.writes


def structure_of(group: Group) -> Structure:
    """The structure of a listed group.

    Everything that the group changes or may overwrite counts as donated: its former content is gone afterwards.
    """
    places = [*group.reads, *group.writes]
    starts: dict[int, list[tuple[int, int, int]]] = {}  # buffer -> (start, end, number)
    numbers: dict[object, int] = {}
    for arg in places:
        number = numbers.setdefault((id(arg.buffer), arg.offset), len(numbers))
        starts.setdefault(id(arg.buffer), []).append((arg.offset, arg.offset + arg.span, number))

    def unbound(arg: Arg) -> Arg:
        if arg.buffer is None:
            number = numbers.setdefault(arg.value, len(numbers))
            return Arg(None, arg.offset, arg.dtype, arg.shape, arg.strides, None, number)
        start, number = next((s, n) for s, e, n in starts[id(arg.buffer)] if s <= arg.offset < e)
        return Arg(None, arg.offset - start, arg.dtype, arg.shape, arg.strides, None, number)

    inputs, outputs = tuple(map(unbound, group.reads)), tuple(map(unbound, group.writes))
    steps = tuple([s._replace(out=unbound(s.out), srcs=tuple(map(unbound, s.srcs)), choice=None) for s in group.steps])
    changed = {output.value for output in outputs}
    donated = tuple([i for i, a in enumerate(inputs) if i in group.donatable or a.value in changed])
    return Structure(steps, inputs, outputs, donated)


def _frozen(value: Any) -> Any:
    """An attribute as a part of a key."""
    if isinstance(value, Mapping):
        return tuple([(name, _frozen(value[name])) for name in sorted(value)])
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    # 1, 1.0 and True are equal, and not the same attribute.
    return type(value).__name__, value
