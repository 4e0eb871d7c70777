"""Decoding of quantized arrays in plain NumPy: what the bytes of each type mean.

The formats are those of GGUF files, as the public description of the format and the ``gguf`` package fix them. Wherever
there are two ways to order the arithmetic, the one of ``gguf`` is taken, so that results are equal to the bit.

A format is a NumPy type with the fields of one block. A `Decoder` prepares the list of NumPy calls that decode a fixed
number of blocks, with operands in memory that is allocated beforehand: a field is copied as one item for each block,
and packed integers are unpacked in words of four or eight bytes. `dequantize` decodes an array with decoders of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from opweave.errors import DTypeError, LayoutError
from opweave.graph.dtypes import DType
from opweave.ops.decoding import DECODINGS, E2M1, FORMATS, IQ4_LEVELS, Array, Decoding, decodes

__all__ = ["BlockParts", "Decoder", "block_parts", "dequantize", "fields_of", "scratch_bytes"]

Floats = np.ndarray[Any, np.dtype[np.float32]]

_ALIGN: Final = 64
_AT_ONCE: Final = 1 << 16
"""Elements that `dequantize` decodes at a time: few enough for the scratch memory to stay in a cache."""


def dequantize(data: Array, dtype: DType) -> Floats:
    """The values of quantized rows.

    Args:
        data: ``uint8``, the last axis in bytes.
        dtype: a quantized type.

    Returns:
        f32, the last axis in elements.

    Raises:
        DTypeError: ``dtype`` is not quantized, or ``data`` is not ``uint8``.
        LayoutError: the last axis holds no whole blocks.
    """
    blocks = fields_of(np.ascontiguousarray(data), dtype)
    out = np.empty((*blocks.shape[:-1], blocks.shape[-1] * dtype.block), np.float32)
    flat, values = blocks.reshape(-1), out.reshape(-1, dtype.block)
    step = max(1, _AT_ONCE // dtype.block)
    scratch = np.empty(scratch_bytes(dtype, min(step, flat.size)), np.uint8)
    for count, starts in ((step, range(0, flat.size - step + 1, step)), (flat.size % step, [flat.size // step * step])):
        if count and len(starts):
            decoder = Decoder(dtype, (count,), scratch)
            for first in starts:
                decoder.into(values[first : first + count])(flat[first : first + count])
    return out


class BlockParts(NamedTuple):
    """The parts of quantized blocks: values are ``integers · scales + offsets`` in f32, rounded after the product and
    after the sum.

    Attributes:
        integers: int16, shape (..., elements).
        scales: f32, shape (..., parts); each belongs to ``elements / parts`` adjacent integers.
        offsets: f32, of the shape of ``scales``; ``None`` where the type has none.
    """

    integers: Array
    scales: Floats
    offsets: Floats | None


def block_parts(data: Array, dtype: DType) -> BlockParts:
    """Integers, scales and offsets of quantized rows, for libraries that multiply with them as they are.

    Args:
        data: ``uint8``, the last axis in bytes.
        dtype: a quantized type.

    Raises:
        DTypeError, LayoutError: as `dequantize`.
    """
    blocks = fields_of(np.ascontiguousarray(data), dtype)
    count = blocks.size
    decoder = Decoder(dtype, (count,), np.empty(scratch_bytes(dtype, count), np.uint8))
    integers, scales, offsets = decoder.parts(blocks.reshape(-1))
    lead = blocks.shape[:-1]
    return BlockParts(
        integers.reshape(*lead, -1), scales.reshape(*lead, -1), None if offsets is None else offsets.reshape(*lead, -1)
    )


def fields_of(data: Array, dtype: DType) -> Array:
    """Bytes shown as blocks with named fields: a view, the last axis in blocks.

    Args:
        data: ``uint8``, the last axis in bytes and without gaps.

    Raises:
        DTypeError, LayoutError: as `dequantize`.
    """
    if not dtype.is_quantized or data.dtype != np.uint8:
        raise DTypeError(f"dequantize takes uint8 bytes of a quantized type, not {data.dtype} as {dtype}")
    if not data.ndim or data.shape[-1] % dtype.itemsize:
        raise LayoutError(f"the last axis of {data.shape} holds no whole blocks of {dtype.itemsize} bytes ({dtype})")
    _decoding_of(dtype)
    return data.view(FORMATS[dtype.name])


def scratch_bytes(dtype: DType, blocks: int) -> int:
    """Bytes of scratch memory that a `Decoder` of that many blocks needs."""
    return sum([_padded(size * blocks) for size in _pieces(dtype)])


@lru_cache
def _pieces(dtype: DType) -> tuple[int, ...]:
    """The bytes for one block of each scratch array that decoding takes, in the order in which it takes them."""
    sizes: list[int] = []

    def note(size: int) -> Array:
        sizes.append(size)
        return np.empty(size, np.uint8)

    _decoding_of(dtype)(Decoding(1, note))
    return tuple(sizes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Decoder:
    """Decodes a fixed number of blocks of one type in scratch memory of the caller.

    Args:
        dtype: a quantized type.
        shape: of the blocks that are decoded at a time.
        scratch: ``uint8``, one axis, at least `scratch_bytes`; it begins at a multiple of 8 bytes.
    """

    def __init__(self, dtype: DType, shape: Sequence[int], scratch: Array) -> None:
        self.shape: Final = tuple(shape)
        count, at = prod(shape), 0

        def take(size: int) -> Array:
            nonlocal at
            piece = scratch[at : at + size * count]
            at += _padded(size * count)
            return piece

        self._decoding = Decoding(count, take)
        _decoding_of(dtype)(self._decoding)
        self._loads = {name: into.reshape(self.shape) for name, into in self._decoding.loads.items()}

    def into(self, out: Array) -> Callable[[Array], None]:
        """A function that decodes blocks into ``out``.

        Args:
            out: f32, dense, of the decoder's shape with the last axis in elements.

        Returns:
            ``decode(blocks)``, which takes an array of the decoder's shape as `fields_of` returns it.
        """
        calls = (*self._decoding.calls, *self._decoding.values(out))
        return partial(_decode, tuple(self._loads.items()), calls)

    def parts(self, blocks: Array) -> tuple[Array, Floats, Floats | None]:
        """Copies of the integers (int16), scales and offsets (f32, or ``None``) of blocks, one row for each block."""
        _decode(tuple(self._loads.items()), self._decoding.calls, blocks)
        (_, scales), *shift = self._decoding.scaling
        offsets = [np.negative(x) if change is np.subtract else np.array(x) for change, x in shift]
        return self._decoding.integers.astype(np.int16), np.array(scales), offsets[0] if offsets else None


def _decode(loads: Sequence[tuple[str, Array]], calls: Sequence[Callable[[], Any]], blocks: Array) -> None:
    for name, into in loads:
        np.copyto(into, blocks[name])
    for call in calls:
        call()


def _decoding_of(dtype: DType) -> Callable[[Decoding], None]:
    if dtype.name not in DECODINGS:
        import opweave.ops.codebook_blocks  # noqa: F401  # most programs have none of these types
    return DECODINGS[dtype.name]


# --- 32 elements, one scale (and offset) ----------------------------------------------------------------------------


@decodes("q4_0", d="<f2", q="V16")
def _q4_0(t: Decoding) -> None:
    t.finish(t.less(t.planes(t.field("q", 16), 4, 16), 8), t.half("d"))


@decodes("q4_1", d="<f2", m="<f2", q="V16")
def _q4_1(t: Decoding) -> None:
    t.finish(t.planes(t.field("q", 16), 4, 16), t.half("d"), np.add, t.half("m"))


def _five_bits(t: Decoding) -> Array:
    q = t.planes(t.field("q", 16), 4, 16)
    t.join(q, t.spread(t.field("fifth", 4), 4))
    return q


@decodes("q5_0", d="<f2", fifth="V4", q="V16")
def _q5_0(t: Decoding) -> None:
    t.finish(t.less(_five_bits(t), 16), t.half("d"))


@decodes("q5_1", d="<f2", m="<f2", fifth="V4", q="V16")
def _q5_1(t: Decoding) -> None:
    t.finish(_five_bits(t), t.half("d"), np.add, t.half("m"))


@decodes("q8_0", d="<f2", q="V32")
def _q8_0(t: Decoding) -> None:
    t.finish(t.field("q", 32).view(np.int8), t.half("d"))


@decodes("iq4_nl", d="<f2", q="V16")
def _iq4_nl(t: Decoding) -> None:
    t.finish(t.lookup(t.field("q", 16), IQ4_LEVELS), t.half("d"))


_E8M0: Final = np.ldexp(np.float32(1), np.arange(256) - 128)
"""Half of the values of a byte that is an exponent (127 means 1); half, because `E2M1` holds twice its values."""


@decodes("mxfp4", e="u1", q="V16")
def _mxfp4(t: Decoding) -> None:
    t.loads["e"] = exponent = t.scratch(1, np.intp)
    scale = t.scratch(1, np.float32)
    t.call(_E8M0.take, exponent, 0, scale, "clip")
    t.finish(t.lookup(t.field("q", 16), E2M1), scale)


# --- 256 elements: scales of parts of 16 or 32, themselves scaled by an f16 -----------------------------------------


@decodes("q2_k", scales="V16", q="V64", d="<f2", m="<f2")
def _q2_k(t: Decoding) -> None:
    both = t.field("scales", 16)  # low half: scale, high half: offset
    scale, offset = t.scratch(16), t.scratch(16)
    t.take_bits(both, 0, 15, scale)
    t.take_bits(both, 4, 15, offset)
    q = t.planes(t.field("q", 64), 2, 32)
    t.finish(q, t.floats(scale, t.half("d")), np.subtract, t.floats(offset, t.half("m")))


@decodes("q3_k", third="V32", q="V64", low="V8", high="V4", d="<f2")
def _q3_k(t: Decoding) -> None:
    six = t.planes(t.field("low", 8), 4, 8)
    t.join(six, t.planes(t.field("high", 4), 2, 4, at=4))
    q = t.planes(t.field("q", 64), 2, 32)
    t.join(q, t.planes(t.field("third", 32), 1, 32, at=2))
    t.finish(t.less(q, 4), t.floats(t.less(six, 32), t.half("d")))


def _scales_of_8(t: Decoding) -> tuple[Array, Array]:
    """Eight 6-bit scales and eight 6-bit offsets packed into 12 bytes (q4_k, q5_k), as f32."""
    rest, top, low = t.field("rest", 4), t.scratch(4), t.scratch(4)
    result = []
    for name, factor, shift in (("scales", "d", 0), ("offsets", "m", 4)):
        first, six = t.field(name, 4), t.scratch(8)
        halves = six.view("V4")
        t.take_bits(first, 0, 63, low)
        t.call(np.copyto, halves[:, :1], low.view("V4"))
        t.take_bits(first, 2, 48, top)
        t.take_bits(rest, shift, 15, low)
        t.join(low, top)
        t.call(np.copyto, halves[:, 1:], low.view("V4"))
        result.append(t.floats(six, t.half(factor)))
    return result[0], result[1]


@decodes("q4_k", d="<f2", m="<f2", scales="V4", offsets="V4", rest="V4", q="V128")
def _q4_k(t: Decoding) -> None:
    scale, offset = _scales_of_8(t)
    t.finish(t.planes(t.field("q", 128), 4, 32), scale, np.subtract, offset)


@decodes("q5_k", d="<f2", m="<f2", scales="V4", offsets="V4", rest="V4", fifth="V32", q="V128")
def _q5_k(t: Decoding) -> None:
    scale, offset = _scales_of_8(t)
    q = t.planes(t.field("q", 128), 4, 32)
    t.join(q, t.planes(t.field("fifth", 32), 1, 32, at=4))
    t.finish(q, scale, np.subtract, offset)


@decodes("q6_k", low="V128", high="V64", scales="V16", d="<f2")
def _q6_k(t: Decoding) -> None:
    q = t.planes(t.field("low", 128), 4, 64)
    t.join(q, t.planes(t.field("high", 64), 2, 32, at=4))
    t.finish(t.less(q, 32), t.floats(t.field("scales", 16).view(np.int8), t.half("d")))
