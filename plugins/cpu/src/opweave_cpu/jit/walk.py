"""How a kernel walks over its operands: axes that lie alike are merged, and each thread does a part of one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from operator import add
from struct import Struct, pack, unpack
from typing import Final, NamedTuple

from opweave.contract import Arg, Call, Stream
from opweave.graph.layout import Shape
from opweave_cpu.jit.compiler import FirstRun, MachineCode
from opweave_cpu.jit.team import Parts
from opweave_cpu.tiles import shares, workers_of
from opweave_cpu.tunables import COMPILED_WORK, limit

__all__ = ["Operand", "Prepared", "Walk", "bind_walk", "moved", "walk_over"]

HOLDING_WORK: Final = limit("holding_work", 1 << 13, 1, 1 << 20)
"""Elementary operations up to which a kernel keeps the interpreter's lock."""

SHARED_WORK: Final = limit("shared_work", 1 << 16, 1, 1 << 23)
"""Elementary operations from which on a kernel is shared with threads that wait anyway: more than handing a part over
takes. `COMPILED_WORK` says from when on they are woken."""

DIVIDED_AXIS: Final = limit("divided_axis", 8, 1, 256)
"""Length from which on the first axis is divided between threads; else the longest one is."""


class Operand(NamedTuple):
    """An operand as a kernel sees it.

    Attributes:
        dtype: name of its type in memory.
        inner: bytes from one element to the next along the last axis: the size of the type, 0 where one number is
            repeated, -1 for any other, which the kernel then reads.
    """

    dtype: str
    inner: int


class Walk(NamedTuple):
    """The axes that a kernel goes along, and which of them threads may divide.

    Attributes:
        lengths: of the axes, outermost first.
        strides: for each operand the bytes from one element to the next along each axis.
        divisible: the number of leading axes along which a kernel computes one element independently of the others. Any
            of them may be cut into parts for several threads; what lies within them is one thread's: a row whose sum,
            largest element or running sum is taken, the inputs of a product. 0: the whole walk is one part.
    """

    lengths: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    divisible: int

    def operands(self, args: Sequence[Arg]) -> tuple[Operand, ...]:
        kinds = []
        for arg, strides in zip(args, self.strides, strict=True):
            inner = strides[-1]
            kinds.append(Operand(arg.dtype.name, inner if inner in (0, arg.dtype.itemsize) else -1))
        return tuple(kinds)


def walk_over(shape: Shape, strides: Sequence[Sequence[int]], *, rows: bool = False) -> Walk:
    """The shortest walk over ``shape``: axes of one element are left out, and those that lie alike in every operand
    are one.

    Args:
        strides: of each operand, in bytes, as many as axes.
        rows: the last axis is a row, which stays as it is and which one thread computes; else all axes are divisible.
    """
    lengths: list[int] = []
    steps: list[list[int]] = []  # by axis
    for axis, n in enumerate(shape):
        last = axis == len(shape) - 1
        own = [s[axis] for s in strides]
        if n == 1 and not (rows and last):
            continue
        if lengths and not (rows and last) and all(a == b * n for a, b in zip(steps[-1], own, strict=True)):
            lengths[-1], steps[-1] = lengths[-1] * n, own
        else:
            lengths.append(n)
            steps.append(own)
    if not lengths:
        lengths, steps = [1], [[0] * len(strides)]
    return Walk(tuple(lengths), tuple(zip(*steps, strict=True)), len(lengths) - rows)


def moved(arg: Arg, nbytes: int) -> Arg:
    """An operand that lies ``nbytes`` bytes further."""
    return Arg(arg.buffer, arg.offset + nbytes, arg.dtype, arg.shape, arg.strides)


class Prepared:
    """A kernel over operands whose layouts are known: `bind` says where they lie.

    Args:
        numbers: what the formulas take beside operands.
        work: elementary operations for one element.
        places: for each operand of the kernel the number of the argument of `bind` in which it lies, and the bytes from
            the start of that; default: `bind` is given the operands in the order of the kernel.
    """

    def __init__(
        self,
        code: MachineCode,
        walk: Walk,
        numbers: Iterable[float] = (),
        *,
        work: int,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._code, self._work = code, work * prod(walk.lengths)
        self._axis, self._unit = _axis_to_divide(walk)
        self._length: Final = walk.lengths[self._axis]
        self._is_divisible: Final = walk.divisible > 0
        axes, operands = len(walk.lengths), len(walk.strides)
        offsets = [0] * operands if places is None else [offset for _, offset in places]
        words = [*walk.lengths]
        for offset, strides in zip(offsets, walk.strides, strict=True):
            words += (offset, *strides)
        self._words: Final = words + [unpack("q", pack("d", float(n)))[0] for n in numbers]
        # Where the addresses are among the words that the kernel reads: each before the strides of its operand.
        self._slots: Final = slice(axes, axes + operands * (axes + 1), axes + 1)
        self._numbers: Final = None if places is None else [number for number, _ in places]
        self._pack: Final = Struct(f"{len(self._words)}q").pack
        self._divided: Final[dict[int, list[list[int]]]] = {}  # number of threads -> the words for each of them

    def bind(self, stream: Stream, args: Sequence[Arg]) -> Call:
        """The call for bound operands."""
        starts, slots = [arg.address for arg in args], self._slots
        if self._numbers is not None:
            starts = list(map(starts.__getitem__, self._numbers))
        least = min(SHARED_WORK.value, COMPILED_WORK.value)
        count = workers_of(stream) if self._is_divisible and self._work >= least else 1
        parts = []
        for words in self._divided.get(count) or self._divide(count):
            own = words.copy()
            own[slots] = map(add, own[slots], starts)
            parts.append(self._pack(*own))
        if self._code.load(compiling=False):
            return self._call(parts)
        return FirstRun(self._code, partial(self._call, parts))

    def _call(self, parts: Sequence[bytes]) -> Call:
        if len(parts) > 1:
            return Parts(self._code.address, parts, self._work).run
        return partial(self._code.holding if self._work <= HOLDING_WORK.value else self._code.releasing, parts[0])

    def _divide(self, count: int) -> list[list[int]]:
        """The words for each of several threads, but for the addresses of arguments, which are added to them."""
        parts = self._divided[count] = []
        for part in shares(-(-self._length // self._unit), count):
            own, start = self._words.copy(), part.start * self._unit
            own[self._axis] = min(part.stop * self._unit, self._length) - start
            for at in range(len(own))[self._slots]:
                own[at] += start * own[at + 1 + self._axis]
            parts.append(own)
        return parts


def bind_walk(
    stream: Stream,
    code: MachineCode,
    walk: Walk,
    args: Sequence[Arg],
    numbers: Iterable[float] = (),
    *,
    work: int,
) -> Call:
    """The call of a kernel over bound operands; arguments as of `Prepared`."""
    return Prepared(code, walk, numbers, work=work).bind(stream, args)


def _axis_to_divide(walk: Walk) -> tuple[int, int]:
    """The axis that is cut into parts for threads, and the number of which the length of a part is a multiple, so that
    two threads rarely write into one cache line."""
    axis = 0
    if walk.divisible > 1 and walk.lengths[0] < DIVIDED_AXIS.value:  # too few for equal parts
        axis = max(range(walk.divisible), key=lambda i: walk.lengths[i])
    return axis, 64 if axis == len(walk.lengths) - 1 else 1
