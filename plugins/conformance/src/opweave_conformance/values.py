"""Random values for the leaves of a case."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from opweave.graph.dtypes import DType
from opweave.graph.tensor import Tensor
from opweave_conformance.case import Operand

__all__ = ["SCALES", "UNDEFINED", "leaf_values", "make_values"]

Array = np.ndarray[Any, Any]

UNDEFINED: Final = frozenset(
    {"conv_transpose1d", "conv_transpose2d", "interpolate", "max_pool_backward", "timestep_embedding"}
)
"""Operations whose results for NaN and infinities are not defined: those in which terms of weight 0 may be left out or
multiplied by 0, embeddings of time steps, since such a time has no sine, and gradients of pooling, since a window with
NaN has no largest element."""


def leaf_values(
    rng: np.random.Generator, operands: Sequence[Operand], tensors: Sequence[Tensor]
) -> dict[Tensor, Array]:
    """Values for the leaves of a case, whose operands are ``tensors``."""
    return {
        x.memory: make_values(rng, operand, x.memory.shape, x.dtype)
        for x, operand in zip(tensors, operands, strict=True)
    }


def make_values(rng: np.random.Generator, operand: Operand, shape: Sequence[int], dtype: DType) -> Array:
    """Values for the leaf of ``operand``."""
    size = prod(shape)
    if dtype.is_quantized:
        return _make_blocks(rng, shape, dtype, special=operand.values == "special")
    if operand.values == "ids":
        base = rng.permutation(max(operand.high, 1))
        largest = int(base.argmax())  # in every run, so that it leads outside in all of them or in none
        base[[0, largest]] = base[[largest, 0]]
        return np.resize(base, size).reshape(shape).astype(dtype.numpy)
    make = _make_floats if dtype.is_float else _make_integers
    return make(rng, operand, shape, dtype)


def _make_floats(rng: np.random.Generator, operand: Operand, shape: Sequence[int], dtype: DType) -> Array:
    values = rng.standard_normal(shape)
    match operand.values:
        case "large":
            values += 1 << 15
        case "ties":
            values = rng.integers(-1, 3, shape).astype(np.float64)
        case "alike":
            values = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], shape)
        case "halves":
            values = rng.integers(-9, 10, shape) / 2
        case "positive":
            values = np.abs(values) + 0.125
        case "negative":
            values = -np.abs(values) - 0.125
        case "fraction":
            values = rng.uniform(0.125, 1, shape)
        case "mask" | "hidden":
            values = _make_mask(rng, shape, whole_rows=operand.values == "hidden")
        case "special":
            flat, some = values.reshape(-1), prod(shape) // 4
            flat[rng.permutation(flat.size)[:some]] = np.resize([np.nan, np.inf, -np.inf, 0.0, -0.0], some)
    return values.astype(dtype.numpy)


def _make_integers(rng: np.random.Generator, operand: Operand, shape: Sequence[int], dtype: DType) -> Array:
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if operand.values == "ends":
        return _whole_range(rng, shape, dtype)
    # Within i8, and not negative for u8: a cast between any two integer types keeps them.
    low, high = (-1, 3) if operand.values in ("ties", "alike") else (-100, 100)
    low = 0 if dtype.kind == "u" or operand.values == "positive" else low
    return rng.integers(low, high, shape).astype(dtype.numpy)


def _make_mask(rng: np.random.Generator, shape: Sequence[int], *, whole_rows: bool) -> Array:
    """0 and -inf, not all -inf in a row; with ``whole_rows`` every other row is."""
    hidden = rng.random(shape) < 0.3
    if shape:
        hidden[..., 0] = False
    if whole_rows:
        hidden.reshape(-1, shape[-1])[::2] = True
    return np.where(hidden, -np.inf, 0.0)


def _whole_range(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> Array:
    """Integers of the whole range of a type, the ends among them."""
    size, info = prod(shape), np.iinfo(dtype.numpy)
    flat = rng.integers(info.min, info.max, size, dtype.numpy, endpoint=True)
    ends = np.array([info.max, info.min, info.max - 1, info.min + 1, 0, 1], dtype.numpy)
    flat[rng.permutation(size)[: (size + 2) // 3]] = np.resize(ends, (size + 2) // 3)
    return flat.reshape(shape)


SCALES: Final = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "iq4_nl": (0,),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_xs": (0,), "iq3_s": (0,),
    "iq3_xxs": (0,), "iq2_s": (0,), "iq2_xs": (0,), "iq2_xxs": (0,), "iq1_s": (0,), "tq2_0": (64,), "tq1_0": (52,),
}  # fmt: skip
"""Byte offsets of the f16 scales in a block, by dtype. (That of iq1_m is spread over four words.)"""


def _make_blocks(rng: np.random.Generator, shape: Sequence[int], dtype: DType, *, special: bool = False) -> Array:
    """Random bytes as quantized blocks (any bytes are valid) with moderate scales; with ``special`` one scale of each
    block is NaN, an infinity or zero."""
    count = prod(shape) // dtype.block
    raw = rng.integers(0, 256, (count, dtype.itemsize), np.uint8)
    for at in SCALES.get(dtype.name, ()):
        raw[:, at : at + 2] = (rng.standard_normal((count, 1)) * 0.01).astype(np.float16).view(np.uint8)
    if dtype.name == "mxfp4":
        raw[:, 0] = rng.integers(120, 128, count)
    if dtype.name == "nvfp4":
        raw[:, :4] = rng.integers(1, 64, (count, 4))
    if dtype.name == "iq1_m":
        raw[:, 53] &= 15
        raw[:, 55] = raw[:, 55] & 15 | 32  # the upper bits of the scale: from 2^-7 on
    scales = SCALES.get(dtype.name, ())
    for block in range(count if special and scales else 0):
        at = scales[block % len(scales)]
        value = (np.nan, np.inf, -np.inf, 0.0)[block // len(scales) % 4]
        raw[block, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], dtype.row_bytes(shape[-1]))
