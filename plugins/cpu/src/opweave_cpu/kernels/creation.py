"""Kernels without operands: filled arrays and ranges."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave_cpu.kernels.table import KERNELS, NUMBERS, PLAIN
from opweave_cpu.tiles import Array, constant, copy_call, in_turn
from opweave_cpu.tunables import limit

_COUNT: Final = limit("creation_tile", 1 << 15, 1, 1 << 20)
"""Elements of f64 that are made at a time: they stay in the second-level cache until they are rounded."""

_WHOLE: Final = {"f64": 1 << 53, "f32": 1 << 24}
"""Up to here a float type holds every whole number."""


@KERNELS("full", dtypes=PLAIN)
def full(stream: Stream, op: str, out: Arg, *, shape: tuple[int, ...], value: float, dtype: DType) -> Call:
    target = out.view
    return copy_call(stream, target, np.broadcast_to(constant(value, out.dtype), target.shape))


def _is_exact(dtype: DType, start: float, step: float, count: int) -> bool:
    """Whether adding up in ``dtype`` makes no rounding error."""
    if dtype.is_integer:
        return True
    most = _WHOLE.get(dtype.name, 0)
    return start % 1 == 0 == step % 1 and abs(start) + count * abs(step) <= most


def _workspace(step: Step) -> Arrays:
    attrs = step.attrs
    if _is_exact(step.out.dtype, attrs["start"], attrs["step"], attrs["count"]):
        return {}
    tile = "f64", (min(step.out.size, _COUNT.value),)
    return {"indices": tile, "products": tile}


@KERNELS("arange", dtypes=NUMBERS, workspace=_workspace)
def arange(
    stream: Stream, op: str, out: Arg, *, start: float, step: float, count: int, dtype: DType, **scratch: Arg
) -> Call:
    if not scratch:
        return in_turn(_grow(out.view, start, step))
    indices, products = scratch["indices"], scratch["products"]
    calls, target, f64 = _grow(indices.view, 0, 1), out.view, indices.dtype
    for first in range(0, count, indices.size):
        tile = target[first : first + indices.size]
        some = products.view[: len(tile)]
        calls.append(partial(np.add, indices.view[: len(tile)], constant(first, f64), some))
        calls.append(partial(np.multiply, some, constant(step, f64), some))
        calls.append(partial(np.add, some, constant(start, f64), tile, casting="unsafe"))
    return in_turn(calls)


def _grow(out: Array, start: float, step: float) -> list[Call]:
    """Calls that fill ``out`` with start, start + step, ...: each adds a distance to the first elements, at most a tile
    of them, and that continues the sequence."""
    calls: list[Call] = [partial(out[:1].fill, start)]
    done = 1
    while done < len(out):
        n = min(done, _COUNT.value, len(out) - done)
        # Integers wrap around: a distance that the type cannot hold gives the same sums as the one it becomes.
        by = np.array(done * step).astype(out.dtype)
        calls.append(partial(np.add, out[:n], by, out[done : done + n]))
        done += n
    return calls
