"""Rotary position embedding: cosines and sines of angles, and the rotation of pairs, as one compiled loop each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import factorial, pi
from typing import Any, Final

from opweave.contract import Arg, Call, Stream
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.vectors import Vector, fma, polynomial, select
from opweave_cpu.jit.walk import Operand, bind_walk, walk_over
from opweave_cpu.jit.writer import Writer, takes

__all__ = ["bind_cos_and_sin", "bind_rotation"]

_ROUNDER: Final = 1.5 * 2**52
"""Added to a number below 2**51 it leaves the nearest whole number in the last bits."""

_HALF_PI_LOW: Final = 6.123233995736766e-17
"""π/2 less the f64 nearest to it."""

_SIN: Final = [(-1) ** n / factorial(2 * n + 1) for n in range(1, 5)]
_COS: Final = [(-1) ** n / factorial(2 * n) for n in range(1, 6)]
"""The Taylor series of (sin(r) - r) / r³ and (cos(r) - 1) / r² in r²: up to π/4 what they leave out is below 3e-9."""


def cos_and_sin(angle: Vector) -> tuple[Vector, Vector]:
    """Both in f32, of an angle in f64 below 2**51, from its distance to the nearest multiple of π/2."""
    shifted = fma(angle, 2 / pi, _ROUNDER)
    n = shifted - _ROUNDER
    r = fma(n, -_HALF_PI_LOW, fma(n, -pi / 2, angle)).to("f32")
    quarter = shifted.bits("i64")
    square = r * r
    sine = fma(polynomial(square, _SIN) * square, r, r)
    cosine = fma(polynomial(square, _COS), square, 1.0)
    odd = (quarter & 1).compare("!=", 0)
    first, second = select(odd, sine, cosine), select(odd, cosine, sine)
    negative = ((quarter + 1) & 2).compare("!=", 0), (quarter & 2).compare("!=", 0)
    return select(negative[0], -first, first), select(negative[1], -second, second)


def bind_cos_and_sin(
    stream: Stream, positions: Arg, steps: Sequence[float], magnitude: float, cos: Arg, sin: Arg
) -> Call:
    """The call that computes cosines and sines, times ``magnitude``, of the angles by which positions are rotated.

    Args:
        positions: i32 or i64, of the shape of the others, repeated along the last axis.
        steps: for each element of the last axis the angle of position 1.
        cos, sin: f32, of one layout.
    """
    args = [positions, cos, sin]
    walk = walk_over(cos.shape, [arg.strides for arg in args], rows=True)
    key = len(walk.lengths), walk.operands(args)
    code = stream.artefact(("cos and sin", key), partial(_table, *key))
    return bind_walk(stream, code, walk, args, [magnitude, *steps], work=24)


def bind_rotation(stream: Stream, args: Sequence[Arg]) -> Call | None:
    """The call that rotates pairs; ``None`` where an operand is of another type than compiled functions read.

    Args:
        args: the first and the second elements of the pairs, cosines and sines, and where the results go, all of one
            shape. A result may lie where the element is that it replaces.
    """
    if not all(takes(arg, wide=True) for arg in args):
        return None
    walk = walk_over(args[0].shape, [arg.strides for arg in args])
    key = len(walk.lengths), walk.operands(args)
    code = stream.artefact(("rotation", key), partial(_rotation, *key))
    return bind_walk(stream, code, walk, args, work=12)


def _table(axes: int, operands: Sequence[Operand]) -> MachineCode:
    writer = Writer(axes, operands)
    magnitude, steps = writer.scalar().to("f32"), writer.numbers()
    with writer.rows() as rows:

        def element(i: Any, mask: Any, _: int) -> None:
            position = writer.read(0, rows[0], i, mask).to("f64")
            for k, value in enumerate(cos_and_sin(position * writer.dense("f64", steps, i, mask)), 1):
                writer.write(k, rows[k], i, value * magnitude, mask)

        writer.elements(element)
    return MachineCode(writer.end())


def _pair(writer: Writer, rows: Sequence[Any], i: Any, mask: Any) -> None:
    a, b, cos, sin = [writer.read(k, rows[k], i, mask) for k in range(4)]
    writer.write(4, rows[4], i, a * cos - b * sin, mask)
    writer.write(5, rows[5], i, b * cos + a * sin, mask)


def _rotation(axes: int, operands: Sequence[Operand]) -> MachineCode:
    writer = Writer(axes, operands)
    with writer.rows() as rows:
        writer.elements(lambda i, mask, _: _pair(writer, rows, i, mask))
    return MachineCode(writer.end())
