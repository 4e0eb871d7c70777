"""Quantized weights in the form of ONNX Runtime's ``MatMulNBits``: integers of 4 or 8 bits in blocks with a scale each.

Every block type is repacked without rounding. Types of at most 16 levels are one product of 4 bits. Others are two at
full precision, of the upper and of the lower halves of their integers (16 · scale, and scale): ONNX Runtime's own
product of 8 bits is slower than both together. Types with an offset for each block add the product of the offsets
with the sums of the activations.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np

from opweave.graph.dtypes import DType, f32, u8
from opweave.graph.layout import Shape, nbytes
from opweave.graph.precision import Precision
from opweave.ops.blocks import BlockParts, block_parts

__all__ = [
    "FOUR_BITS", "OFFSETS", "Form", "Piece", "block_length", "form_of", "pack", "packed_nbytes", "pieces",
]  # fmt: skip

Array = np.ndarray[Any, Any]

Form = Literal["", "halves", "bytes"]
"""``halves``: each integer as one or two of 4 bits; ``bytes``: as one of 8 bits; ``""``: no quantized weight."""

FOUR_BITS: Final = frozenset({"q4_0", "q4_1", "q4_k", "q3_k", "q2_k", "tq1_0", "tq2_0"})
"""Types whose integers have at most 16 levels."""

OFFSETS: Final = frozenset({"q4_1", "q5_1", "q2_k", "q4_k", "q5_k"})
"""Types with an offset for each block; their integers are unsigned, those of the others signed."""

_PARTS_OF_16: Final = frozenset({"q2_k", "q3_k", "q6_k", "iq2_s", "iq2_xs", "iq1_m", "nvfp4"})


class Piece(NamedTuple):
    """An array that a repacked weight consists of."""

    name: str
    dtype: DType
    shape: Shape


def block_length(dtype: DType) -> int:
    """How many integers share a scale."""
    return 16 if dtype.name in _PARTS_OF_16 else 32


def form_of(dtype: DType, precision: Precision) -> Form:
    """The form of a quantized weight for products in a precision."""
    return "halves" if precision == "exact" or dtype.name in FOUR_BITS else "bytes"


def pieces(dtype: DType, shape: Shape, form: Form) -> list[Piece]:
    """The arrays of a repacked weight of shape (out, in)."""
    outputs, inputs = shape
    length = block_length(dtype)
    blocks = inputs // length
    if form == "bytes":
        found = [Piece("bytes", u8, (outputs, blocks, length))]
    else:
        found = [Piece("low", u8, (outputs, blocks, length // 2))]
        if dtype.name not in FOUR_BITS:
            found += [Piece("high", u8, found[0].shape), Piece("high_scales", f32, (outputs, blocks))]
    found.append(Piece("scales", f32, (outputs, blocks)))
    if dtype.name in OFFSETS:
        found.append(Piece("offsets", f32, (blocks, outputs)))
    return found


def packed_nbytes(dtype: DType, shape: Shape, form: Form) -> int:
    """Bytes that a weight of shape (out, in) takes in a session: ONNX Runtime packs integers with their scales, for
    products in int8 also with their sums, which are f32 for each block, and keeps the scales that it was given."""
    again = 2 if form == "bytes" or dtype.name in FOUR_BITS else 0
    found = pieces(dtype, shape, form)
    return sum([nbytes(p.shape, p.dtype) * (1 + again * (p.name == "scales")) for p in found])


TILE: Final = 1 << 18
"""Integers that are repacked at a time: temporary arrays stay small, and in the processor's caches."""


def pack(data: Array, dtype: DType, form: Form) -> dict[str, Array]:
    """The arrays of `pieces`, by name.

    Args:
        data: ``uint8``, shape (out, bytes of a row), in the layout of GGUF.
    """
    inputs = data.shape[1] // dtype.itemsize * dtype.block
    found = {p.name: np.empty(p.shape, p.dtype.numpy) for p in pieces(dtype, (len(data), inputs), form)}
    rows = max(1, TILE // inputs)
    for at in range(0, len(data), rows):
        some = slice(at, at + rows)
        for name, value in _packed_rows(data[some], dtype, form).items():
            (found[name].T if name == "offsets" else found[name])[some] = value
    return found


def _packed_rows(data: Array, dtype: DType, form: Form) -> dict[str, Array]:
    """What `pack` gives, but offsets of shape (out, blocks)."""
    parts: BlockParts = block_parts(data, dtype)
    outputs, length = len(data), block_length(dtype)
    integers = parts.integers.reshape(outputs, -1, length)
    blocks = integers.shape[1]
    scales = parts.scales.reshape(outputs, -1)
    # Several parts of a block of 256 may have one scale.
    scales = np.repeat(scales, blocks // scales.shape[1], 1)
    signed = dtype.name not in OFFSETS
    result: dict[str, Array] = {"scales": scales}
    if form == "bytes":
        result["bytes"] = (integers + 128 * signed).astype(np.uint8)
    elif dtype.name in FOUR_BITS:
        result["low"] = _nibbles(integers + 8 * signed)
    else:
        whole = integers + 128 * signed
        result["low"], result["high"] = _nibbles(whole & 15), _nibbles(whole >> 4)
        with np.errstate(all="ignore"):  # NaN and infinite scales may stay so
            result["high_scales"] = scales * np.float32(16)
    if parts.offsets is not None:
        offsets = parts.offsets.reshape(outputs, -1)
        result["offsets"] = np.repeat(offsets, blocks // offsets.shape[1], 1)
    return result


def _nibbles(integers: Array) -> Array:
    """Two integers of 4 bits in each byte, the first one in the lower half."""
    values = integers.astype(np.uint8)
    return values[..., ::2] | values[..., 1::2] << 4
