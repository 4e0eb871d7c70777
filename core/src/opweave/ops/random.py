"""Random numbers as functions of a shape, a key and a counter. No state is shared between calls."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, prod
from operator import index as as_index
from typing import Any, Final

import numpy as np

from opweave.errors import DTypeError, OpweaveError, ShapeError
from opweave.graph import opdef
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, bool_, f32, f64, i64, wide_type
from opweave.graph.layout import Shape, check_shape
from opweave.graph.opdef import Limits, OpDef, flops_per_element
from opweave.graph.tensor import Tensor, constant, node
from opweave.ops.movement import reshape
from opweave.ops.operands import Array, broadcast_to, builds, cast, floating, is_number
from opweave.ops.samples import measured, operand

__all__ = ["bernoulli", "normal", "uniform"]

# --- the generator --------------------------------------------------------------------------------------------------

ROUNDS: Final = 10
MULTIPLIERS: Final = 0xD2511F53, 0xCD9E8D57
KEY_STEPS: Final = 0x9E3779B9, 0xBB67AE85
LOW: Final = 0xFFFFFFFF
UNIFORM_BITS: Final = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}
"""Digits of a type: `uniform` gives multiples of 2^-digits."""


def block_values(dtype: DType) -> int:
    """Values that one block of four words gives: f64 takes two words each."""
    return 2 if dtype is f64 else 4


def block_count(size: int, dtype: DType) -> int:
    """Blocks of four words that ``size`` values take."""
    return -(-size // block_values(dtype))


def philox(key: int, counter: int, first: int, words: Array, products: Array) -> None:
    """Blocks ``first``, ``first + 1``, ... of four random words of 32 bits, by Philox4x32-10: Salmon, Moraes, Dror and
    Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, section 3.3.

    The generator's key is ``key``, low word first; its counter is the number of the block in the two low words and
    ``counter`` in the two high ones.

    Args:
        key, counter: their low 64 bits count.
        words: u64 of shape (4, blocks), which receives the words.
        products: u64 of shape (2, blocks), overwritten.
    """
    a, b, c, d = words
    low, high = products
    a[:] = first
    np.add(a, np.arange(a.size, dtype=np.uint64), out=a)
    np.right_shift(a, 32, out=b)
    np.bitwise_and(a, LOW, out=a)
    c[:], d[:] = counter & LOW, counter >> 32 & LOW
    keys = [key & LOW, key >> 32 & LOW]
    for _ in range(ROUNDS):
        np.multiply(a, MULTIPLIERS[0], out=low)
        np.multiply(c, MULTIPLIERS[1], out=high)
        for into, product, other, word in ((a, high, b, keys[0]), (c, low, d, keys[1])):
            np.right_shift(product, 32, out=into)
            np.bitwise_xor(into, other, out=into)
            np.bitwise_xor(into, word, out=into)
            np.bitwise_and(product, LOW, out=other)
        keys = [(word + step) & LOW for word, step in zip(keys, KEY_STEPS, strict=True)]


def _words(key: Array, counter: Array, shape: Shape, dtype: DType) -> Array:
    blocks = block_count(prod(shape), dtype)
    words = np.empty((4, blocks), np.uint64)
    philox(int(key), int(counter), 0, words, np.empty((2, blocks), np.uint64))
    return words


def _in_order(values: list[Array], shape: Shape) -> Array:
    return np.stack(values, -1).reshape(-1)[: prod(shape)].reshape(shape)


def _infer(key: Tensor, counter: Tensor, *, shape: Shape, dtype: DType) -> tuple[Shape, DType]:
    for what, word in (("key", key), ("counter", counter)):
        if word.shape or word.dtype is not i64:
            raise ShapeError(f"the {what} is one i64 without axes, not {word.describe()}")
    return shape, dtype


def _uniform(key: Array, counter: Array, *, shape: Shape, dtype: DType) -> Array:
    a, b, c, d = _words(key, counter, shape, dtype)
    bits = UNIFORM_BITS[dtype.name]
    if dtype is f64:
        return _in_order([(x << 21 | y >> 11) * 2.0**-bits for x, y in ((a, b), (c, d))], shape)
    return _in_order([(x >> 32 - bits) * 2.0**-bits for x in (a, b, c, d)], shape)


def _normal(key: Array, counter: Array, *, shape: Shape, dtype: DType) -> Array:
    a, b, c, d = _words(key, counter, shape, dtype)
    if dtype is f64:
        pairs = [((a << 21 | b >> 11) + 1.0) * 2.0**-53], [c], [(c << 32 | d) & (1 << 61) - 1], 61
    else:
        distances = [((x + 1).astype(np.float32) * 2.0**-32).astype(np.float64) for x in (a, c)]
        pairs = distances, [b, d], [x & (1 << 29) - 1 for x in (b, d)], 29
    values = []
    for u, top, part in zip(*pairs[:3], strict=True):
        radius, angle = np.sqrt(-2.0 * np.log(u)), part * (pi / 4 * 2.0 ** -pairs[3])
        cos, sin, swap = np.cos(angle), np.sin(angle), top >> 31 & 1 != 0
        values.append(radius * np.where(swap, sin, cos) * (1.0 - 2.0 * (top >> 30 & 1)))
        values.append(radius * np.where(swap, cos, sin) * (1.0 - 2.0 * (top >> 29 & 1)))
    return _in_order(values, shape)


# --- the operations -------------------------------------------------------------------------------------------------

SIZES: Final = (1 << 10, 1 << 16, 1 << 20)


def _define(name: str, reference: Callable[..., Array], flops: int, formula: str, **facts: Any) -> OpDef:
    """The definition of a distribution. ``flops`` are those of an element, ``facts`` as `OpDef` has them."""
    return OpDef(
        name,
        infer=_infer,
        reference=reference,
        indices=(0, 1),
        flops=flops_per_element(flops),
        formula=formula,
        samples=measured(lambda: [opdef.build(name, (n,), *[operand(dtype="i64")] * 2) for n in SIZES]),
        **facts,
    )


UNIFORM: Final = _define(
    "uniform", _uniform, 25, "⌊word · 2^(digits − 32)⌋ · 2^−digits, words by Philox4x32-10(key, counter)", exact=True
)


@builds(UNIFORM)
def uniform(shape: Any, key: Any, counter: Any, dtype: DTypeLike = f32) -> Tensor:
    """Random numbers, evenly distributed from 0 up to but without 1, with equal bits on every device.

    They are a function of shape, key and counter alone (`opweave.ops.random.philox`), so equal nodes are one node, and
    a run repeated gives the same numbers. Feed the counter, or keep it in a state, for other numbers in each run of one
    program. Different pairs of key and counter give independent streams of 2^66 words; the first n numbers do not
    depend on how many follow them. `uniform`, `normal` and `bernoulli` of one key and counter are made of the same
    words: take another counter for each.

    Args:
        shape: lengths of up to 8 axes.
        key: an integer from -2^63 to 2^64 - 1, of which the low 64 bits count; or a tensor of one integer (an input, a
            state).
        counter: likewise. Count draws with it; for parallel workers, give each its own key.
        dtype: f32, f16, bf16 or f64. Numbers are multiples of 2^-24, 2^-11, 2^-8 and 2^-53, all equally likely.

    Raises:
        ShapeError: no shape; a key or counter that is a tensor of several elements.
        DTypeError: a key or counter that is no such integer, another dtype.
    """
    return _drawn(UNIFORM, shape, key, counter, dtype)


NORMAL: Final = _define(
    "normal",
    _normal,
    50,
    "√(−2 ln u) · (cos 2πv, sin 2πv), u and v of words by Philox4x32-10(key, counter)",
    limits={"f64": Limits(1e-30, 1e-14), "f32": Limits(1e-13, 2e-6)},
)


@builds(NORMAL)
def normal(shape: Any, key: Any, counter: Any, dtype: DTypeLike = f32) -> Tensor:
    """Random numbers of the standard normal distribution (mean 0, variance 1), by the method of Box and Muller ("A note
    on the generation of random normal deviates", 1958): two uniform numbers give a distance and an angle, and these are
    the polar coordinates of two normal numbers.

    All devices take the same words. In f32 and f64, results are within 6 units in the last place of the reference where
    devices have logarithm, sine and cosine within 1 unit (`cpu`, `torch`), and within 12 where they have OpenCL's
    limits; results of half types are those of f32, rounded. The largest possible numbers are 6.7 (f32) and 8.6 (f64).

    Args:
        shape, key, counter, dtype: as for `uniform`, which says what key and counter do.

    Raises:
        ShapeError: no shape; a key or counter that is a tensor of several elements.
        DTypeError: a key or counter that is no such integer, another dtype.
    """
    return _drawn(NORMAL, shape, key, counter, dtype)


def bernoulli(shape: Any, key: Any, counter: Any, p: Any = 0.5, dtype: DTypeLike = bool_) -> Tensor:
    """True with probability ``p``: where `uniform` of the same key and counter is below it. Equal on every device.

    Args:
        shape, key, counter: as for `uniform`.
        p: a number from 0 to 1, or a tensor that broadcasts to ``shape``: one probability for each element. It counts
            in f32 (f64 where it is a tensor of f64), in steps of 2^-24 (2^-53).
        dtype: bool, or a number type for 1 and 0.

    Raises:
        ShapeError: no shape; a key or counter that is a tensor of several elements; a ``p`` that does not broadcast to
            ``shape``.
        DTypeError: a key or counter that is no such integer; a number ``p`` outside of 0 .. 1; a quantized dtype.
    """
    made = as_dtype(dtype)
    if made.is_quantized:
        raise DTypeError(f"bernoulli: a node cannot produce {made}; take a plain dtype")
    if is_number(p) and not 0 <= p <= 1:
        raise DTypeError(f"bernoulli: p is a probability, from 0 to 1, not {p!r}")
    limit = constant(float(p), f32) if is_number(p) else floating("bernoulli", p)
    drawn = uniform(shape, key, counter, wide_type(limit.dtype))
    if limit.shape != drawn.shape:
        try:
            limit = broadcast_to(limit, drawn.shape)
        except ShapeError as error:
            raise ShapeError(f"bernoulli: p does not broadcast to the shape: {error}") from None
    return cast(drawn < cast(limit, drawn.dtype), made)


def _drawn(op: OpDef, shape: Any, key: Any, counter: Any, dtype: DTypeLike) -> Tensor:
    made = as_dtype(dtype)
    if made.name not in UNIFORM_BITS:
        raise DTypeError(f"{op.name}: makes f32, f16, bf16 or f64, not {made}")
    try:
        target = check_shape(shape, made)
    except OpweaveError as error:
        raise type(error)(f"{op.name}: {error}") from None
    words = _word(op.name, "key", key), _word(op.name, "counter", counter)
    return node(op, words, {"shape": target, "dtype": made})


def _word(op: str, what: str, value: Any) -> Tensor:
    """A key or counter as one i64 without axes."""
    if isinstance(value, Tensor):
        if not value.dtype.is_integer:
            raise DTypeError(f"{op}: the {what} is an integer, not {value.describe()}")
        if value.size != 1:
            raise ShapeError(f"{op}: the {what} is one integer, not {value.describe()}")
        return reshape(cast(value, i64), ())
    try:
        number = as_index(value)
    except TypeError:
        raise DTypeError(f"{op}: the {what} is an integer or a tensor of one, not {value!r:.60}") from None
    if isinstance(value, bool) or not -(1 << 63) <= number < 1 << 64:
        raise DTypeError(f"{op}: the {what} is an integer of 64 bits, not {value!r:.60}")
    return constant((number + (1 << 63)) % (1 << 64) - (1 << 63), i64)
