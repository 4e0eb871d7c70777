"""Random numbers: tiles of blocks of words in i64, then the numbers of these words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import pi
from typing import Any, Final

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, bool_, i64
from opweave.ops.random import KEY_STEPS, LOW, MULTIPLIERS, ROUNDS, UNIFORM_BITS, block_count, block_values
from opweave_torch.kernels.binding import in_order, scalar, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor
from opweave_torch.tunables import limit

_CPU_BLOCKS: Final = limit("random_blocks", 1 << 14, 1, 1 << 20)
_BLOCKS: Final = limit("random_blocks_of_cards", 1 << 20, 1, 1 << 24)
"""Blocks of a tile, by which the workspace is bounded, and on the CPU stays in the caches."""


def _workspace(step: Step) -> Arrays:
    tile = min(block_count(step.out.size, step.out.dtype), max(_BLOCKS.value, _CPU_BLOCKS.value))
    arrays: dict[str, Any] = {"words": (i64, (6, tile)), "keys": (i64, (4,))}
    if step.op == "uniform":
        return arrays | {"parts": (widened(step.out.dtype), (1, tile))}
    return arrays | {"parts": (widened(step.out.dtype), (3, tile)), "swaps": (bool_, (tile,))}


@KERNELS("uniform", "normal", layout="dense", workspace=_workspace)
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
    keys: Arg,
    parts: Arg,
    swaps: Arg | None = None,
) -> Call:
    each, flat, whole = block_values(dtype), tensor(out).view(-1), tensor(words)
    blocks = block_count(flat.numel(), dtype)
    most = _CPU_BLOCKS.value if flat.device.type == "cpu" else _BLOCKS.value
    calls: list[Call] = []
    for first in range(0, blocks, most):
        own = [row[: min(most, blocks - first)] for row in (*whole, *tensor(parts))]
        target = flat[first * each : (first + most) * each]
        calls += _philox(tensor(key), tensor(counter), first, own[:6], tensor(keys))
        if swaps is None:
            calls += _uniform(target, own[:4], own[6], UNIFORM_BITS[dtype.name], each)
        else:
            calls += _normal(target, own[:5], own[6:], tensor(swaps)[: len(own[0])], each)
    return in_order(calls)


def _philox(
    key: torch.Tensor, counter: torch.Tensor, first: int, rows: list[torch.Tensor], keys: torch.Tensor
) -> Iterator[Call]:
    """`opweave.ops.random.philox`. Products wrap around in i64, whose lower 64 bits are those of u64."""
    a, b, c, d, low, high = rows
    n = {number: torch.tensor(number, device=a.device) for number in (32, LOW, *MULTIPLIERS, *KEY_STEPS)}
    yield partial(torch.arange, first, first + len(a), out=a)
    yield partial(torch.bitwise_right_shift, a, n[32], out=b)
    yield partial(a.bitwise_and_, n[LOW])
    for at, source in ((0, key), (2, counter)):
        yield partial(torch.bitwise_and, source, n[LOW], out=keys[at])
        yield partial(torch.bitwise_right_shift, source, n[32], out=keys[at + 1])
        yield partial(keys[at + 1].bitwise_and_, n[LOW])
    yield partial(c.copy_, keys[2])
    yield partial(d.copy_, keys[3])
    for _ in range(ROUNDS):
        yield partial(torch.mul, a, n[MULTIPLIERS[0]], out=low)
        yield partial(torch.mul, c, n[MULTIPLIERS[1]], out=high)
        for into, product, other, word, step in (
            (a, high, b, keys[0], n[KEY_STEPS[0]]),
            (c, low, d, keys[1], n[KEY_STEPS[1]]),
        ):
            yield partial(torch.bitwise_right_shift, product, n[32], out=into)
            yield partial(into.bitwise_xor_, other)
            yield partial(into.bitwise_xor_, word)
            yield partial(into.bitwise_and_, n[LOW])
            yield partial(torch.bitwise_and, product, n[LOW], out=other)
            yield partial(word.add_, step)
            yield partial(word.bitwise_and_, n[LOW])


def _put(values: torch.Tensor, out: torch.Tensor, at: int, each: int) -> Call:
    """``values`` as number ``at`` of each block; the last block may have fewer."""
    target = out[at::each]
    return partial(target.copy_, values[: len(target)])


def _join(high: torch.Tensor, low: torch.Tensor) -> Iterator[Call]:
    """The upper 53 of 64 bits, in place of the upper word."""
    yield partial(high.bitwise_left_shift_, 21)
    yield partial(low.bitwise_right_shift_, 11)
    yield partial(high.bitwise_or_, low)


def _uniform(
    out: torch.Tensor, words: list[torch.Tensor], fraction: torch.Tensor, bits: int, each: int
) -> Iterator[Call]:
    for at in range(each):
        word = words[at * 4 // each]
        if each == 2:
            yield from _join(word, words[2 * at + 1])
        else:
            yield partial(word.bitwise_right_shift_, 32 - bits)
        yield partial(fraction.copy_, word)
        yield partial(fraction.mul_, scalar(2.0**-bits, fraction))
        yield _put(fraction, out, at, each)


def _normal(
    out: torch.Tensor, words: list[torch.Tensor], parts: list[torch.Tensor], swap: torch.Tensor, each: int
) -> Iterator[Call]:
    a, b, c, d, part = words
    if each == 2:
        yield from _join(a, b)
        yield partial(torch.bitwise_and, c, (1 << 29) - 1, out=part)
        yield partial(part.bitwise_left_shift_, 32)
        yield partial(part.bitwise_or_, d)
        pairs = [(a, 53, c, 61)]
    else:
        pairs = [(a, 32, b, 29), (c, 32, d, 29)]
    radius, cos, sin = parts
    for number, (distance, bits, top, digits) in enumerate(pairs):
        if each == 4:
            yield partial(torch.bitwise_and, top, (1 << 29) - 1, out=part)
        yield partial(distance.add_, 1)
        yield partial(radius.copy_, distance)
        yield partial(radius.mul_, scalar(2.0**-bits, radius))
        yield partial(radius.log_)
        yield partial(radius.mul_, scalar(-2.0, radius))
        yield partial(radius.sqrt_)
        yield partial(cos.copy_, part)
        yield partial(cos.mul_, scalar(pi / 4 * 2.0**-digits, cos))
        yield partial(torch.sin, cos, out=sin)
        yield partial(cos.cos_)
        yield partial(cos.mul_, radius)
        yield partial(sin.mul_, radius)
        yield partial(torch.ge, top, 1 << 31, out=swap)
        yield partial(torch.where, swap, sin, cos, out=radius)
        yield partial(torch.where, swap, cos, sin, out=sin)
        for at, value, bit in ((0, radius, 30), (1, sin, 29)):
            yield partial(torch.bitwise_right_shift, top, bit, out=part)
            yield partial(part.bitwise_and_, 1)
            yield partial(cos.copy_, part)
            yield partial(cos.mul_, scalar(-2.0, cos))
            yield partial(cos.add_, scalar(1.0, cos))
            yield partial(value.mul_, cos)
            yield _put(value, out, 2 * number + at, each)
