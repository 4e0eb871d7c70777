"""Rows of weights that have to be converted, or decoded, some at a time before they are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg
from opweave.graph.dtypes import DType, as_dtype
from opweave.ops.blocks import Decoder, scratch_bytes
from opweave_cpu.tiles import Array, Scratch, padded, stretches

__all__ = ["BLOCK_TILE", "RowDecoder", "decoder_bytes", "longest", "row_pieces"]

BLOCK_TILE: Final = 1 << 17
"""Weights that are decoded at a time: their f32 values and what they are made of fit the second-level cache, from which
a product with few rows reads them too."""

MANY_ROWS: Final = 16
"""Rows from which on a product takes longer than reading the weights: it is faster with more of them at a time."""

LARGEST_TILE: Final = 1 << 21
"""Weights of such a product at most."""

COLUMNS: Final = 1 << 11
"""Columns of the result that keep BLAS at full speed: it wakes its threads for each product."""

STEP: Final = 16
"""Rows of weights are taken in multiples of so many, as BLAS takes them."""

_F32: Final = as_dtype("f32")
_U8: Final = as_dtype("u8")


def row_pieces(w: Arg, rows: int) -> list[slice]:
    """The rows of a matrix of weights in pieces of nearly one length, each multiplied at once by ``rows`` rows."""
    outputs, inputs = w.shape[-2:]
    most = BLOCK_TILE // inputs
    if rows >= MANY_ROWS:
        most = max(most, min(COLUMNS, LARGEST_TILE // inputs))
    return stretches(outputs, _even(outputs, most))


def _even(n: int, most: int) -> int:
    """The length of equal pieces of ``n`` rows, of about ``most`` at most."""
    count = -(-n // max(STEP, most))
    return -(-n // (count * STEP)) * STEP


def _decoded_rows(w: Arg, pieces: Sequence[slice]) -> int:
    """Rows that are decoded at a time."""
    rows = longest(pieces)
    return min(rows, _even(rows, BLOCK_TILE // w.shape[-1]))


def decoder_bytes(w: Arg, pieces: Sequence[slice], dtype: DType) -> int:
    """Bytes of the workspace that a `RowDecoder` takes."""
    inputs, rows = w.shape[-1], longest(pieces)
    tile = _decoded_rows(w, pieces) * inputs
    narrow = 0 if dtype is _F32 else padded(tile * _F32.itemsize)
    return padded(scratch_bytes(w.dtype, tile // w.dtype.block)) + narrow + padded(rows * inputs * dtype.itemsize)


def longest(pieces: Sequence[slice]) -> int:
    """Rows of the longest piece."""
    lengths: list[int] = [piece.stop - piece.start for piece in pieces]
    return max(lengths)


class RowDecoder:
    """Decodes pieces of rows of a matrix of weights into one place.

    Args:
        w: the weights; of more than two axes the last two are matrices.
        pieces: what is multiplied at a time.
        dtype: of the values: f32 or wider.
        scratch: hands out `decoder_bytes`.
    """

    def __init__(self, w: Arg, pieces: Sequence[slice], dtype: DType, scratch: Scratch) -> None:
        rows, inputs = longest(pieces), w.shape[-1]
        blocks, tile = inputs // w.dtype.block, _decoded_rows(w, pieces)
        room = scratch.take((scratch_bytes(w.dtype, tile * blocks),), _U8)
        narrow = None if dtype is _F32 else scratch.take((tile, inputs), _F32)
        values = scratch.take((rows, inputs), dtype)
        decoders: dict[int, Decoder] = {}
        self._known: dict[int, tuple[Callable[[Array], None], Array]] = {}
        for n in {piece.stop - piece.start for piece in pieces}:
            parts = []
            for part in stretches(n, tile):
                count = part.stop - part.start
                decoder = decoders.get(count)
                if decoder is None:
                    decoder = decoders[count] = Decoder(w.dtype, (count, blocks), room)
                into = values[part]
                if narrow is None:
                    parts.append((part, decoder.into(into)))
                else:
                    parts.append((part, partial(_widen, decoder.into(narrow[:count]), narrow[:count], into)))
            self._known[n] = partial(_decode, parts), values[:n]

    def __call__(self, n: int) -> tuple[Callable[[Array], None], Array]:
        """``decode(blocks)`` for ``n`` rows of blocks, as `fields_of` shows them, and the array of their values."""
        return self._known[n]


def _decode(parts: Sequence[tuple[slice, Callable[[Array], None]]], blocks: Array) -> None:
    for part, decode in parts:
        decode(blocks[part])


def _widen(decode: Callable[[Array], None], values: Array, wide: Array, blocks: Array) -> None:
    decode(blocks)
    np.copyto(wide, values)
