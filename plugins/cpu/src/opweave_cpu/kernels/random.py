"""Random numbers: tiles of blocks of words, then the numbers of these words, in passes over a tile."""

from __future__ import annotations

from functools import partial
from math import pi
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave.ops.random import UNIFORM_BITS, block_count, block_values, philox
from opweave_cpu.kernels.table import KERNELS, needs_dense_output
from opweave_cpu.tiles import Array, at_once, compute_dtype, most_workers, shares, workers_of
from opweave_cpu.tunables import limit

BLOCKS: Final = limit("random_blocks", 1 << 12, 1, 1 << 16)
"""Blocks of a tile, whose words and products of 48 bytes a block fit the second-level cache."""

_BYTES: Final = 16
"""Bytes that a value counts as when work is shared among threads: some forty passes over u64."""


def _workspace(step: Step) -> Arrays:
    lead = most_workers(_BYTES * step.out.size)
    tile = min(block_count(step.out.size, step.out.dtype), BLOCKS.value)
    arrays: dict[str, Any] = {"words": ("i64", (lead, 6, tile))}
    if step.op == "normal":
        arrays |= {"parts": (compute_dtype(step.out.dtype), (lead, 3, tile)), "swaps": ("bool", (lead, tile))}
    return arrays


@KERNELS("uniform", "normal", when=needs_dense_output, workspace=_workspace)
def random(
    stream: Stream,
    op: str,
    out: Arg,
    key: Arg,
    counter: Arg,
    *,
    shape: tuple[int, ...],
    dtype: DType,
    words: Arg,
    parts: Arg | None = None,
    swaps: Arg | None = None,
) -> Call:
    each, flat = block_values(dtype), out.view.reshape(-1)
    blocks = block_count(flat.size, dtype)
    count = min(workers_of(stream), len(words.view), -(-blocks // BLOCKS.value))
    jobs = []
    for worker, mine in enumerate(shares(blocks, count)):
        if parts is None or swaps is None:
            make = partial(_uniform, bits=UNIFORM_BITS[dtype.name])
        else:
            make = partial(_normal, parts=parts.view[worker], swap=swaps.view[worker])
        own = words.view[worker].view(np.uint64)
        jobs.append(partial(_fill, make, key.view, counter.view, flat, mine, each, own))
    return at_once(jobs)


def _fill(make: Any, key: Array, counter: Array, out: Array, blocks: slice, each: int, words: Array) -> None:
    """Fill the values of some blocks, tile by tile."""
    seed, draw = int(key), int(counter)
    for first in range(blocks.start, blocks.stop, words.shape[1]):
        tile = words[:, : min(words.shape[1], blocks.stop - first)]
        philox(seed, draw, first, tile[:4], tile[4:])
        make(out[first * each : (first + tile.shape[1]) * each], tile)


def _put(values: Array, out: Array, at: int, each: int) -> None:
    """``values`` as number ``at`` of each block; the last block may have fewer."""
    target = out[at::each]
    np.copyto(target, values[: len(target)], "unsafe")


def _uniform(out: Array, words: Array, *, bits: int) -> None:
    fractions = words[4].view(np.float64)
    if bits == 53:
        for at in (0, 1):
            _join(words[2 * at], words[2 * at + 1])
            np.multiply(words[2 * at], 2.0**-bits, out=fractions)
            _put(fractions, out, at, 2)
        return
    for at in range(4):
        np.right_shift(words[at], 32 - bits, out=words[at])
        np.multiply(words[at], 2.0**-bits, out=fractions)
        _put(fractions, out, at, 4)


def _join(high: Array, low: Array) -> None:
    """The upper 53 of 64 bits, in place of the upper word."""
    np.left_shift(high, 21, out=high)
    np.right_shift(low, 11, out=low)
    np.bitwise_or(high, low, out=high)


def _normal(out: Array, words: Array, *, parts: Array, swap: Array) -> None:
    size, product = words.shape[1], words[4]
    parts, swap = parts[:, :size], swap[:size]
    if parts.dtype == np.float64:
        _join(words[0], words[1])
        np.bitwise_and(words[2], (1 << 29) - 1, out=product)
        np.left_shift(product, 32, out=product)
        np.bitwise_or(product, words[3], out=product)
        _pair(out, words[0], 53, words[2], product, 61, parts, swap, 0, 2)
        return
    for at in (0, 2):
        np.bitwise_and(words[at + 1], (1 << 29) - 1, out=product)
        _pair(out, words[at], 32, words[at + 1], product, 29, parts, swap, at, 4)


def _pair(
    out: Array, distance: Array, bits: int, top: Array, part: Array, digits: int, parts: Array, swap: Array,
    at: int, each: int,
) -> None:  # fmt: skip
    """Two numbers of each block, by the Box-Muller transform: from a distance and an angle, of which ``part`` is the
    place in an eighth of a turn, and the upper three bits of ``top`` say in which eighth."""
    radius, cos, sin = parts
    np.add(distance, 1, out=distance)
    np.copyto(radius, distance, "unsafe")
    np.multiply(radius, 2.0**-bits, out=radius)
    np.log(radius, out=radius)
    np.multiply(radius, -2.0, out=radius)
    np.sqrt(radius, out=radius)
    np.copyto(cos, part, "unsafe")
    np.multiply(cos, pi / 4 * 2.0**-digits, out=cos)
    np.sin(cos, out=sin)
    np.cos(cos, out=cos)
    np.multiply(cos, radius, out=cos)
    np.multiply(sin, radius, out=sin)
    np.greater_equal(top, 1 << 31, out=swap)
    np.copyto(radius, cos)
    np.copyto(cos, sin, where=swap)
    np.copyto(sin, radius, where=swap)
    for number, value, bit in ((at, cos, 30), (at + 1, sin, 29)):
        np.right_shift(top, bit, out=part)
        np.bitwise_and(part, 1, out=part)
        np.negative(value, out=value, where=part.view(np.bool_)[::8])
        _put(value, out, number, each)
