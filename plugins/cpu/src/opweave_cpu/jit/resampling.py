"""Resampling, linear and cubic, as one compiled loop: each row of the result is put together from a few rows of the
source in a line that stays in the first-level cache, and its elements from a few of that line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir

from opweave.contract import Arg, Call, Step, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import LANES, Vector, declared, fma, load, store, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Writer, takes
from opweave_cpu.tiles import Array
from opweave_cpu.tunables import limit

__all__ = ["Taps", "bind_resampling", "fits", "tables"]

LONGEST_ROW: Final = limit("resampled_row", 1 << 12, 1, 1 << 12, bounds=(1, 1 << 12))
"""Elements of a row of the source at most: a line of them fits the first-level cache."""

_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)


def fits(step: Step) -> bool:
    """Whether a step whose result is dense is compiled."""
    x, out = step.srcs[0], step.out
    in_rows = x.strides[-1] == x.dtype.itemsize and x.shape[-1] <= LONGEST_ROW.value
    return in_rows and takes(x, wide=True) and takes(out, wide=True)


class Taps(NamedTuple):
    """From which elements along an axis each sample is computed, and with which weights: i32 and the type to compute
    in. Along all axes but the last, (samples, taps); along that (vectors, taps, lanes), and 0 behind the end."""

    places: Array
    weights: Array

    @property
    def each(self) -> int:
        """How many there are for each sample."""
        found: int = self.places.shape[1]
        return found


def tables(found: Sequence[tuple[Array, Array]], dtype: Any) -> list[Taps]:
    """The taps of each axis from those of `opweave.ops.interpolation.axis_taps`."""
    taps = [Taps(places.T.astype(np.int32), weights.T.astype(dtype)) for places, weights in found]
    last = []
    for values in taps[-1]:
        padded = np.zeros((-(-len(values) // LANES) * LANES, values.shape[1]), values.dtype)
        padded[: len(values)] = values
        last.append(np.ascontiguousarray(padded.reshape(-1, LANES, values.shape[1]).swapaxes(1, 2)))
    return [*taps[:-1], Taps(*last)]


def bind_resampling(stream: Stream, out: Arg, x: Arg, taps: Sequence[Taps], places: Arg, weights: Arg) -> Call:
    """The call for the operands of a step that fits.

    Args:
        taps: of each axis but the first two.
        places, weights: memory that holds the arrays of all of them, one behind the other.
    """
    rank, item, size = len(taps), x.dtype.itemsize, out.dtype.itemsize
    wide = weights.dtype.itemsize
    # The axes: images, channels, and those of the result.
    strides: list[tuple[int, ...]] = [(*x.strides[:2], *[0] * rank)]
    args = [x]
    start = 0
    for axis, own in enumerate(taps):
        for arg, nbytes in ((places, 4), (weights, wide)):
            along = 0 if axis == rank - 1 else own.each * nbytes
            strides.append((0, 0, *[along if k == axis else 0 for k in range(rank)]))
            args.append(moved(arg, start * nbytes))
        start += own.places.size
    strides.append(out.strides)
    args.append(out)
    kinds = x.dtype.name, item, weights.dtype.name, wide, out.dtype.name, size
    counts = tuple([own.each for own in taps])
    code = stream.artefact(("resampling", kinds, counts), partial(_compiled, *kinds, counts))
    numbers = [*x.strides[2:-1], x.shape[-1]]
    work = 2 * (prod(counts[:-1]) + counts[-1])
    return bind_walk(stream, code, Walk(out.shape, tuple(strides), len(out.shape) - 1), args, numbers, work=work)


def _compiled(of: str, item: int, kind: str, nbytes: int, into: str, size: int, counts: Sequence[int]) -> MachineCode:
    rank = len(counts)
    of_taps = [Operand("i32", 4), Operand(kind, nbytes)] * rank
    writer = Writer(2 + rank, [Operand(of, item), *of_taps, Operand(into, size)])
    code, last = writer.code, 1 + 2 * rank
    numbers = [writer.integer() for _ in range(rank)]
    *apart, width = numbers
    kind_type = vector_type(kind)
    line = writer.array(kind_type, LONGEST_ROW.bounds[1] // LANES)
    pointers = ir.VectorType(kind_type.element.as_pointer(), LANES)
    types = [pointers, _I32, vector_type("bool"), kind_type]
    gather = declared(code, f"llvm.masked.gather.v{LANES}{kind}.v{LANES}p0", kind_type, types)
    everywhere, nothing = ir.Constant(vector_type("bool"), [1] * LANES), ir.Constant(kind_type, None)

    def sources(bases: Sequence[Any]) -> list[tuple[Any, Vector | None]]:
        """The addresses of the rows that a row of the result is made of, and their weights; ``None``: 1."""
        found: list[tuple[Any, Vector | None]] = [(bases[0], None)]
        for axis, count in enumerate(counts[:-1]):
            places, weights = bases[1 + 2 * axis : 3 + 2 * axis]
            rows = []
            for t in range(count):
                place = code.sext(load(code, _I32, code.add(places, _I64(4 * t)), 4), _I64)
                weight = load(code, kind_type.element, code.add(weights, _I64(nbytes * t)), nbytes)
                rows.append((code.mul(place, apart[axis]), writer.splat(weight, kind)))
            found = [
                (code.add(address, offset), weight if before is None else before * weight)
                for (address, before), (offset, weight) in product(found, rows)
            ]
        return found

    def put_together(rows: Sequence[tuple[Any, Vector | None]], i: Any, mask: Any) -> None:
        total: Vector | None = None
        for address, weight in rows:
            x = writer.read(0, address, i, mask)
            if total is None:
                total = x if weight is None else x * weight
            else:
                assert weight is not None
                total = fma(x, weight, total)
        assert total is not None
        store(code, total.value, code.add(line, code.mul(i, _I64(nbytes))), nbytes)

    def sample(bases: Sequence[Any], i: Any, mask: Any) -> None:
        places, weights = bases[last - 2 : last]
        first, total = code.mul(i, _I64(counts[-1])), None  # of the numbers of a vector of samples
        for t in range(counts[-1]):
            at = code.add(first, _I64(LANES * t))
            place = load(code, vector_type("i32"), code.add(places, code.mul(at, _I64(4))), 4)
            weight = load(code, kind_type, code.add(weights, code.mul(at, _I64(nbytes))), nbytes)
            steps = Vector(code, place, "i32").to("i64") * nbytes + writer.splat(line, "i64")
            value = code.call(gather, [code.inttoptr(steps.value, pointers), _I32(nbytes), everywhere, nothing])
            x, w = Vector(code, value, kind), Vector(code, weight, kind)
            total = x * w if total is None else fma(x, w, total)
        assert total is not None
        writer.write(last, bases[last], i, total, mask)

    with writer.rows() as bases:
        rows = sources(bases)
        writer.over(width, lambda i, mask, _: put_together(rows, i, mask))
        writer.elements(lambda i, mask, _: sample(bases, i, mask))
    return MachineCode(writer.end())
