"""Quantized weights in the form of ONNX Runtime's ``MatMulNBits``: integers of 4 or 8 bits in blocks with a scale each.

Every block type is repacked without rounding. Types of at most 16 levels are one product of 4 bits. Others are two at
full precision, of the upper and of the lower halves of their integers (16 · scale, and scale): ONNX Runtime's own
product of 8 bits is slower than both together. Types with an offset for each block add the product of the offsets
with the sums of the activations.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from threading import Lock
from typing import Any, Final, Literal, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from opweave.contract import Arg
from opweave.graph.dtypes import DType, f32, u8
from opweave.graph.layout import Shape
from opweave.graph.precision import Precision
from opweave.ops.blocks import BlockParts, block_parts

__all__ = [
    "FOUR_BITS", "OFFSETS", "PACKED", "REVERSIBLE", "Form", "PackedWeight", "Piece", "block_length", "form_of", "pack",
    "pieces", "unpack",
]  # fmt: skip

Array = np.ndarray[Any, Any]

Form = Literal["", "halves", "bytes"]
"""``halves``: each integer as one or two of 4 bits; ``bytes``: as one of 8 bits; ``""``: no quantized weight."""

FOUR_BITS: Final = frozenset({"q4_0", "q4_1", "q4_k", "q3_k", "q2_k", "tq1_0", "tq2_0"})
"""Types whose integers have at most 16 levels."""

OFFSETS: Final = frozenset({"q4_1", "q5_1", "q2_k", "q4_k", "q5_k"})
"""Types with an offset for each block; their integers are unsigned, those of the others signed."""

REVERSIBLE: Final = frozenset({"q4_0", "q4_1", "q5_0", "q5_1", "q8_0"})
"""Types whose blocks follow from what they are repacked to, as each scale is stored as it is used."""

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


def unpack(arrays: Mapping[str, Array], dtype: DType, form: Form) -> Array:
    """What `pack` was given, bit for bit, of a type in `REVERSIBLE` with finite scales and offsets."""
    if form == "bytes":
        whole = arrays["bytes"]
    else:
        whole = _integers(arrays["low"])
        if dtype.name not in FOUR_BITS:
            whole = whole | _integers(arrays["high"]) << 4
    outputs, blocks, _ = whole.shape
    parts: list[Array] = [arrays["scales"][..., None].astype(np.float16).view(np.uint8)]
    if dtype.name in OFFSETS:
        parts.append(arrays["offsets"].T[..., None].astype(np.float16).view(np.uint8))
    if dtype.name == "q8_0":
        parts.append(whole ^ 128)  # from 0 .. 255 to the bytes of -128 .. 127
    else:
        raw = whole - np.uint8(112) if dtype.name == "q5_0" else whole
        if dtype.name.startswith("q5"):
            parts.append(np.packbits(raw >> 4, -1, "little"))
        low = raw & 15
        parts.append(low[..., :16] | low[..., 16:] << 4)
    return np.concatenate(parts, -1).reshape(outputs, blocks * dtype.itemsize)


def _integers(pairs: Array) -> Array:
    """The reverse of `_nibbles`."""
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1)


class PackedWeight:
    """A repacked weight, which all sessions share that use it.

    Attributes:
        arrays: by name of the piece.
        nbytes: of the arrays.
    """

    def __init__(self, arg: Arg, form: Form) -> None:
        assert arg.buffer is not None
        self._arg, self._form = arg, form  # keeps the buffer, whose ``id`` is a part of the key
        self._token: object = None
        self.arrays = pack(arg.view, arg.dtype, form)
        self.nbytes = sum([array.nbytes for array in self.arrays.values()])

    def refresh(self, token: object) -> None:
        """Repack the weight after it was written, once for each token."""
        if self._token is not token:
            self._token = token
            self.arrays = pack(self._arg.view, self._arg.dtype, self._form)


class PackedWeights:
    """The repacked weights of the process. One lives as long as a session uses it."""

    def __init__(self) -> None:
        self._known: Final[WeakValueDictionary[Hashable, PackedWeight]] = WeakValueDictionary()
        self._lock: Final = Lock()

    def get(self, arg: Arg, form: Form) -> PackedWeight:
        """The weight in a form."""
        key = (id(arg.buffer), arg.offset, arg.dtype, arg.shape, arg.strides, form)
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = PackedWeight(arg, form)
            return found

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        with self._lock:
            return sum([weight.nbytes for weight in self._known.values()])


PACKED: Final = PackedWeights()
