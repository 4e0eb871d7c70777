"""What kernels share when they bind: constants, several calls as one, operands converted to the type to compute in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave.errors import BoundsError
from opweave.graph.dtypes import DType, f32
from opweave_torch.memory import tensor
from opweave_torch.tunables import limit

__all__ = [
    "conversion_arrays", "converted", "in_order", "raising_bounds_error", "rounded", "same_elements", "scalar",
    "through_f32", "wide_array", "widened", "widening", "widening_arrays",
]  # fmt: skip


def in_order(calls: Sequence[Call]) -> Call:
    """One call that makes all of them, in order."""
    if len(calls) == 1:
        return calls[0]
    if len(calls) == 2:
        first, second = calls

        def both() -> None:
            first()
            second()

        return both

    def run() -> None:
        for call in calls:
            call()

    return run


def scalar(value: float, like: Tensor) -> Tensor:
    """A number as a tensor of the dtype and device of ``like``. Passing it to a function of torch takes a third of the
    time of a Python number, from which torch makes a tensor at each call."""
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def rounded(value: float, dtype: DType) -> Any:
    """The number nearest to ``value`` that ``dtype`` holds. torch refuses those that are too large, and rounds to f32
    on the way to half types."""
    with np.errstate(over="ignore"):
        return dtype.numpy.type(value).item()


def widened(dtype: DType) -> DType:
    """The type to compute in: f32 for half types, else the type itself."""
    return f32 if dtype.is_half else dtype


def same_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same elements of the same memory in the same order."""
    return (a.data_ptr(), a.device, a.shape, a.stride()) == (b.data_ptr(), b.device, b.shape, b.stride())


# --- indices --------------------------------------------------------------------------------------------------------


def raising_bounds_error(call: Call, op: str, ids: Tensor, n: int) -> Call:
    """``call``, which on the CPU raises `BoundsError` with the first index outside of ``0 .. n - 1`` where torch raises
    an error that does not name it. On other devices indices are not known to the host."""
    if ids.device.type != "cpu":
        return call

    def run() -> None:
        try:
            call()
        except (IndexError, RuntimeError):
            wrong = torch.nonzero((ids < 0) | (ids >= n)).tolist()
            if not wrong:
                raise
            value = int(ids[tuple(wrong[0])])
            raise BoundsError(f"{op}: index {value} at {wrong[0]} is outside of 0 .. {n - 1}") from None

    return run


# --- conversion of whole operands -----------------------------------------------------------------------------------


def conversion_arrays(dtype: DType, args: Sequence[Arg]) -> Arrays:
    """Workspace of `converted`: a copy of each operand of another type than ``dtype``, named by its number."""
    return {f"converted{i}": (dtype, arg.shape) for i, arg in enumerate(args) if arg.dtype is not dtype}


def converted(dtype: DType, args: Sequence[Arg], arrays: Mapping[str, Arg]) -> tuple[list[Tensor], list[Call]]:
    """The operands in ``dtype``, and the calls that convert those of another type into their array."""
    operands: list[Tensor] = []
    calls: list[Call] = []
    for i, arg in enumerate(args):
        operands.append(tensor(arg if arg.dtype is dtype else arrays[f"converted{i}"]))
        if arg.dtype is not dtype:
            calls.append(partial(operands[-1].copy_, tensor(arg)))
    return operands, calls


def wide_array(step: Step) -> Arrays:
    """Workspace of `through_f32`: the result in f32, for half types."""
    return {"wide": (f32, step.out.shape)} if step.out.dtype.is_half else {}


def through_f32(function: Callable[..., Any], out: Arg, x: Arg, wide: Arg | None) -> Call:
    """The call ``function(x, out=out)``, for operands of one shape; for half types on a copy in f32, rounded once."""
    if wide is None:
        return partial(function, tensor(x), out=tensor(out))
    values = tensor(wide)
    calls = [
        partial(values.copy_, tensor(x)),
        partial(function, values, out=values),
        partial(tensor(out).copy_, values),
    ]
    return in_order(calls)


# --- elementwise operations on half types, computed in f32 ----------------------------------------------------------

TILE: Final = limit("tile_of_cards", 1 << 22, 1, 1 << 26)
"""Elements that are widened at a time, which bounds the workspace."""

CPU_TILE: Final = limit("tile", 1 << 18, 1, 1 << 22)
"""The same on the CPU, where they stay in the caches from one pass to the next."""

Body = Callable[[Tensor, Sequence[Tensor], Tensor], Sequence[Call]]
"""``body(x, others, target)``: the calls that compute elements of ``target``, which may be ``x``, from those of ``x``,
which is f32 and may be overwritten, and ``others``, which only operations that promote them to f32 may take."""


def widening_arrays(step: Step) -> Arrays:
    """Workspace of `widening`: ``wide``, one row of f32 for each source."""
    dense = all(arg.is_dense for arg in (step.out, *step.srcs))
    tile = max(TILE.value, CPU_TILE.value) if dense else step.out.size
    return {"wide": (f32, (len(step.srcs), min(step.out.size, tile)))}


def widening(out: Arg, srcs: Sequence[Arg], wide: Arg, body: Body, *, all_wide: bool = False) -> Call:
    """The call of an elementwise operation on half types that computes in f32 and rounds once.

    On the CPU all sources are widened: where types are mixed, torch would make tensors for that itself. Elsewhere its
    kernels convert what they load and store, and only the first is widened, or with ``all_wide`` all are.
    """
    target, sources = tensor(out), [tensor(x) for x in srcs]
    on_cpu = target.device.type == "cpu"
    tiles = [[target, *sources]]
    if all(arg.is_dense for arg in (out, *srcs)):
        size = CPU_TILE.value if on_cpu else TILE.value
        tiles = [[x.view(-1)[i : i + size] for x in (target, *sources)] for i in range(0, out.size, size)]
    rows = tensor(wide)[: len(srcs) if on_cpu or all_wide else 1]
    calls: list[Call] = []
    for into, *parts in tiles:
        loaded = [row[: into.numel()].view(into.shape) for row in rows]
        calls += [partial(row.copy_, part) for row, part in zip(loaded, parts, strict=False)]
        first, *others = [*loaded, *parts[len(loaded) :]]
        if on_cpu:
            calls += [*body(first, others, first), partial(into.copy_, first)]
        else:
            calls += body(first, others, into)
    return in_order(calls)
