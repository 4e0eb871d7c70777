"""Orders and running sums along an axis."""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import bool_, f32, i32, i64
from opweave_torch.kernels.binding import in_order, scalar, through_f32, wide_array
from opweave_torch.kernels.table import FLOATS, KERNELS, PLAIN
from opweave_torch.memory import tensor

# --- cumsum ---------------------------------------------------------------------------------------------------------


@KERNELS("cumsum", dtypes=f"{FLOATS} i64", workspace=wide_array)
def cumsum(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, wide: Arg | None = None) -> Call:
    return through_f32(partial(torch.cumsum, dim=axis), out, x, wide)


# --- orders ---------------------------------------------------------------------------------------------------------


def _values_array(step: Step) -> Arrays:
    return {"values": (step.srcs[0].dtype, step.out.shape)}


@KERNELS("argsort", dtypes=PLAIN, workspace=_values_array)
def argsort(
    stream: Stream, op: str, out: Arg, x: Arg, *, axis: int, descending: bool, stable: bool, values: Arg
) -> Call:
    sort = partial(torch.sort, stable=stable, dim=axis, descending=descending)
    return partial(sort, tensor(x), out=(tensor(values), tensor(out)))


def _sorted_arrays(step: Step) -> Arrays:
    x = step.srcs[0]
    return {"values": (x.dtype, x.shape), "order": (i64, x.shape)}


@KERNELS("top_k", dtypes="f64 i64", workspace=_sorted_arrays)
def top_k_of_longs(stream: Stream, op: str, out: Arg, x: Arg, *, k: int, axis: int, values: Arg, order: Arg) -> Call:
    """The first ``k`` of a stable sort: torch's own top-k leaves the order of equal elements open."""
    results = tensor(values), tensor(order)
    return in_order([
        partial(torch.sort, tensor(x), stable=True, dim=axis, descending=True, out=results),
        partial(tensor(out).copy_, results[1].narrow(axis, 0, k)),
    ])  # fmt: skip


_SHORT: Final = "f32 f16 bf16 i32 i16 i8 u8 bool"


def _key_arrays(step: Step) -> Arrays:
    x = step.srcs[0]
    arrays = {"keys": (i64, x.shape), "largest": (i64, step.out.shape)}
    if x.dtype.is_float:
        arrays |= {"wide": (f32, x.shape), "sign": (i32, x.shape), "is_nan": (bool_, x.shape)}
    return arrays


@KERNELS("top_k", dtypes=_SHORT, workspace=_key_arrays)
def top_k(
    stream: Stream, op: str, out: Arg, x: Arg, *, k: int, axis: int, keys: Arg, largest: Arg, **floats: Arg
) -> Call:
    """torch's own top-k of keys that are all different: the value in the upper 32 bits, below it the index, counted
    from the end, so that of two equal values that of the lower index has the larger key."""
    source, key = tensor(x), tensor(keys)
    calls: list[Call] = []
    if floats:
        calls, source = _ordered_bits(source, **{name: tensor(array) for name, array in floats.items()})
    n = x.shape[axis]
    shape = [n if i == axis else 1 for i in range(len(x.shape))]
    from_end = torch.arange(n - 1, -1, -1, device=key.device).view(shape)
    calls += [
        partial(key.copy_, source),
        partial(torch.add, from_end, key, alpha=1 << 32, out=key),
        partial(torch.topk, key, k, axis, True, True, out=(tensor(largest), tensor(out))),
    ]
    return in_order(calls)


def _ordered_bits(source: Tensor, wide: Tensor, sign: Tensor, is_nan: Tensor) -> tuple[list[Call], Tensor]:
    """The calls that turn floats into i32 of the same order, and the tensor that then holds these: the bits of the
    floats, inverted below the sign for negative ones. All zeros become one integer, and all NaN one above infinity."""
    bits = wide.view(torch.int32)
    return [
        partial(torch.add, source, scalar(0.0, wide), out=wide),  # -0 + 0 = 0
        partial(torch.ne, wide, wide, out=is_nan),
        partial(wide.masked_fill_, is_nan, scalar(math.nan, wide)),
        partial(torch.bitwise_right_shift, bits, scalar(31, bits), out=sign),
        partial(sign.bitwise_and_, scalar(0x7FFFFFFF, bits)),
        partial(bits.bitwise_xor_, sign),
    ], bits
