"""Rows of quantized weights, some at a time, decoded into scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg
from opweave.dtypes import DType, as_dtype
from opweave.ops.blocks import Decoder, scratch_bytes
from opweave_cpu.tiles import Array, Scratch, padded, shares

__all__ = ["BLOCK_TILE", "RowDecoder", "decoder_bytes", "longest", "row_pieces"]

BLOCK_TILE: Final = 1 << 17
"""Weights that are decoded at a time: their f32 values and what they are made of fit the second-level cache."""
FEWEST_ROWS: Final = 16
"""With fewer rows at a time a product becomes one of vectors."""

_F32: Final = as_dtype("f32")
_U8: Final = as_dtype("u8")


def row_pieces(w: Arg) -> list[slice]:
    """The rows of a matrix of weights in pieces of nearly one length, to be decoded one after the other."""
    outputs, inputs = w.shape[-2:]
    return shares(outputs, -(-outputs // max(FEWEST_ROWS, BLOCK_TILE // inputs)))


def decoder_bytes(w: Arg, pieces: Sequence[slice], dtype: DType) -> int:
    """Bytes of the workspace that a `RowDecoder` takes."""
    size = longest(pieces) * w.shape[-1]
    wide = 0 if dtype is _F32 else padded(size * dtype.itemsize)
    return padded(scratch_bytes(w.dtype, size // w.dtype.block)) + padded(size * _F32.itemsize) + wide


def longest(pieces: Sequence[slice]) -> int:
    """Rows of the longest piece."""
    lengths: list[int] = [piece.stop - piece.start for piece in pieces]
    return max(lengths)


class RowDecoder:
    """Decodes pieces of rows of a matrix of weights into one place.

    Args:
        w: the weights; of more than two axes the last two are matrices.
        pieces: what is decoded at a time.
        dtype: of the values: f32 or wider.
        scratch: hands out `decoder_bytes`.
    """

    def __init__(self, w: Arg, pieces: Sequence[slice], dtype: DType, scratch: Scratch) -> None:
        rows, inputs = longest(pieces), w.shape[-1]
        blocks = inputs // w.dtype.block
        room = scratch.take((scratch_bytes(w.dtype, rows * blocks),), _U8)
        values = scratch.take((rows, inputs), _F32)
        wide = values if dtype is _F32 else scratch.take((rows, inputs), dtype)
        self._known: dict[int, tuple[Callable[[Array], None], Array]] = {}
        for n in {piece.stop - piece.start for piece in pieces}:
            decode = Decoder(w.dtype, (n, blocks), room).into(values[:n])
            self._known[n] = decode if wide is values else partial(_widen, decode, values[:n], wide[:n]), wide[:n]

    def __call__(self, n: int) -> tuple[Callable[[Array], None], Array]:
        """``decode(blocks)`` for ``n`` rows of blocks, as `fields_of` shows them, and the array of their values."""
        return self._known[n]


def _widen(decode: Callable[[Array], None], values: Array, wide: Array, blocks: Array) -> None:
    decode(blocks)
    np.copyto(wide, values)
