"""Weights that are converted, or decoded, some rows at a time and then multiplied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave.ops.blocks import Decoder, scratch_bytes
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import Array, stretches
from opweave_cpu.tunables import BLOCK_TILE, MANY_ROWS, limit

__all__ = ["RowDecoder", "decoder_scratch", "longest", "row_tiles"]

LARGEST_TILE: Final = limit("largest_tile", 1 << 21, 1, 1 << 26)
"""The most weights in a tile that is converted, or decoded, and then multiplied."""

COLUMNS: Final = limit("tile_columns", 1 << 11, 16, 1 << 14)
"""Rows of weights, which are columns of the result, from which on BLAS is at full speed: it wakes its threads for each
product."""

ROW_STEP: Final = 16
"""Rows in a tile are a multiple of this: as many as BLAS multiplies at a time."""

_F32: Final = as_dtype("f32")


def row_tiles(w: Arg, rows: int) -> list[slice]:
    """The rows of a matrix of weights in tiles of nearly one length, each multiplied at once by ``rows`` rows."""
    outputs, inputs = w.shape[-2:]
    most = BLOCK_TILE.value // inputs
    if rows >= MANY_ROWS.value:
        most = max(most, min(COLUMNS.value, LARGEST_TILE.value // inputs))
    return stretches(outputs, _even(outputs, most))


def _even(n: int, most: int) -> int:
    """The length of equal tiles of ``n`` rows, of about ``most`` at most."""
    count = -(-n // max(ROW_STEP, most))
    return -(-n // (count * ROW_STEP)) * ROW_STEP


def _decoded_rows(w: Arg, rows: int) -> int:
    """Rows that are decoded at a time, of ``rows`` that are multiplied at a time."""
    return min(rows, _even(rows, BLOCK_TILE.value // w.shape[-1]))


def decoder_scratch(w: Arg, tiles: Sequence[slice], dtype: DType) -> Arrays:
    """The workspace that a `RowDecoder` works in."""
    inputs, rows = w.shape[-1], longest(tiles)
    some = _decoded_rows(w, rows)
    return {
        "decoding": ("u8", (scratch_bytes(w.dtype, some * inputs // w.dtype.block),)),
        "narrow": (_F32, (0 if dtype is _F32 else some, inputs)),
        "weights": (dtype, (rows, inputs)),
    }


def longest(tiles: Sequence[slice]) -> int:
    """Rows of the longest tile."""
    lengths: list[int] = [tile.stop - tile.start for tile in tiles]
    return max(lengths)


class RowDecoder:
    """Decodes tiles of rows of a matrix of weights, all into the same memory.

    Args:
        w: the weights; of more than two axes the last two are matrices.
        tiles: the rows that are multiplied at a time.
        arrays: those of `decoder_scratch`. The values end in ``weights``, by way of ``narrow`` where their type is
            wider than f32.
    """

    def __init__(self, w: Arg, tiles: Sequence[slice], arrays: Mapping[str, Arg]) -> None:
        self._w, self._values = w, arrays["weights"]
        values, blocks = arrays["weights"].view, w.shape[-1] // w.dtype.block
        decoding, narrow = arrays.get("decoding"), arrays.get("narrow")
        scratch = np.empty(0, np.uint8) if decoding is None else decoding.view
        decoders: dict[int, Decoder] = {}
        self._known: dict[int, tuple[Callable[[Array], None], Array]] = {}
        for n in {tile.stop - tile.start for tile in tiles}:
            parts = []
            for part in stretches(n, _decoded_rows(w, len(values))):
                count = part.stop - part.start
                decoder = decoders.get(count)
                if decoder is None:
                    decoder = decoders[count] = Decoder(w.dtype, (count, blocks), scratch)
                into = values[part]
                if narrow is None:
                    parts.append((part, decoder.into(into)))
                else:
                    some = narrow.view[:count]
                    parts.append((part, partial(_widen, decoder.into(some), some, into)))
            self._known[n] = partial(_decode, parts), values[:n]

    def __call__(self, n: int) -> tuple[Callable[[Array], None], Array]:
        """``decode(blocks)`` for ``n`` rows of blocks, as `fields_of` shows them, and the array of their values."""
        return self._known[n]

    def compiled(self, stream: Stream, tile: slice) -> Call | None:
        """The stream's own call that decodes a tile of a matrix; ``None`` if it has none."""
        if not isinstance(stream, CpuStream) or self._values.dtype is not _F32:
            return None
        return stream.decode_rows(self._w, tile, self._values)


def _decode(parts: Sequence[tuple[slice, Callable[[Array], None]]], blocks: Array) -> None:
    for part, decode in parts:
        decode(blocks[part])


def _widen(decode: Callable[[Array], None], values: Array, wide: Array, blocks: Array) -> None:
    decode(blocks)
    np.copyto(wide, values)
