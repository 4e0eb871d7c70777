"""`Decoding`: the calls that decode blocks of a type, as that type records them; the levels of types of four bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

__all__ = ["DECODINGS", "E2M1", "FORMATS", "IQ4_LEVELS", "UE4M3", "Array", "Decoding", "decodes"]

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]

IQ4_LEVELS: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The 16 levels of iq4_nl, closer to each other near 0."""

E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the 4-bit float with 2 exponent bits and 1 mantissa bit (OCP Microscaling Formats, 2023)."""

UE4M3: Final = np.array(
    [0 if e in (0, 127) else np.ldexp(e & 7 | 8 * (e & 127 > 7), max(e >> 3 & 15, 1) - 11) for e in range(256)],
    np.float32,
)
"""Half of the values of a float of 4 exponent and 3 mantissa bits, of which the sign is ignored; byte 127 means 0."""


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
        self.loads: dict[str, Array] = {}
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


DECODINGS: Final[dict[str, Callable[[Decoding], None]]] = {}
"""Name of a type -> records the calls that decode its blocks."""

FORMATS: Final[dict[str, np.dtype[Any]]] = {}
"""The fields of a block of each type, in the order in which they lie."""


def decodes(name: str, **fields: str) -> Callable[[Callable[[Decoding], None]], None]:
    """Decorator: the function decodes the type ``name``, whose blocks have these fields of these NumPy types."""

    def register(function: Callable[[Decoding], None]) -> None:
        DECODINGS[name], FORMATS[name] = function, np.dtype(list(fields.items()))

    return register
