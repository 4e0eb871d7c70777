"""A container of bytes: a header in JSON, and arrays behind it. Nothing in it is executable.

Layout, little-endian: 8 bytes ``MAGIC``; u32 version; u32 CRC-32 of the header; u64 length of the header; the header
in UTF-8; then the data, which begins at the next multiple of 64 bytes. The header is an object. Each buffer begins at a
multiple of 64 bytes from the start of the data, in order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final
from zlib import crc32

import numpy as np

from opweave.errors import FormatError

__all__ = ["ALIGNMENT", "MAGIC", "VERSION", "aligned", "pack", "unpack"]

MAGIC: Final = b"opweave\0"
VERSION: Final = 1
ALIGNMENT: Final = 64
_HEAD: Final = Struct("<8sIIQ")

Array = np.ndarray[Any, Any]


def aligned(n: int) -> int:
    """``n`` rounded up to a multiple of 64."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def pack(header: dict[str, Any], buffers: Sequence[Array]) -> bytes:
    """The bytes of a container.

    Args:
        header: an object of JSON's types, without NaN and infinities.
        buffers: dense arrays of any dtype.
    """
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    parts: list[bytes | memoryview] = [_HEAD.pack(MAGIC, VERSION, crc32(text), len(text)), text]
    end = _HEAD.size + len(text)
    for buffer in buffers:
        raw = buffer.reshape(-1).view(np.uint8).data
        parts += [bytes(aligned(end) - end), raw]
        end = aligned(end) + len(raw)
    return b"".join(parts)


def unpack(data: Any, what: str = "graph") -> tuple[dict[str, Any], Array]:
    """The header, and the bytes behind it as a read-only ``uint8`` array over ``data``, which is not copied.

    Args:
        data: contiguous bytes.
        what: what was saved, as messages say it.

    Raises:
        FormatError: ``data`` is not contiguous bytes, was not made by `pack`, is damaged or cut off, or is of another
            version of the format.
    """
    try:
        view = memoryview(data).cast("B").toreadonly()
    except (TypeError, ValueError) as error:
        raise FormatError(f"a saved {what} is bytes, not {type(data).__name__}: {error}") from None
    if len(view) < _HEAD.size:
        raise FormatError(f"{len(view)} bytes are too few for a saved {what}")
    magic, version, checksum, length = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(f"these bytes are no saved {what}: they do not begin with its mark")
    if version != VERSION:
        raise FormatError(f"the {what} was saved in version {version} of the format; this opweave reads {VERSION}")
    if length > len(view) - _HEAD.size:
        raise FormatError(f"the saved {what} is cut off: its header has {length:,} bytes, {len(view):,} are there")
    end = _HEAD.size + length
    text = bytes(view[_HEAD.size : end])
    if crc32(text) != checksum:
        raise FormatError(f"the saved {what} is damaged: its header has another checksum than was saved")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header of the saved {what} is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"the header of the saved {what} is no object")
    return header, np.frombuffer(view[aligned(end) :], np.uint8)
