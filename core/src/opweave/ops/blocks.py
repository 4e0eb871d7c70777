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

__all__ = [
    "E2M1", "IQ4_LEVELS", "UE4M3", "Array", "BlockParts", "Decoder", "Decoding", "block_parts", "decodes", "dequantize",
    "fields_of", "scratch_bytes",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Call = Callable[[], Any]
Fields = dict[str, Array]

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
    return data.view(_FORMATS[dtype.name])


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


def _decode(loads: Sequence[tuple[str, Array]], calls: Sequence[Call], blocks: Array) -> None:
    for name, into in loads:
        np.copyto(into, blocks[name])
    for call in calls:
        call()


# --- the steps of a decoding ----------------------------------------------------------------------------------------


class Decoding:
    """Records the calls that decode ``count`` blocks. Arrays have one row for each block; integers are bytes.

    Attributes:
        loads: for each field that is needed the array to which it is copied, with one item for each block.
        calls: compute the integers and scales from these arrays.
        integers: the integers of the blocks, once the calls were made.
        scaling: the factors of the integers (``np.multiply``), then the offsets, if there are some, with ``np.add`` or
            ``np.subtract``.
    """

    def __init__(self, count: int, take: Callable[[int], Array]) -> None:
        self.count, self._take = count, take
        self.loads: Fields = {}
        self.calls: list[Call] = []
        self.integers = np.empty(0, np.uint8)
        self.scaling: list[tuple[np.ufunc, Array]] = []

    def values(self, out: Array) -> list[Call]:
        """The calls that compute the values from the integers, into ``out`` (f32)."""
        rows = out.reshape(self.count, -1)
        calls: list[Call] = [partial(np.copyto, rows, self.integers)]
        for ufunc, factors in self.scaling:
            parts = rows.reshape(self.count, factors.shape[1], -1)
            calls.append(partial(ufunc, parts, factors[..., None], parts))
        return calls

    # --- loading ----------------------------------------------------------------------------------------------------

    def scratch(self, width: int, dtype: Any = np.uint8) -> Array:
        """A scratch array with ``width`` elements for each block."""
        piece: Array = self._take(width * np.dtype(dtype).itemsize).view(dtype).reshape(self.count, width)
        return piece

    def half(self, name: str) -> Array:
        """The f16 field as f32."""
        self.loads[name] = array = self.scratch(1, np.float32)
        return array

    def field(self, name: str, size: int) -> Array:
        """The field of ``size`` bytes."""
        array = self.scratch(size)
        self.loads[name] = array.view(f"V{size}")
        return array

    # --- integers ---------------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        self.calls.append(partial(function, *args))

    def take_bits(self, x: Array, shift: int, mask: int, out: Array) -> None:
        """``out = (x >> shift) & mask`` in each byte; ``mask`` must remove the bits shifted in from the next byte."""
        word = np.dtype(np.uint64 if x.shape[1] % 8 == 0 else np.uint32)
        source, target = x.view(word), out.view(word)
        if shift:
            move = np.right_shift if shift > 0 else np.left_shift
            self.call(move, source, np.array(abs(shift), word), target)
            source = target
        self.call(np.bitwise_and, source, np.array(int.from_bytes(bytes([mask]) * word.itemsize, "big"), word), target)

    def planes(self, x: Array, width: int, group: int, at: int = 0) -> Array:
        """Fields of ``width`` bits of each ``group`` of bytes, shifted to bit ``at``: the lowest fields of all bytes of
        the group, then the next ones."""
        many = 8 // width
        part, result = self.scratch(x.shape[1]), self.scratch(x.shape[1] * many)
        whole = part.view(f"V{group}")
        places = result.view(f"V{group}").reshape(self.count, -1, many)
        for k in range(many):
            self.take_bits(x, k * width - at, ((1 << width) - 1) << at, part)
            self.call(np.copyto, places[:, :, k], whole)
        return result

    def spread(self, x: Array, at: int) -> Array:
        """The bits of each row, the lowest of the first byte first, each as bit ``at`` of a byte."""
        wide = self.scratch(x.shape[1], "<u8")
        self.call(np.copyto, wide, x)
        # Eight copies of a byte, and of the i-th one bit i.
        self.call(np.multiply, wide, np.array(0x0101010101010101, wide.dtype), wide)
        self.call(np.bitwise_and, wide, np.array(0x8040201008040201, wide.dtype), wide)
        bits = self.scratch(8 * x.shape[1])
        self.call(np.not_equal, wide.view(np.uint8), np.array(0, np.uint8), bits.view(np.bool_))
        self.take_bits(bits, -at, 1 << at, bits)
        return bits

    def join(self, x: Array, y: Array) -> None:
        """``x |= y``."""
        self.call(np.bitwise_or, x, y, x)

    def less(self, x: Array, n: int) -> Array:
        """``x - n`` with a sign, over ``x``."""
        self.call(np.subtract, x, np.array(n, np.uint8), x)
        return x.view(np.int8)

    def lookup(self, x: Array, levels: Array, group: int = 0) -> Array:
        """The level of each half byte: of each ``group`` of bytes (0: of all) first the low halves, then the high
        ones."""
        places, part, result = self.scratch(x.shape[1], np.intp), self.scratch(x.shape[1]), self.scratch(2 * x.shape[1])
        self.call(np.copyto, places, x)
        whole = np.dtype(f"V{group or x.shape[1]}")
        halves = result.view(whole).reshape(self.count, -1, 2)
        for k, table in enumerate((np.tile(levels, 16), np.repeat(levels, 16))):
            # In any mode but "raise" NumPy writes straight into the output.
            self.call(table.take, places, 0, part.view(np.int8), "clip")
            self.call(np.copyto, halves[..., k], part.view(whole))
        return result.view(np.int8)

    # --- values -----------------------------------------------------------------------------------------------------

    def floats(self, x: Array, factor: Array) -> Array:
        """Integers as f32, times one factor for each block."""
        result = self.scratch(x.shape[1], np.float32)
        self.call(np.copyto, result, x)
        self.call(np.multiply, result, factor, result)
        return result

    def finish(
        self, integers: Array, scale: Array, change: np.ufunc | None = None, offset: Array | None = None
    ) -> None:
        """Set the result: values are ``integers · scale``, and with ``change`` (``np.add``, ``np.subtract``) the
        ``offset`` applied to that. A block is divided into as many equal parts as there are scales and offsets."""
        self.integers = integers
        self.scaling.append((np.multiply, scale))
        if change is not None and offset is not None:
            self.scaling.append((change, offset))


_DECODINGS: Final[dict[str, Callable[[Decoding], None]]] = {}
_FORMATS: Final[dict[str, np.dtype[Any]]] = {}
"""The fields of a block of each type, in the order in which they lie."""


def _decoding_of(dtype: DType) -> Callable[[Decoding], None]:
    if dtype.name not in _DECODINGS:
        import opweave.ops.codebook_blocks  # noqa: F401  # most programs have none of these types
    return _DECODINGS[dtype.name]


def decodes(name: str, **fields: str) -> Callable[[Callable[[Decoding], None]], None]:
    """Decorator: the function decodes the type ``name``, whose blocks have these fields of these NumPy types."""

    def register(function: Callable[[Decoding], None]) -> None:
        _DECODINGS[name], _FORMATS[name] = function, np.dtype(list(fields.items()))

    return register


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


IQ4_LEVELS: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The 16 levels of iq4_nl, closer to each other near 0."""


@decodes("iq4_nl", d="<f2", q="V16")
def _iq4_nl(t: Decoding) -> None:
    t.finish(t.lookup(t.field("q", 16), IQ4_LEVELS), t.half("d"))


E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the 4-bit float with 2 exponent bits and 1 mantissa bit (OCP Microscaling Formats, 2023)."""
_E8M0: Final = np.ldexp(np.float32(1), np.arange(256) - 128)
"""Half of the values of a byte that is an exponent (127 means 1); half, because `E2M1` holds twice its values."""


UE4M3: Final = np.array(
    [0 if e in (0, 127) else np.ldexp(e & 7 | 8 * (e & 127 > 7), max(e >> 3 & 15, 1) - 11) for e in range(256)],
    np.float32,
)
"""Half of the values of a float of 4 exponent and 3 mantissa bits, of which the sign is ignored; byte 127 means 0."""


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
