"""Compressed data of messages: `Codec`, `CODECS`; `pack` and `unpack`.

The bytes of numbers are grouped before they are compressed: the first bytes of all numbers, then the second ones, and
so on. Exponents of neighbouring weights are alike, their mantissas are not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np

from opweave.errors import FormatError

__all__ = ["CODECS", "WIDTHS", "Codec", "pack", "unpack"]

WIDTHS: Final = (1, 2, 4)
"""Bytes of one number; 1: nothing is grouped."""


class Codec(NamedTuple):
    """A way to compress.

    Attributes:
        pack: compresses.
        unpack: decompresses data of which that many bytes are expected; raises any error where it is damaged, and never
            makes more than one byte beyond them. The caller checks the size.
        fastest: bytes per second of a connection from which on the codec is not even tried.
    """

    pack: Callable[[Any], bytes]
    unpack: Callable[[Any, int], bytes]
    fastest: float


def _pack_zlib(data: Any) -> bytes:
    return zlib.compress(data, 1)


def _unpack_zlib(data: Any, size: int) -> bytes:
    stream = zlib.decompressobj()
    raw = stream.decompress(data, size + 1)  # 0 would be without a limit
    if not stream.eof or stream.unused_data:
        raise ValueError("it holds more, is cut off, or something follows")
    return raw


def _pack_zstd(data: Any) -> bytes:
    packed: bytes = import_module("zstandard").ZstdCompressor(level=1).compress(data)
    return packed


def _unpack_zstd(data: Any, size: int) -> bytes:
    zstandard = import_module("zstandard")
    # The library allocates as many bytes as the data's header says, so that is checked first.
    told = zstandard.get_frame_parameters(data)
    if told.content_size != size or told.dict_id:
        raise ValueError(f"it holds {told.content_size:,} bytes")
    raw: bytes = zstandard.ZstdDecompressor().decompress(data, size, allow_extra_data=False)
    return raw


CODECS: Final[dict[str, Codec]] = {
    name: codec
    for name, codec, module in (
        ("zstd", Codec(_pack_zstd, _unpack_zstd, 4e8), "zstandard"),
        ("zlib", Codec(_pack_zlib, _unpack_zlib, 50e6), "zlib"),
    )
    if find_spec(module) is not None
}
"""Name -> codec, of those whose library is installed; better ones come first."""


def pack(codec: Codec, width: int, data: memoryview) -> bytes:
    """Compressed bytes, of numbers of ``width`` bytes each; bytes behind the last whole number stay ungrouped."""
    if width == 1:
        return codec.pack(data)
    raw = np.frombuffer(data, np.uint8)
    whole = raw.size - raw.size % width
    grouped = np.empty_like(raw)
    grouped[:whole].reshape(width, -1)[...] = raw[:whole].reshape(-1, width).T
    grouped[whole:] = raw[whole:]
    return codec.pack(grouped.data)


def unpack(name: str, width: int, data: memoryview, size: int) -> memoryview:
    """The ``size`` bytes that were packed.

    Raises:
        FormatError: no such codec or width, or data that does not hold exactly so many bytes.
    """
    codec = CODECS.get(name)
    if codec is None or width not in WIDTHS:
        raise FormatError(f"data is compressed by {name!r:.20} in numbers of {width} bytes, which is not known here")
    try:
        grouped = np.frombuffer(codec.unpack(data, size), np.uint8)
    except Exception as error:  # each library has its own
        raise FormatError(f"{len(data):,} bytes do not hold {size:,} bytes compressed by {name}: {error}") from None
    if grouped.size != size:
        raise FormatError(f"{len(data):,} bytes hold {grouped.size:,} bytes compressed by {name}, not {size:,}")
    if width == 1:
        return grouped.data
    whole = size - size % width
    raw = np.empty(size, np.uint8)
    raw[:whole].reshape(-1, width)[...] = grouped[:whole].reshape(width, -1).T
    raw[whole:] = grouped[whole:]
    return raw.data
