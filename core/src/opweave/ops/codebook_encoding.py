"""Encoding of the block types whose elements are entries of codebooks: iq2 and iq3.

An entry is sought among the `_NEAR` ones that are nearest to the levels to which each element alone would be rounded:
these are found once for each such combination of levels, and compared with the values by their weighted squared error.
The scales of parts are found as for the other fitted types. The scale of a block is that of least squares for the
entries and the scales of parts that were chosen. (This module is imported when the first values are encoded so.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from opweave.ops.codebooks import codebook
from opweave.ops.fitting import STEPS, best_scales, inverse_of, packed, store, times, tree_sum

__all__ = ["encode_entries"]

Array = np.ndarray[Any, Any]

_NEAR: Final = 8
"""Entries that are compared: with half as many the error is up to 5 % larger."""


class _Format(NamedTuple):
    """Blocks of 256 elements: values are ``unit · (2 · integer + 1) · level``.

    Attributes:
        part: elements that share an integer of four bits.
        even: each eight values have an even number of minus signs, so that seven of them are stored.
        unit: of the f16 of the block.
    """

    part: int
    even: bool
    unit: float
    write: Callable[[Array, Array, Array, Array], None]


def encode_entries(name: str, x: Array, importance: Array | None, out: Array) -> None:
    """Blocks of the type ``name`` of values.

    Args:
        x: f32, shape (blocks, 256); importance the same, or ``None`` for 1.
        out: the fields of the blocks, shape (blocks,).
    """
    form = _FORMATS[name]
    codes, _, _ = _tables(name)
    dim = len(codes)
    negative = x < 0
    if form.even:
        # Of the values of an odd number of minus signs the one that counts least gets the other sign.
        eights = negative.reshape(-1, 8)
        least = times(x * x, importance).reshape(-1, 8).argmin(1)
        eights[np.arange(len(eights)), least] ^= np.count_nonzero(eights, 1) % 2 == 1

    def split(values: Array) -> Array:
        """Elements of an entry along the first axis, then blocks, parts, entries."""
        return np.ascontiguousarray(np.moveaxis(values.reshape(len(x), 256 // form.part, -1, dim), -1, 0))

    sizes = split(np.where(negative, -x, x))
    weights = None if importance is None else split(importance)
    weighted = times(sizes, weights)

    def products(q: Array) -> tuple[Array, Array]:
        """Σ w x q and Σ w q² of each part."""
        return _sums(weighted * q), _sums(times(q, weights) * q)

    # Values that are almost equal are the lowest level of all: more codebooks have that entry than that of the highest.
    ends = [codes.min(), *[codes.max() * (1 + step / 5) for step in STEPS[::4]]]
    scales = best_scales(
        sizes.max((0, 3)), ends, lambda inverse: products(codes.take(_nearest(name, sizes, weights, inverse), 1))
    )
    unit = scales.max(1, keepdims=True) / np.float32(31)
    for _ in range(2):
        odd = 2 * np.clip(np.rint((scales * inverse_of(unit) - 1) / 2), 0, 15) + 1
        index = _nearest(name, sizes, weights, inverse_of(unit * odd))
        product, square = products(codes.take(index, 1))
        product, square = tree_sum(product * odd), tree_sum(square * odd * odd)
        unit = (unit - unit) + np.where(square > 0, product / square, np.float32(0))[:, None]
    store(out, "d", unit / np.float32(form.unit))
    form.write(out, index.reshape(len(x), -1), np.packbits(negative, 1, "little"), (odd // 2).astype(np.uint8))


def _sums(x: Array) -> Array:
    """Sums of parts: over elements of entries, then over entries."""
    return tree_sum(tree_sum(np.moveaxis(x, 0, -1)))


def _nearest(name: str, sizes: Array, weights: Array | None, inverse: Array) -> Array:
    """The indices of the entries that are nearest to values times the inverse scales of their parts."""
    codes, middles, near = _tables(name)
    scaled = sizes * inverse[..., None]
    rounded = np.zeros(scaled.shape, np.uint8)
    for middle in middles:
        rounded += scaled > middle
    number = np.zeros(scaled.shape[1:], np.intp)
    for digits in rounded[::-1]:
        number *= len(middles) + 1
        number += digits
    best, index = np.full(number.shape, np.inf, np.float32), np.zeros_like(number)
    for table in near:
        other = table.take(number)
        difference = codes.take(other, 1) - scaled
        error = tree_sum(np.moveaxis(times(difference, weights) * difference, 0, -1))
        better = error < best
        best, index = np.where(better, error, best), np.where(better, other, index)
    return index


@lru_cache
def _tables(name: str) -> tuple[Array, Array, Array]:
    """The entries, as f32 of shape (elements, entries); the numbers between two levels; and for each number whose
    digits, the first one the lowest, are those of levels, the `_NEAR` nearest entries: shape (`_NEAR`, numbers)."""
    codes = codebook(name).astype(np.float32)
    levels = np.unique(codes)
    count, dim = len(levels), codes.shape[1]
    grid = levels[np.arange(count**dim)[:, None] // count ** np.arange(dim) % count]
    # Integers below 2^24, so that every order of the sums gives the same.
    distance = (grid**2).sum(1)[:, None] + (codes**2).sum(1) - 2 * (grid @ codes.T)
    keys = distance.astype(np.int32) * len(codes) + np.arange(len(codes), dtype=np.int32)
    near = np.sort(np.partition(keys, _NEAR, 1)[:, :_NEAR], 1) % len(codes)
    return np.ascontiguousarray(codes.T), (levels[1:] + levels[:-1]) / 2, np.ascontiguousarray(near.T.astype(np.intp))


# --- what the bytes hold --------------------------------------------------------------------------------------------


def _store_words(out: Array, field: str, words: Array) -> None:
    store(out, field, np.ascontiguousarray(words).view(np.uint8).reshape(len(out), -1))


def _with_high(shifts: int) -> Callable[[Array, Array, Array, Array], None]:
    """Eight bits of an index in a byte, those above them in fields of ``shifts`` bits; signs in bytes; integers in half
    bytes, the low half first (iq2_s, iq3_s)."""

    def write(out: Array, index: Array, signs: Array, integers: Array) -> None:
        store(out, "q", index.astype(np.uint8))
        store(out, "high", packed(index >> 8, shifts, 1))
        store(out, "signs", signs)
        store(out, "scales", packed(integers, 4, 1))

    return write


def _in_words(out: Array, index: Array, signs: Array, integers: Array) -> None:
    """For 32 elements a word: four times seven bits of signs, then the integer (iq2_xxs, iq3_xxs)."""
    sevens = (signs & 127).reshape(len(out), 8, 4).astype("<u4") << np.arange(0, 28, 7, dtype=np.uint32)
    words = np.bitwise_or.reduce(sevens, 2) | integers.astype(np.uint32) << 28
    if "words" in (out.dtype.names or ()):
        store(out, "q", index.astype(np.uint8))
        _store_words(out, "words", words.astype("<u4"))
    else:
        both = [index.astype(np.uint8).view("<u4"), words.astype("<u4")]
        _store_words(out, "q", np.stack(both, 2))


def _with_signs(out: Array, index: Array, signs: Array, integers: Array) -> None:
    """Nine bits of an index, then seven of signs; integers in half bytes (iq2_xs)."""
    _store_words(out, "q", (index | (signs & 127).astype(np.intp) << 9).astype("<u2"))
    store(out, "scales", packed(integers, 4, 1))


_FORMATS: Final = {
    "iq3_s": _Format(32, False, 1, _with_high(1)),
    "iq3_xxs": _Format(32, True, 1 / 4, _in_words),
    "iq2_s": _Format(16, False, 1 / 8, _with_high(2)),
    "iq2_xs": _Format(16, True, 1 / 8, _with_signs),
    "iq2_xxs": _Format(32, True, 1 / 8, _in_words),
}
