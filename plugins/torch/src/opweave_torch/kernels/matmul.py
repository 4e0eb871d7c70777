"""Products of matrices. Weights of quantized blocks are decoded some rows at a time."""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Final

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import reshape_strides
from opweave_torch.kernels.binding import F32, Scratch, in_turn, padded, widened
from opweave_torch.kernels.blocks import Decoding
from opweave_torch.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_torch.memory import tensor

__all__ = ["Tile", "as_source", "as_target", "matrix_bytes", "product", "tile_bytes"]


CPU_TILE: Final = 1 << 18
"""Decoded elements at a time on a CPU, where they stay in the second-level cache."""

TILE: Final = 1 << 21
"""The same on other devices: so many that starting a kernel takes less time than running it."""


# --- matmul ---------------------------------------------------------------------------------------------------------


def product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Call:
    """The call ``out = a @ b + bias``: two axes, or three without a bias. Half types compute in f32."""
    if not out.dtype.is_floating_point and out.device.type != "cpu":
        return partial(_whole_product, out, a, b, bias)
    if bias is not None:
        return partial(torch.addmm, bias, a, b, out=out)
    return partial(torch.mm if out.ndim == 2 else torch.bmm, a, b, out=out)


def _whole_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """A product of integers, for which accelerators have no library: one column by row after the other."""
    out.zero_() if bias is None else out.copy_(bias)
    for k in range(a.shape[-1]):
        out.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])


@KERNELS("matmul", dtypes=NUMBERS)
def matmul(stream: Stream, op: str, out: Arg, a: Arg, b: Arg) -> Call:
    x, y, o = tensor(a), tensor(b), tensor(out)
    if o.ndim == 2:
        return product(o, x, y)
    batch = prod(out.shape[:-2])
    if not any(b.strides[:-2]) and (rows := _merged(a, (batch * a.shape[-2],))) is not None:
        # One matrix for all: one large product instead of many small ones.
        target = _merged(out, (batch * a.shape[-2],))
        if target is not None:
            return product(target, rows, y[(0,) * (y.ndim - 2)])
    merged = [_merged(arg, (batch, arg.shape[-2])) for arg in (out, a, b)]
    if merged[0] is not None and merged[1] is not None and merged[2] is not None:
        return product(merged[0], merged[1], merged[2])
    if o.dtype.is_floating_point or o.device.type == "cpu":
        return partial(torch.matmul, x, y, out=o)
    return partial(_whole_product, o, x, y, None)


def _merged(arg: Arg, lead: tuple[int, ...]) -> torch.Tensor | None:
    """The operand with other axes before its last one, if that needs no copy."""
    shape = (*lead, arg.shape[-1])
    strides = reshape_strides(arg.shape, arg.strides, shape, arg.dtype)
    return None if strides is None else tensor(Arg(arg.buffer, arg.offset, arg.dtype, shape, strides))


# --- linear ---------------------------------------------------------------------------------------------------------


def _as_matrix(arg: Arg, dtype: DType) -> torch.Tensor | None:
    """The operand as one matrix of ``dtype``, if it lies as one."""
    return _merged(arg, (prod(arg.shape[:-1]),)) if arg.dtype is dtype else None


def matrix_bytes(dtype: DType, *args: Arg) -> int:
    """Scratch memory for those operands that do not lie as a matrix of ``dtype``."""
    packed = [arg for arg in args if arg.dtype is not dtype or not _is_matrix(arg)]
    return sum([padded(arg.size * dtype.itemsize) for arg in packed])


def _is_matrix(arg: Arg) -> bool:
    return reshape_strides(arg.shape, arg.strides, (prod(arg.shape[:-1]), arg.shape[-1]), arg.dtype) is not None


def as_source(arg: Arg, dtype: DType, scratch: Scratch) -> tuple[torch.Tensor, list[Call]]:
    """The operand as one matrix of ``dtype``, and what makes it."""
    lies = _as_matrix(arg, dtype)
    if lies is not None:
        return lies, []
    packed = scratch.take(arg.shape, dtype)
    return packed.view(-1, arg.shape[-1]), [partial(packed.copy_, tensor(arg))]


