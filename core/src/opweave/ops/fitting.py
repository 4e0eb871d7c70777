"""What all encodings of blocks share: looking for the scales of parts, and packing integers.

Sums are added by halves (`tree_sum`), so that a device with correctly rounded operations gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from opweave.ops.decoding import Array

__all__ = ["STEPS", "best_scales", "inverse_of", "packed", "store", "times", "tree_sum"]

STEPS: Final = tuple([step / 8 for step in range(-8, 9)])
"""The scales that are tried: the value of a part that is largest in magnitude, or for types with offsets the width of
the range of its values, divided by the largest integer of the type plus one of these numbers."""


def best_scales(largest: Array, ends: Iterable[float], products: Callable[[Array], tuple[Array, Array]]) -> Array:
    """The scales of least squares with the smallest error, of parts with these values of largest magnitude, which are
    scaled to one of the ``ends`` after the other. ``products`` returns Σ w x q and Σ w q² for inverse scales, where q
    are the integers they give. All are f32 of shape (blocks, parts)."""
    scales, best = largest - largest, np.zeros_like(largest)  # NaN where a value is not finite
    for end in ends:
        product, square = products(np.where(largest == 0, np.float32(0), np.float32(end) / largest))
        # The error is Σ w x² - (Σ w x q)² / Σ w q².
        scale = np.where(square > 0, product / square, np.float32(0))
        less = scale * product
        better = less > best
        best, scales = np.where(better, less, best), np.where(better, scale, scales)
    return np.asarray(scales)


def tree_sum(x: Array) -> Array:
    """Sums over the last axis, whose length is a power of two: the second half is added to the first until one element
    is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    result: Array = x[..., 0]
    return result


def times(x: Array, importance: Array | None) -> Array:
    return x if importance is None else x * importance


def store(out: Array, field: str, values: Array) -> None:
    """Set a field of each block: a number, or bytes of shape (blocks, bytes)."""
    if values.dtype == np.uint8 and out.dtype[field].kind == "V":
        values = np.ascontiguousarray(values).view(f"V{values.shape[1]}")
    out[field] = values[:, 0]


def packed(integers: Array, width: int, group: int) -> Array:
    """Integers packed as fields of ``width`` bits: of each ``group`` of bytes the lowest fields first, then the next
    ones."""
    fields = integers.astype(np.uint8).reshape(len(integers), -1, 8 // width, group)
    shifted = fields << np.arange(0, 8, width, dtype=np.uint8)[:, None]
    packed: Array = np.bitwise_or.reduce(shifted, 2)
    return packed.reshape(len(integers), -1)


def inverse_of(x: Array) -> Array:
    """1 / x, and 0 for 0."""
    return np.where(x == 0, np.float32(0), np.float32(1) / x)
