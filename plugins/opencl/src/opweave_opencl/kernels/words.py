"""Types in sources: the names of opweave's types are macros of ``types.cl``, which sources include.

A program is built with such names as macros, ``{"A": "f16", "OUT": "f32"}``, one for each operand's type.
"""

from __future__ import annotations

from struct import pack, unpack
from typing import Final

from opweave.graph.dtypes import DType

__all__ = ["VALUES", "access", "as_word", "word"]

VALUES: Final = {
    "f64": "double",
    "f32": "float",
    "f16": "float",
    "bf16": "float",
    "i64": "long",
    "i32": "int",
    "i16": "short",
    "i8": "char",
    "u8": "uchar",
    "bool": "uchar",
}
"""What an element is to compute with, as ``VAL`` in sources."""


def word(itemsize: int) -> str:
    """The name of the type for elements of so many bytes that are only moved."""
    return f"w{8 * itemsize}"


def access(*dtypes: DType) -> str:
    """The macros of ``access.cl`` that define its functions for some types."""
    return " ".join(dict.fromkeys(f"ACCESS({dtype})" for dtype in dtypes))


def as_word(number: float, dtype: DType) -> int:
    """``number``, for kernels that compute with ``dtype``, as a 64-bit integer of a parameter block.

    Sources read it as ``(VAL)p.word`` for integers, ``as_float((uint)p.word)`` and ``as_double(p.word)`` for floats.
    """
    if not dtype.is_float:
        return int(number)
    if dtype.itemsize == 8:
        return int(unpack("<q", pack("<d", number))[0])
    try:
        return int(unpack("<I", pack("<f", number))[0])
    except OverflowError:  # what a float cannot hold
        return as_word(float("inf") if number > 0 else float("-inf"), dtype)
