"""Element types: plain ones, of which most devices only store some, and block-quantized ones in the layout of GGUF.

A quantized type stores ``block`` consecutive elements of the last axis in ``itemsize`` bytes. Plain types are the
case ``block == 1``, so one formula serves both: a row of ``n`` elements takes ``n // block * itemsize`` bytes.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from opweave.errors import DTypeError, UnknownNameError

__all__ = [
    "DTYPES", "FLOATS", "HALVES", "INTEGERS", "NUMBERS", "PLAIN", "QUANTIZED", "STORED", "WIDE",
    "DType", "DTypeLike", "as_dtype", "promote", "wide_type",
]  # fmt: skip


class DType:
    """An element type. There is one object per type; compare with ``is`` or ``==``.

    Attributes:
        name: the short name, e.g. ``"f32"`` or ``"q4_0"``.
        itemsize: bytes of one block (of one element for plain types).
        block: elements in one block; 1 for plain types.
        kind: ``"f"`` float, ``"i"`` signed integer, ``"u"`` unsigned integer, ``"b"`` bool, ``"q"`` quantized. Integers
            and floats of 4 and 2 bits take a byte each, as in ``ml_dtypes``.
        numpy: the NumPy type of plain types; ``uint8`` (raw bytes) for quantized ones.
        rank: order in type promotion: of two types the one of higher rank is the common one (`promote`).
    """

    __slots__ = ("block", "itemsize", "kind", "name", "numpy", "rank")

    def __init__(self, name: str, kind: str, numpy: Any, rank: float, *, block: int = 1, itemsize: int = 0) -> None:
        self.name: Final = name
        self.kind: Final = kind
        self.numpy: Final[np.dtype[Any]] = np.dtype(numpy)
        self.rank: Final = rank
        self.block: Final = block
        self.itemsize: Final = itemsize or self.numpy.itemsize

    @property
    def is_quantized(self) -> bool:
        """True for block-quantized types."""
        return self.block > 1

    @property
    def is_float(self) -> bool:
        """True for plain floating-point types (f64 f32 f16 bf16, and those of 8 and 4 bits)."""
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers, not for bool."""
        return self.kind in "iu"

    @property
    def is_half(self) -> bool:
        """True for the two-byte floats: devices compute their results in f32, and round them when they store them."""
        return self.kind == "f" and self.itemsize == 2

    def row_bytes(self, n: int) -> int:
        """Bytes of ``n`` consecutive elements; ``n`` is a multiple of the block."""
        return n // self.block * self.itemsize

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return as_dtype, (self.name,)


f64 = DType("f64", "f", np.float64, 103)
f32 = DType("f32", "f", np.float32, 102)
f16 = DType("f16", "f", np.float16, 101)
bf16 = DType("bf16", "f", ml_dtypes.bfloat16, 101)
i64 = DType("i64", "i", np.int64, 8)
i32 = DType("i32", "i", np.int32, 4)
i16 = DType("i16", "i", np.int16, 2)
i8 = DType("i8", "i", np.int8, 1)
u8 = DType("u8", "u", np.uint8, 1)
bool_ = DType("bool", "b", np.bool_, 0)

# Types of weights in files. `HostDevice` runs every operation on them, other devices only copies, joins and indexing.
u64 = DType("u64", "u", np.uint64, 8)
u32 = DType("u32", "u", np.uint32, 4)
u16 = DType("u16", "u", np.uint16, 2)
i4 = DType("i4", "i", ml_dtypes.int4, 0.5)
u4 = DType("u4", "u", ml_dtypes.uint4, 0.5)
i2 = DType("i2", "i", ml_dtypes.int2, 0.25)
u2 = DType("u2", "u", ml_dtypes.uint2, 0.25)
f8_e4m3 = DType("f8_e4m3", "f", ml_dtypes.float8_e4m3fn, 99)
f8_e4m3fnuz = DType("f8_e4m3fnuz", "f", ml_dtypes.float8_e4m3fnuz, 99)
f8_e5m2 = DType("f8_e5m2", "f", ml_dtypes.float8_e5m2, 99)
f8_e5m2fnuz = DType("f8_e5m2fnuz", "f", ml_dtypes.float8_e5m2fnuz, 99)
f8_e8m0 = DType("f8_e8m0", "f", ml_dtypes.float8_e8m0fnu, 99)
f4_e2m1 = DType("f4_e2m1", "f", ml_dtypes.float4_e2m1fn, 98)


def _quantized(name: str, block: int, itemsize: int) -> DType:
    return DType(name, "q", np.uint8, 100, block=block, itemsize=itemsize)


q4_0 = _quantized("q4_0", 32, 18)
q4_1 = _quantized("q4_1", 32, 20)
q5_0 = _quantized("q5_0", 32, 22)
q5_1 = _quantized("q5_1", 32, 24)
q8_0 = _quantized("q8_0", 32, 34)
q2_k = _quantized("q2_k", 256, 84)
q3_k = _quantized("q3_k", 256, 110)
q4_k = _quantized("q4_k", 256, 144)
q5_k = _quantized("q5_k", 256, 176)
q6_k = _quantized("q6_k", 256, 210)
iq4_nl = _quantized("iq4_nl", 32, 18)
iq4_xs = _quantized("iq4_xs", 256, 136)
iq3_s = _quantized("iq3_s", 256, 110)
iq3_xxs = _quantized("iq3_xxs", 256, 98)
iq2_s = _quantized("iq2_s", 256, 82)
iq2_xs = _quantized("iq2_xs", 256, 74)
iq2_xxs = _quantized("iq2_xxs", 256, 66)
iq1_m = _quantized("iq1_m", 256, 56)
iq1_s = _quantized("iq1_s", 256, 50)
tq2_0 = _quantized("tq2_0", 256, 66)
tq1_0 = _quantized("tq1_0", 256, 54)
mxfp4 = _quantized("mxfp4", 32, 17)
nvfp4 = _quantized("nvfp4", 64, 36)

