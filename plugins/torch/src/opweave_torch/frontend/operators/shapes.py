"""Shapes: views, joining, splitting, padding, repeating, triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.operators.table import operator

__all__: list[str] = []


@operator("view", "_unsafe_view")
def _view(call: Call, x: Tensor, shape: Sequence[int]) -> Tensor:
    return ow.reshape(x, tuple(shape))


@operator("permute")
def _permute(call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
    return ow.transpose(x, tuple(dims))


@operator("transpose.int")
def _transpose(call: Call, x: Tensor, a: int, b: int) -> Tensor:
    return ow.swapaxes(x, a, b) if x.ndim else x


@operator("t")
def _t(call: Call, x: Tensor) -> Tensor:
    return ow.transpose(x) if x.ndim > 1 else x


@operator("unsqueeze")
def _unsqueeze(call: Call, x: Tensor, dim: int) -> Tensor:
    return ow.expand_dims(x, dim)


@operator("squeeze", "squeeze.dim", "squeeze.dims")
def _squeeze(call: Call, x: Tensor, dim: Any = None) -> Tensor:
    chosen = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = {d % max(x.ndim, 1) for d in chosen}
    return ow.reshape(x, [n for i, n in enumerate(x.shape) if n != 1 or i not in axes])


@operator("expand")
def _expand(call: Call, x: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    more = len(size) - x.ndim
    shape = [x.shape[i - more] if n == -1 else n for i, n in enumerate(size)]
    return ow.broadcast_to(x, tuple(shape))


@operator("slice.Tensor")
def _slice(
    call: Call, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    cut: list[Any] = [slice(None)] * x.ndim
    cut[dim] = slice(start, end, step)
    return x[tuple(cut)]


@operator("select.int")
def _select(call: Call, x: Tensor, dim: int, index: int) -> Any:
    if isinstance(index, Tensor):
        return call.fallback(x, dim, index)
    cut: list[Any] = [slice(None)] * x.ndim
    cut[dim] = index
    return x[tuple(cut)]


def _parts(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    cut: list[Any] = [slice(None)] * x.ndim
    parts, start = [], 0
    for size in sizes:
        cut[dim] = slice(start, start + size)
        parts.append(x[tuple(cut)])
        start += size
    return tuple(parts)


@operator("split_with_sizes")
def _split_with_sizes(call: Call, x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    return _parts(x, sizes, dim)


@operator("split.Tensor")
def _split(call: Call, x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
    n = x.shape[dim]
    return _parts(x, [min(size, n - start) for start in range(0, n, size)] or [0], dim)


@operator("unbind.int")
def _unbind(call: Call, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple([_select(call, x, dim, i) for i in range(x.shape[dim])])


@operator("cat")
def _cat(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # torch accepts pieces of shape (0,) beside any others, for backward compatibility.
    pieces = [t.astype(call.dtype) for t in tensors if t.shape != (0,)] or [tensors[0]]
    return ow.concat(pieces, dim)


@operator("stack")
def _stack(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim = dim if dim >= 0 else dim + tensors[0].ndim + 1
    return ow.concat([ow.expand_dims(t.astype(call.dtype), dim) for t in tensors], dim)


@operator("flip")
def _flip(call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
    return ow.flip(x, tuple(dims)) if dims else x


@operator("roll")
def _roll(call: Call, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    if isinstance(shifts, int):
        shifts = [shifts]
    dims = [dims] if isinstance(dims, int) else dims
    return ow.roll(x, tuple(shifts), tuple(dims)) if dims else ow.roll(x, shifts[0])


@operator("repeat", "tile")
def _repeat(call: Call, x: Tensor, repeats: Sequence[int]) -> Tensor:
    return ow.tile(x, tuple(repeats))


@operator("repeat_interleave.self_int")
def _repeat_interleave(call: Call, x: Tensor, repeats: int, dim: int | None = None, output_size: Any = None) -> Tensor:
    return ow.repeat(x, repeats, dim)


def _widths(x: Tensor, pads: Sequence[int]) -> list[tuple[int, int]]:
    """The padding of each axis, from torch's, which begins with the last axis."""
    pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]
    return [*[(0, 0)] * (x.ndim - len(pairs)), *pairs[::-1]]


@operator("constant_pad_nd")
def _constant_pad(call: Call, x: Tensor, pads: Sequence[int], value: Any = 0) -> Tensor:
    widths = _widths(x, pads)
    kept = x[tuple([slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, x.shape, strict=True)])]
    return ow.pad(kept, [(max(a, 0), max(b, 0)) for a, b in widths], "constant", value)


@operator("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _reflection_pad(call: Call, x: Tensor, pads: Sequence[int]) -> Any:
    return ow.pad(x, _widths(x, pads), "reflect") if min(pads) >= 0 else call.fallback(x, pads)


@operator("tril")
def _tril(call: Call, x: Tensor, diagonal: int = 0) -> Tensor:
    return ow.tril(x, diagonal)


@operator("triu")
def _triu(call: Call, x: Tensor, diagonal: int = 0) -> Tensor:
    return ow.triu(x, diagonal)


@operator("diagonal")
def _diagonal(call: Call, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return ow.diagonal(x, offset, dim1, dim2)


@operator("pixel_shuffle")
def _pixel_shuffle(call: Call, x: Tensor, factor: int) -> Tensor:
    *batch, channels, h, w = x.shape
    n = len(batch)
    y = ow.reshape(x, (*batch, channels // factor**2, factor, factor, h, w))
    y = ow.transpose(y, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return ow.reshape(y, (*batch, channels // factor**2, h * factor, w * factor))


# --- tensors of the shape of others ---------------------------------------------------------------------------------


def _filled(call: Call, shape: Sequence[int], value: Any) -> Tensor:
    return ow.broadcast_to(ow.constant(value, call.dtype), tuple(shape))


@operator("full_like")
def _full_like(call: Call, x: Tensor, value: Any, **_: Any) -> Tensor:
    return _filled(call, x.shape, value)


@operator("zeros_like", "empty_like")
def _zeros_like(call: Call, x: Tensor, **_: Any) -> Tensor:
    return _filled(call, x.shape, 0)


@operator("ones_like")
def _ones_like(call: Call, x: Tensor, **_: Any) -> Tensor:
    return _filled(call, x.shape, 1)


@operator("new_full")
def _new_full(call: Call, x: Tensor, size: Sequence[int], value: Any, **_: Any) -> Tensor:
    return _filled(call, size, value)


@operator("new_zeros", "new_empty")
def _new_zeros(call: Call, x: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    return _filled(call, size, 0)


@operator("new_ones")
def _new_ones(call: Call, x: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    return _filled(call, size, 1)
