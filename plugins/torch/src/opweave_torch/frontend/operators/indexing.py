"""Reading and replacing by index."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.call import Call, constant_of
from opweave_torch.frontend.operators.table import operator

__all__ = ["rows_of"]


@operator("embedding")
def _embedding(
    call: Call, table: Tensor, ids: Tensor, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> Tensor:
    return ow.embedding(table, ids)


def rows_of(x: Tensor, dim: int, ids: Tensor) -> Tensor:
    """``x`` with the axis ``dim`` replaced by what ``ids`` of any shape name along it."""
    dim %= x.ndim
    found = ow.embedding(x if dim == 0 else _moved(x, dim, 0), ids)
    if dim == 0:
        return found
    # From (ids, before, after) to (before, ids, after).
    axes = [*range(ids.ndim, ids.ndim + dim), *range(ids.ndim), *range(ids.ndim + dim, found.ndim)]
    return ow.transpose(found, tuple(axes))


def _moved(x: Tensor, source: int, target: int) -> Tensor:
    axes = [i for i in range(x.ndim) if i != source]
    axes.insert(target, source)
    return ow.transpose(x, tuple(axes))


def _counted_from_zero(call: Call, ids: Tensor, n: int) -> Tensor:
    """Ids of which negative ones count from the end, as ids from 0."""
    known = call.known(ids)
    if known is not None:
        return ids if not known.numel() or int(known.min()) >= 0 else constant_of(known.where(known >= 0, known + n))
    return ow.where(ow.less(ids, ow.constant(0, ids.dtype)), ids + n, ids)


@operator("index_select")
def _index_select(call: Call, x: Tensor, dim: int, ids: Tensor) -> Tensor:
    return rows_of(x, dim, ids) if x.ndim else x


@operator("gather")
def _gather(call: Call, x: Tensor, dim: int, ids: Tensor, sparse_grad: bool = False) -> Any:
    if not x.ndim:
        return ow.broadcast_to(x, ids.shape)
    dim %= x.ndim
    cut = [slice(None) if i == dim else slice(n) for i, n in enumerate(ids.shape)]
    return ow.take_along_axis(x[tuple(cut)], ids, dim)


@operator("index.Tensor")
def _index(call: Call, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    places = [i for i, ids in enumerate(indices) if ids is not None]
    given = [ids for ids in indices if ids is not None]
    adjacent = places and places == list(range(places[0], places[0] + len(places)))
    if not adjacent or any(not ids.dtype.is_integer for ids in given):
        return call.fallback(x, list(indices))
    first, last = places[0], places[-1] + 1
    lengths = x.shape[first:last]
    shape = np.broadcast_shapes(*[ids.shape for ids in given])
    flat: Tensor | None = None
    for ids, n in zip(given, lengths, strict=True):
        ids = _counted_from_zero(call, ids, n).astype("i64")
        flat = ids if flat is None else flat * n + ids
    assert flat is not None
    flat = ow.broadcast_to(flat, shape)
    joined = ow.reshape(x, (*x.shape[:first], prod(lengths), *x.shape[last:])) if len(given) > 1 else x
    return rows_of(joined, first, flat)


@operator("slice_scatter")
def _slice_scatter(
    call: Call, x: Tensor, value: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        return call.fallback(x, value, dim, start, end, step)
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if last <= first:
        return x
    offsets = [0] * x.ndim
    offsets[dim] = first
    return ow.set_region(x, value.astype(x.dtype), tuple(offsets))


@operator("select_scatter")
def _select_scatter(call: Call, x: Tensor, value: Tensor, dim: int, index: int) -> Tensor:
    offsets = [0] * x.ndim
    offsets[dim] = index % x.shape[dim]
    return ow.set_region(x, ow.expand_dims(value.astype(x.dtype), dim), tuple(offsets))