_STORED = (u64, u32, u16, i4, u4, i2, u2, f8_e4m3, f8_e4m3fnuz, f8_e5m2, f8_e5m2fnuz, f8_e8m0, f4_e2m1)
_PLAIN = (f64, f32, f16, bf16, i64, i32, i16, i8, u8, bool_, *_STORED)
_BLOCKS = (
    q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, iq3_s, iq3_xxs, iq2_s, iq2_xs, iq2_xxs,
    iq1_m, iq1_s, tq2_0, tq1_0, mxfp4, nvfp4,
)  # fmt: skip

DTYPES: Final[dict[str, DType]] = {t.name: t for t in (*_PLAIN, *_BLOCKS)}
"""Every type by its short name."""

# Groups of types, as text for the declarations of kernels.
WIDE: Final = "f64 f32"
HALVES: Final = "f16 bf16"
FLOATS: Final = f"{WIDE} {HALVES}"
INTEGERS: Final = "i64 i32 i16 i8 u8"
NUMBERS: Final = f"{FLOATS} {INTEGERS}"
PLAIN: Final = f"{NUMBERS} bool"
STORED: Final = " ".join(t.name for t in _STORED)
QUANTIZED: Final = tuple(t for t in DTYPES.values() if t.is_quantized)

_BY_NUMPY: Final = {t.numpy: t for t in _PLAIN}
_LONG_NAMES: Final = {str(t.numpy): t for t in _PLAIN}

DTypeLike = Any
"""What `as_dtype` takes: a `DType`, a short or NumPy name, a NumPy type or something with a ``dtype``."""


def as_dtype(like: DTypeLike) -> DType:
    """The `DType` for a `DType`, a name (``"f32"``, ``"float32"``, ``"q4_0"``) or a NumPy type.

    Raises:
        UnknownNameError: a name that is no type.
        DTypeError: a NumPy type that opweave does not have (complex, strings), or no type.
    """
    if isinstance(like, DType):
        return like
    if isinstance(like, str):
        found = DTYPES.get(like.lower()) or _LONG_NAMES.get(like.lower())
        if found is None:
            raise _unknown(like)
        return found
    # np.dtype also accepts None, tuples and numbers, which are not wanted here.
    plain = None
    if isinstance(like, (type, np.dtype)) or hasattr(like, "dtype"):
        try:
            plain = _BY_NUMPY.get(np.dtype(like))
        except (TypeError, ValueError):
            plain = None
    if plain is None:
        raise DTypeError(f"opweave has no dtype for {like!r:.60}; it has {', '.join(t.name for t in _PLAIN)}")
    return plain


_UNSUPPORTED_BLOCKS: Final = frozenset({"q8_1", "q8_k", "q1_0"})
"""Block types of GGUF that are not decoded here."""


def _unknown(name: str) -> UnknownNameError:
    blocks = [t.name for t in _BLOCKS]
    if name.lower() not in _UNSUPPORTED_BLOCKS:
        return UnknownNameError("dtype", name, DTYPES)
    # Suggestions would be names of other formats.
    return UnknownNameError("dtype", name, (), f"(a block type that is not supported; there are {', '.join(blocks)}: "
                            "requantize, or pass decoded weights)")  # fmt: skip


def wide_type(dtype: DType) -> DType:
    """The type in which values of ``dtype`` are computed between operations: f32 for floats narrower than that, else
    the type itself."""
    return f32 if dtype.is_float and dtype.itemsize < f32.itemsize else dtype


def promote(a: DType, b: DType) -> DType:
    """The common type of ``a`` and ``b`` by the rule of ``torch.promote_types``: a float wins over an integer, an
    integer over bool, else the wider one. f16 with bf16, and two different floats of 8 bits, give f32. An unsigned
    integer with a signed one that is not wider gives the signed one of twice its size (u8 and i8 give i16), as in
    NumPy, and i8 where it has less than 8 bits.

    Raises:
        DTypeError: one of them is quantized; quantized weights only enter ``linear``, ``expert_linear``, ``embedding``.
            u64 and a signed integer: no integer type holds both.
    """
    if a is b:
        return a
    if a.block > 1 or b.block > 1:
        raise DTypeError(f"{a} and {b} do not promote: quantized types only enter linear, expert_linear and embedding")
    if {a.kind, b.kind} == {"i", "u"}:
        unsigned, signed = (a, b) if a.kind == "u" else (b, a)
        if signed.rank <= unsigned.rank:
            if unsigned is u64:
                raise DTypeError(f"{a} and {b} do not promote: no integer type holds both; cast one of them")
            return {u8: i16, u16: i32, u32: i64}.get(unsigned, i8)
    if a.rank == b.rank:
        return f32
    return a if a.rank > b.rank else b
