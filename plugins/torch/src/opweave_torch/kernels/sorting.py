"""Orders and running sums along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import as_dtype
from opweave_torch.kernels.binding import BOOL, F32, I64, Scratch, in_turn, padded, scalar
from opweave_torch.kernels.table import HALVES, KERNELS, PLAIN, WIDE
from opweave_torch.memory import tensor

I32: Final = as_dtype("i32")

# --- cumsum ---------------------------------------------------------------------------------------------------------


@KERNELS("cumsum", dtypes=f"{WIDE} i64")
def cumsum(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    return partial(torch.cumsum, tensor(x), axis, out=tensor(out))


def _wide_workspace(step: Step) -> int:
    return padded(step.out.size * F32.itemsize)


@KERNELS("cumsum", dtypes=HALVES, workspace=_wide_workspace)
def cumsum_of_halves(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, workspace: Arg) -> Call:
    wide = Scratch(workspace).take(out.shape, F32)
    return in_turn([
        partial(wide.copy_, tensor(x)), partial(torch.cumsum, wide, axis, out=wide), partial(tensor(out).copy_, wide)
    ])  # fmt: skip


# --- orders ---------------------------------------------------------------------------------------------------------


def _values_workspace(step: Step) -> int:
    return step.srcs[0].nbytes


@KERNELS("argsort", dtypes=PLAIN, workspace=_values_workspace)
def argsort(
    stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, descending: bool, stable: bool, workspace: Arg
) -> Call:
    values = Scratch(workspace).take(x.shape, x.dtype)
    return partial(torch.sort, tensor(x), stable=stable, dim=axis, descending=descending, out=(values, tensor(out)))


def _order_workspace(step: Step) -> int:
    x = step.srcs[0]
    return padded(x.nbytes) + x.size * I64.itemsize


@KERNELS("top_k", dtypes="f64 i64", workspace=_order_workspace)
def top_k_of_longs(stream: Stream, op: str, out: Arg, x: Arg, *, k: int, axis: int, workspace: Arg) -> Call:
    """The beginning of a whole order: torch's own top-k leaves the order of equals open."""
    scratch = Scratch(workspace)
    order = scratch.take(x.shape, x.dtype), scratch.take(x.shape, I64)
    return in_turn([
        partial(torch.sort, tensor(x), stable=True, dim=axis, descending=True, out=order),
        partial(tensor(out).copy_, order[1].narrow(axis, 0, k)),
    ])  # fmt: skip


_SHORT: Final = "f32 f16 bf16 i32 i16 i8 u8 bool"


def _key_workspace(step: Step) -> int:
    x, size = step.srcs[0], step.srcs[0].size
    floats = 2 * padded(size * F32.itemsize) + padded(size) if x.dtype.is_float else 0
    return floats + padded(size * I64.itemsize) + padded(step.out.size * I64.itemsize)


@KERNELS("top_k", dtypes=_SHORT, workspace=_key_workspace)
def top_k(stream: Stream, op: str, out: Arg, x: Arg, *, k: int, axis: int, workspace: Arg) -> Call:
    """torch's own top-k of keys that are all different: the value in the upper 32 bits, below it the index, counted
    from the end, so that the lower one of equals is the larger key."""
    scratch, source = Scratch(workspace), tensor(x)
    keys, largest = scratch.take(x.shape, I64), scratch.take(out.shape, I64)
    calls: list[Call] = []
    if x.dtype.is_float:
        wide, sign, strange = scratch.take(x.shape, F32), scratch.take(x.shape, I32), scratch.take(x.shape, BOOL)
        calls, source = _ordered_bits(source, wide, sign, strange)
    n = x.shape[axis]
    places = torch.arange(n - 1, -1, -1, device=keys.device).view(_along(axis, n, x.shape))
    calls += [
        partial(keys.copy_, source),
        partial(torch.add, places, keys, alpha=1 << 32, out=keys),
        partial(torch.topk, keys, k, axis, True, True, out=(largest, tensor(out))),
    ]
    return in_turn(calls)


def _along(axis: int, n: int, shape: Sequence[int]) -> list[int]:
    return [n if i == axis else 1 for i in range(len(shape))]


def _ordered_bits(
    source: torch.Tensor, wide: torch.Tensor, sign: torch.Tensor, strange: torch.Tensor
) -> tuple[list[Call], torch.Tensor]:
    """The calls that make integers that lie in the order of floats, and where they are then: the bits, of which those
    of negative numbers count backwards. All zeros become one integer, and all NaN another, above infinity."""
    bits = wide.view(torch.int32)
    return [
        partial(torch.add, source, scalar(0.0, wide), out=wide),  # -0 + 0 = 0
        partial(torch.ne, wide, wide, out=strange),
        partial(wide.masked_fill_, strange, scalar(math.nan, wide)),
        partial(torch.bitwise_right_shift, bits, scalar(31, bits), out=sign),
        partial(sign.bitwise_and_, scalar(0x7FFFFFFF, bits)),
        partial(bits.bitwise_xor_, sign),
    ], bits
