"""Decoding of quantized blocks in plain NumPy: what the bytes of each type mean.

The formats are those of GGUF files, as the public description of the format and the ``gguf`` package fix them. Every
function takes blocks as rows of bytes, shape (n, bytes), and returns f32 values, shape (n, elements).

Wherever there are two ways to order the arithmetic, the one of ``gguf`` is taken, so that results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from opweave.dtypes import DType
from opweave.errors import DTypeError, LayoutError

__all__ = ["dequantize"]

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]


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
    decode = _DECODERS.get(dtype.name)
    if decode is None or data.dtype != np.uint8:
        raise DTypeError(f"dequantize takes uint8 bytes of a quantized type, not {data.dtype} as {dtype}")
    if not data.ndim or data.shape[-1] % dtype.itemsize:
        raise LayoutError(f"the last axis of {data.shape} holds no whole blocks of {dtype.itemsize} bytes ({dtype})")
    count = data.shape[-1] // dtype.itemsize
    blocks = np.ascontiguousarray(data).reshape(-1, dtype.itemsize)
    return decode(blocks).astype(np.float32, copy=False).reshape(*data.shape[:-1], count * dtype.block)


def _half(blocks: Array, at: int) -> Floats:
    """The f16 at byte ``at`` of each block as f32, shape (n, 1)."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(data: Array) -> Array:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bits(data: Array) -> Array:
    """The bits of each row, the lowest of the first byte first."""
    return np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little")


# --- 32 elements, one scale (and offset) ----------------------------------------------------------------------------


def _q4_0(b: Array) -> Floats:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(b: Array) -> Floats:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Array) -> Floats:
    q: Array = _nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4)
    return _half(b, 0) * (q.astype(np.float32) - np.float32(16))


def _q5_1(b: Array) -> Floats:
    q: Array = _nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4)
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _q8_0(b: Array) -> Floats:
    return _half(b, 0) * b[:, 2:].copy().view(np.int8).astype(np.float32)


_IQ4_LEVELS: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The 16 levels of iq4_nl, spaced like the quantiles of weights."""


def _iq4_nl(b: Array) -> Floats:
    return _half(b, 0) * _IQ4_LEVELS[_nibbles(b[:, 2:])]


_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 4-bit float with 2 exponent bits and 1 mantissa bit (OCP Microscaling Formats, 2023)."""


def _mxfp4(b: Array) -> Floats:
    # E8M0: the byte is an exponent, 127 means 1; half of that, since the values are doubled.
    return np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128) * _E2M1[_nibbles(b[:, 1:])]


# --- 256 elements: scales of parts of 16 or 32, themselves scaled by an f16 -----------------------------------------


def _planes(data: Array, width: int) -> Array:
    """Fields of ``width`` bits, 2 or 4, from groups of 32 bytes: all lowest fields of a group, then the next ones.

    Shape (n, bytes) -> (n, bytes // 32, 8 // width, 32).
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (data.reshape(len(data), -1, 1, 32) >> shifts) & np.uint8((1 << width) - 1)


def _q2_k(b: Array) -> Floats:
    # scales u8[16] (low half: scale, high half: offset), quants u8[64], d f16, dmin f16
    scale = _half(b, 80) * (b[:, :16] & 15).astype(np.float32)
    offset = _half(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    q = _planes(b[:, 16:80], 2).reshape(-1, 16, 16).astype(np.float32)
    return scale[..., None] * q - offset[..., None]


def _q3_k(b: Array) -> Floats:
    # hmask u8[32], quants u8[64], scales 16 x 6 bits in u8[12], d f16
    low, high = _nibbles(b[:, 96:104]), b[:, 104:108]
    top = ((high[:, None, :] >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)) & 3).reshape(-1, 16)
    six: Array = low | (top << 4)
    scale = _half(b, 108) * (six.astype(np.float32) - np.float32(32))
    third = (b[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    q: Array = _planes(b[:, 32:96], 2).reshape(-1, 8, 32).astype(np.int8) - (4 * (1 - third.astype(np.int8)))
    return scale[..., None] * q.reshape(-1, 16, 16).astype(np.float32)


def _scales_of_8(b: Array) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit offsets packed into 12 bytes (q4_k, q5_k), as f32."""
    first, second, rest = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scale = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=-1)
    offset = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=-1)
    return scale.astype(np.float32), offset.astype(np.float32)


def _q4_k(b: Array) -> Floats:
    # d f16, dmin f16, scales u8[12], quants u8[128]
    scale, offset = _scales_of_8(b[:, 4:16])
    q = _planes(b[:, 16:], 4).reshape(-1, 8, 32).astype(np.float32)
    return (_half(b, 0) * scale)[..., None] * q - (_half(b, 2) * offset)[..., None]


def _q5_k(b: Array) -> Floats:
    # d f16, dmin f16, scales u8[12], fifth bits u8[32], quants u8[128]
    scale, offset = _scales_of_8(b[:, 4:16])
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    q: Array = _planes(b[:, 48:], 4).reshape(-1, 8, 32) | (fifth << 4)
    return (_half(b, 0) * scale)[..., None] * q - (_half(b, 2) * offset)[..., None]


def _q6_k(b: Array) -> Floats:
    # low halves u8[128], high pairs u8[64], scales i8[16], d f16
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    low = ((b[:, :128].reshape(-1, 2, 1, 64) >> shifts) & 15).reshape(-1, 8, 32)
    high = _planes(b[:, 128:192], 2).reshape(-1, 8, 32)
    q = (low | (high << 4)).astype(np.float32) - np.float32(32)
    scale = _half(b, 208) * b[:, 192:208].copy().view(np.int8).astype(np.float32)
    return scale[..., None] * q.reshape(-1, 16, 16)


_DECODERS: Final[dict[str, Callable[[Array], Floats]]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "mxfp4": _mxfp4,
}
