"""Values out of nothing."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType, as_dtype
from opweave_cpu.kernels.table import KERNELS, NUMBERS, PLAIN
from opweave_cpu.tiles import TILE, Array, constant, copy_call, in_turn, scratch_array

_COUNT: Final = TILE // 8
"""Elements of a tile of f64."""

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


def _workspace(step: Step) -> int:
    attrs = step.attrs
    if _is_exact(step.out.dtype, attrs["start"], attrs["step"], attrs["count"]):
        return 0
    return 16 * min(step.out.size, _COUNT)


@KERNELS("arange", dtypes=NUMBERS, workspace=_workspace)
def arange(
    stream: Stream, op: str, out: Arg, *, start: float, step: float, count: int, dtype: DType, workspace: Arg | None
) -> Call:
    if workspace is None:
        return in_turn(_grow(out.view, start, step))
    f64 = as_dtype("f64")
    room = scratch_array(workspace, 2 * min(count, _COUNT), f64)
    places, work = room[: len(room) // 2], room[len(room) // 2 :]
    calls, target = _grow(places, 0, 1), out.view
    for first in range(0, count, len(places)):
        piece = target[first : first + len(places)]
        some = work[: len(piece)]
        calls.append(partial(np.add, places[: len(piece)], constant(first, f64), some))
        calls.append(partial(np.multiply, some, constant(step, f64), some))
        calls.append(partial(np.add, some, constant(start, f64), piece, casting="unsafe"))
    return in_turn(calls)


def _grow(out: Array, start: float, step: float) -> list[Call]:
    """Calls that count up in ``out``: what is there, of a tile at most, serves again, higher by its length."""
    calls: list[Call] = [partial(out[:1].fill, start)]
    done = 1
    while done < len(out):
        n = min(done, _COUNT, len(out) - done)
        # Integers wrap around: a distance that the type does not hold leads to the same place.
        by = np.array(done * step).astype(out.dtype)
        calls.append(partial(np.add, out[:n], by, out[done : done + n]))
        done += n
    return calls
