"""Random numbers by Philox, in unsigned integers of 64 bits."""

from __future__ import annotations

from math import pi, prod
from typing import Any

import numpy as np
from onnx import TensorProto

from opweave.graph.dtypes import DType, f32, f64
from opweave.graph.layout import Shape
from opweave.ops.random import KEY_STEPS, LOW, MULTIPLIERS, ROUNDS, UNIFORM_BITS, block_values
from opweave_ort.kernels.table import emits
from opweave_ort.model import ONNX_TYPES, Model, Operand

Words = list[str]


class _Integers:
    """Operators on values of u64, and constants of it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, kind: str, a: str, b: str | int, **attributes: Any) -> str:
        other = self.model.constant(np.uint64(b)) if isinstance(b, int) else b
        return self.model(kind, a, other, **attributes)

    def of(self, value: str) -> str:
        """Integers of i64 as u64, with the same bits."""
        return self.model("Cast", value, to=TensorProto.UINT64)

    def right(self, a: str, bits: int) -> str:
        return self("BitShift", a, bits, direction="RIGHT")

    def left(self, a: str, bits: int) -> str:
        return self("BitShift", a, bits, direction="LEFT")

    def low(self, a: str) -> str:
        return self("BitwiseAnd", a, LOW)

    def bit(self, a: str, number: int) -> str:
        return self("BitwiseAnd", self.right(a, number), 1)

    def number(self, a: str, dtype: DType) -> str:
        """Integers as floating-point numbers, rounded to nearest."""
        return self.model("Cast", a, to=ONNX_TYPES[dtype])


def _words(m: Model, n: _Integers, key: Operand, counter: Operand, blocks: int) -> Words:
    """The four words of each block of Philox, as `opweave.ops.random.philox` computes them."""
    numbers = m("Range", *[m.constant(np.int64(i)) for i in (0, blocks, 1)])
    whole = [n.of(m.expanded(operand)) for operand in (key, counter)]
    keys = [n.low(whole[0]), n.right(whole[0], 32)]
    a, b = n.of(numbers), m.constant(np.uint64(0))
    c, d = n.low(whole[1]), n.right(whole[1], 32)
    for _ in range(ROUNDS):
        low, high = n("Mul", a, MULTIPLIERS[0]), n("Mul", c, MULTIPLIERS[1])
        a, b, c, d = (
            n("BitwiseXor", n("BitwiseXor", n.right(high, 32), b), keys[0]),
            n.low(high),
            n("BitwiseXor", n("BitwiseXor", n.right(low, 32), d), keys[1]),
            n.low(low),
        )
        keys = [n.low(n("Add", word, step)) for word, step in zip(keys, KEY_STEPS, strict=True)]
    return [a, b, c, d]


def _in_order(m: Model, values: Words, shape: Shape) -> str:
    columns = [m("Unsqueeze", value, m.integers(-1)) for value in values]
    flat = m.reshape(m("Concat", *columns, axis=-1), (-1,))
    size = prod(shape)
    return m.reshape(m("Slice", flat, m.integers(0), m.integers(size), m.integers(0)), shape)


@emits("uniform")
def uniform(m: Model, op: str, out: Operand, key: Operand, counter: Operand, *, shape: Shape, dtype: DType) -> str:
    n = _Integers(m)
    a, b, c, d = _words(m, n, key, counter, -(-prod(shape) // block_values(dtype)))
    bits = UNIFORM_BITS[dtype.name]
    if dtype is f64:
        whole = [n("Add", n.left(x, 21), n.right(y, 11)) for x, y in ((a, b), (c, d))]
    else:
        whole = [n.right(x, 32 - bits) for x in (a, b, c, d)]
    step = m.constant(2.0**-bits, out.dtype)
    return _in_order(m, [m("Mul", n.number(x, out.dtype), step) for x in whole], shape)


@emits("normal")
def normal(m: Model, op: str, out: Operand, key: Operand, counter: Operand, *, shape: Shape, dtype: DType) -> str:
    n = _Integers(m)
    a, b, c, d = _words(m, n, key, counter, -(-prod(shape) // block_values(dtype)))

    def times(value: str, factor: float) -> str:
        return m("Mul", value, m.constant(factor, f64))

    if dtype is f64:
        distance = n("Add", n("Add", n.left(a, 21), n.right(b, 11)), 1)
        part = n("BitwiseAnd", n("Add", n.left(c, 32), d), (1 << 61) - 1)
        pairs = [(times(n.number(distance, f64), 2.0**-53), c, part)]
        digits = 61
    else:

        def near(word: str) -> str:
            rounded = m("Mul", n.number(n("Add", word, 1), f32), m.constant(2.0**-32, f32))
            return m.cast(rounded, f32, f64)

        pairs = [(near(x), y, n("BitwiseAnd", y, (1 << 29) - 1)) for x, y in ((a, b), (c, d))]
        digits = 29
    values = []
    for u, top, part in pairs:
        radius = m("Sqrt", times(m("Log", u), -2.0))
        angle = times(n.number(part, f64), pi / 4 * 2.0**-digits)
        swap = m("Cast", n.bit(top, 31), to=TensorProto.BOOL)
        cos, sin = m("Cos", angle), m("Sin", angle)
        for number, (there, here) in ((30, (sin, cos)), (29, (cos, sin))):
            sign = m("Sub", m.constant(1.0, f64), times(n.number(n.bit(top, number), f64), 2.0))
            values.append(m.cast(m("Mul", m("Mul", radius, m("Where", swap, there, here)), sign), f64, out.dtype))
    return _in_order(m, values, shape)