def as_target(arg: Arg, dtype: DType, scratch: Scratch) -> tuple[torch.Tensor, list[Call]]:
    """A matrix of ``dtype`` for the result, and what stores it where it belongs."""
    lies = _as_matrix(arg, dtype)
    if lies is not None:
        return lies, []
    packed = scratch.take(arg.shape, dtype)
    return packed.view(-1, arg.shape[-1]), [partial(tensor(arg).copy_, packed)]


def _linear_workspace(step: Step) -> int:
    return matrix_bytes(step.out.dtype, step.srcs[0], step.out)


@KERNELS("linear", dtypes=NUMBERS, when=lambda step: of_other_type(step, 1, 2), workspace=_linear_workspace)
def linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, workspace: Arg | None) -> Call:
    scratch = Scratch(workspace)
    rows, before = as_source(x, out.dtype, scratch)
    result, after = as_target(out, out.dtype, scratch)
    return in_turn([*before, product(result, rows, tensor(w).t(), None if b is None else tensor(b)), *after])


# --- linear with blocks ---------------------------------------------------------------------------------------------


def tile_rows(w: Arg, tile: int = TILE) -> int:
    """Rows of the weights that are decoded at a time; not so few that the product becomes one of vectors."""
    outputs, inputs = w.shape[-2:]
    count = -(-outputs // max(16, tile // inputs))
    return -(-outputs // count)


class Tile:
    """Some rows of weights, decoded and in the type to compute in.

    Attributes:
        rows: how many.
        values: shape (rows, inputs).
        calls: what decodes the blocks that were loaded.
    """

    def __init__(self, w: Arg, dtype: DType, scratch: Scratch, device: torch.device | None = None) -> None:
        self.rows = tile_rows(w, CPU_TILE if device is not None and device.type == "cpu" else TILE)
        inputs = w.shape[-1]
        decoding = Decoding(w.dtype, self.rows * (inputs // w.dtype.block), scratch, device)
        self.load, self.calls = decoding.load, decoding.calls
        self.values = decoding.values.view(self.rows, inputs)
        if dtype is not F32:
            wide = scratch.take((self.rows, inputs), dtype)
            self.calls = [*self.calls, partial(wide.copy_, self.values)]
            self.values = wide


@lru_cache(maxsize=1024)
def _tile_bytes(blocks: DType, shape: tuple[int, ...], dtype: DType) -> int:
    scratch = Scratch(None)
    Tile(Arg(None, 0, blocks, shape, ()), dtype, scratch)
    return scratch.used


def tile_bytes(w: Arg, dtype: DType) -> int:
    """Scratch memory of a `Tile`."""
    return _tile_bytes(w.dtype, w.shape[-2:], dtype)


def _blocks_workspace(step: Step) -> int:
    x, w = step.srcs[:2]
    dtype = widened(x.dtype)
    bias = [padded(b.size * dtype.itemsize) for b in step.srcs[2:] if b.dtype is not dtype]
    return tile_bytes(w, dtype) + matrix_bytes(dtype, x, step.out) + sum(bias)


def blocks_why_not(step: Step) -> str | None:
    """Why a kernel whose weights are quantized does not take ``step``, or ``None``."""
    return None if step.srcs[1].dtype.is_quantized else "the weights are not quantized"


@KERNELS(
    "linear", dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED], when=blocks_why_not, workspace=_blocks_workspace
)
def linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, workspace: Arg | None
) -> Call:
    scratch, stored, dtype = Scratch(workspace), tensor(w), widened(x.dtype)
    tile = Tile(w, dtype, scratch, stored.device)
    rows, calls = as_source(x, dtype, scratch)
    result, after = as_target(out, dtype, scratch)
    bias = None if b is None else tensor(b)
    if bias is not None and b is not None and b.dtype is not dtype:
        wide = scratch.take(b.shape, dtype)
        calls.append(partial(wide.copy_, bias))
        bias = wide
    for first in range(0, w.shape[0], tile.rows):
        piece = slice(first, min(first + tile.rows, w.shape[0]))
        weights = tile.values[: piece.stop - piece.start].t()
        shift = None if bias is None else bias[piece]
        calls += [*tile.load(stored[piece]), *tile.calls, product(result[:, piece], rows, weights, shift)]
    return in_turn([*calls, *after])
