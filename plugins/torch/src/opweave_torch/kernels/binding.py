"""What kernels share when they bind: constants, scratch memory, several calls as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from opweave.contract import Arg, Call, Step
from opweave.errors import BoundsError
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import nbytes
from opweave_torch.memory import tensor, torch_dtype

__all__ = [
    "BOOL", "F32", "I64", "Scratch", "converted", "converted_bytes", "in_turn", "lies_over", "naming_ids",
    "padded", "rounded", "scalar", "widened", "widening", "widening_bytes",
]  # fmt: skip

BOOL: Final = as_dtype("bool")
F32: Final = as_dtype("f32")
I64: Final = as_dtype("i64")

_ALIGNMENT: Final = 64


def in_turn(calls: Sequence[Call]) -> Call:
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


def scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """A number beside ``like``, of its dtype. Calls take it in a third of the time of a Python number, which they would
    make a tensor of each time."""
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def rounded(value: float, dtype: DType) -> Any:
    """The number nearest to ``value`` that ``dtype`` holds. torch refuses those that are too large, and rounds to f32
    on the way to half types."""
    with np.errstate(over="ignore"):
        return dtype.numpy.type(value).item()


def widened(dtype: DType) -> DType:
    """The type to compute in: f32 for half types."""
    return F32 if dtype.is_half else dtype


# --- indices --------------------------------------------------------------------------------------------------------


def naming_ids(call: Call, op: str, ids: torch.Tensor, n: int) -> Call:
    """The call, whose error tells which of the ids is outside of ``0 .. n - 1``."""
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


# --- where operands lie ---------------------------------------------------------------------------------------------


def lies_over(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one window of one memory."""
    return (a.data_ptr(), a.device, a.shape, a.stride()) == (b.data_ptr(), b.device, b.shape, b.stride())


# --- scratch memory -------------------------------------------------------------------------------------------------


def padded(size: int) -> int:
    """Bytes rounded up, so that what follows them in scratch memory is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Scratch:
    """Cuts a workspace into tensors, one after the other. Without one it only measures: its tensors have no memory.

    Attributes:
        used: bytes handed out.
    """

    def __init__(self, workspace: Arg | torch.Tensor | None) -> None:
        self._bytes = tensor(workspace) if isinstance(workspace, Arg) else workspace
        self.used = 0

    def take(self, shape: Sequence[int], dtype: DType) -> torch.Tensor:
        """A packed tensor, of ``padded`` bytes of the workspace."""
        shape, kind = tuple(shape), torch_dtype(dtype)
        first, size = self.used, nbytes(shape, dtype)
        self.used += padded(size)
        if self._bytes is None:
            return torch.empty(shape, dtype=kind, device="meta")
        return self._bytes[first : first + size].view(kind).view(shape)


def converted(args: Sequence[Arg], dtype: DType, scratch: Scratch) -> tuple[list[torch.Tensor], list[Call]]:
    """The operands in ``dtype``, and what converts those of another one."""
    operands: list[torch.Tensor] = []
    calls: list[Call] = []
    for arg in args:
        if arg.dtype is dtype:
            operands.append(tensor(arg))
            continue
        copy = scratch.take(arg.shape, dtype)
        operands.append(copy)
        calls.append(partial(copy.copy_, tensor(arg)))
    return operands, calls


def converted_bytes(args: Sequence[Arg], dtype: DType) -> int:
    """The scratch memory of `converted`."""
    return sum([padded(arg.size * dtype.itemsize) for arg in args if arg.dtype is not dtype])


# --- half types in f32 ----------------------------------------------------------------------------------------------

TILE: Final = 1 << 22
"""Elements that are widened at a time, so that scratch memory stays small."""

CPU_TILE: Final = 1 << 18
"""The same on the CPU, where they stay in the caches from one pass to the next."""

Body = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor], Sequence[Call]]
"""``body(x, others, target)``: the calls that compute elements of ``target``, which may be ``x``, from those of ``x``,
which is f32 and may be overwritten, and ``others``, which only operations that promote them to f32 may take."""


def widening_bytes(step: Step) -> int:
    """The workspace of `widening`."""
    dense = all(arg.is_dense for arg in (step.out, *step.srcs))
    elements = min(step.out.size, TILE) if dense else step.out.size
    return len(step.srcs) * padded(elements * F32.itemsize)


def widening(out: Arg, srcs: Sequence[Arg], workspace: Arg, body: Body, *, all_wide: bool = False) -> Call:
    """The call of an elementwise operation on half types that computes in f32 and rounds once.

    On the CPU all sources are widened: where types are mixed, torch would make tensors for that itself. Elsewhere its
    kernels convert what they load and store, and only the first is, or with ``all_wide`` all are.
    """
    target, sources = tensor(out), [tensor(x) for x in srcs]
    cpu = target.device.type == "cpu"
    if all(arg.is_dense for arg in (out, *srcs)):
        tile = CPU_TILE if cpu else TILE
        pieces = [[x.view(-1)[i : i + tile] for x in (target, *sources)] for i in range(0, out.size, tile)]
    else:
        pieces = [[target, *sources]]
    scratch = Scratch(workspace)
    count = len(srcs) if cpu or all_wide else 1
    wide = [scratch.take((pieces[0][0].numel(),), F32) for _ in range(count)]
    calls: list[Call] = []
    for into, *parts in pieces:
        loaded = [w[: into.numel()].view(into.shape) for w in wide]
        calls += [partial(w.copy_, part) for w, part in zip(loaded, parts, strict=False)]
        first, *others = [*loaded, *parts[count:]]
        if cpu:
            calls += [*body(first, others, first), partial(into.copy_, first)]
        else:
            calls += body(first, others, into)
    return in_turn(calls)
