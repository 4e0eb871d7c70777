"""Sums, extremes, statistics, sums along an axis, sorting."""

from __future__ import annotations

from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.operators.table import operator

__all__: list[str] = []


def _axes(dim: Any) -> Any:
    """The axes of opweave: torch takes an empty sequence for all of them."""
    if isinstance(dim, int) or dim is None:
        return dim
    return tuple(dim) or None


@operator("sum", "sum.dim_IntList")
def _sum(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return ow.sum(x.astype(call.dtype), _axes(dim), keepdim)


@operator("mean", "mean.dim")
def _mean(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return ow.mean(x.astype(call.dtype), _axes(dim), keepdim)


@operator("prod", "prod.dim_int")
def _prod(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return ow.prod(x.astype(call.dtype), _axes(dim), keepdim)


@operator("amax")
def _amax(call: Call, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return ow.max(x, _axes(dim), keepdim)


@operator("amin")
def _amin(call: Call, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return ow.min(x, _axes(dim), keepdim)


@operator("max")
def _max(call: Call, x: Tensor) -> Tensor:
    return ow.max(x)


@operator("min")
def _min(call: Call, x: Tensor) -> Tensor:
    return ow.min(x)


@operator("max.dim")
def _max_dim(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return ow.max(x, dim, keepdim), ow.argmax(x, dim, keepdim) if call.wants(1) else None


@operator("min.dim")
def _min_dim(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> Any:
    if call.wants(1) and not x.dtype.is_float:
        return call.fallback(x, dim, keepdim)
    return ow.min(x, dim, keepdim), ow.argmax(-x, dim, keepdim) if call.wants(1) else None


@operator("argmax")
def _argmax(call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return ow.argmax(x, dim, keepdim)


@operator("argmin")
def _argmin(call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return ow.argmax(-x, dim, keepdim) if x.dtype.is_float else call.fallback(x, dim, keepdim)


@operator("any", "any.dim", "any.dims")
def _any(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    found = x if x.dtype.kind == "b" else ow.not_equal(x, ow.constant(0, x.dtype))
    return ow.greater(ow.sum(found, _axes(dim), keepdim), ow.constant(0, "i64"))


@operator("all", "all.dim", "all.dims")
def _all(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    missing = ow.equal(x, ow.constant(0, x.dtype))
    return ow.equal(ow.sum(missing, _axes(dim), keepdim), ow.constant(0, "i64"))


@operator("var.correction", "std.correction", "var_mean.correction")
def _var(call: Call, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    axes, less = _axes(dim), 1.0 if correction is None else float(correction)
    name = str(call.node.target)
    if name.startswith("aten.std"):
        return composite(lambda x: ow.sqrt(ow.var(x, axes, less, keepdim)))(x)
    variance = ow.var(x, axes, less, keepdim)
    return (variance, ow.mean(x, axes, keepdim)) if name.startswith("aten.var_mean") else variance


@operator("linalg_vector_norm")
def _vector_norm(
    call: Call, x: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    x, axes = x.astype(call.dtype), _axes(dim)
    if order == 2:
        return composite(lambda x: ow.sqrt(ow.sum(ow.square(x), axes, keepdim)))(x)
    if order == 1:
        return ow.sum(ow.abs(x), axes, keepdim)
    if order == np.inf:
        return ow.max(ow.abs(x), axes, keepdim)
    return call.fallback(x, order, dim, keepdim)


@operator("logsumexp")
@composite
def _logsumexp(call: Call, x: Tensor, dim: Any, keepdim: bool = False) -> Any:
    axes = _axes(dim)
    most = ow.max(x, axes, True)
    most = ow.where(ow.less(ow.abs(most), ow.constant(np.inf, x.dtype)), most, ow.constant(0, x.dtype))
    total = ow.log(ow.sum(ow.exp(x - most), axes, keepdim))
    return total + (most if keepdim else ow.reshape(most, total.shape))


@operator("cumsum")
def _cumsum(call: Call, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = x.astype(call.dtype)
    return ow.cumsum(x, dim) if x.ndim else x


@operator("topk")
def _topk(call: Call, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if x.ndim == 0 or not (largest or x.dtype.is_float):
        return call.fallback(x, k, dim, largest, sorted)
    values, ids = ow.top_k(x if largest else -x, k, dim)
    return (values if largest else -values), ids


@operator("sort", "sort.stable")
def _sort(call: Call, x: Tensor, *rest: Any, **named: Any) -> Any:
    if x.ndim == 0:
        return call.fallback(x, *rest, **named)
    # (dim, descending), or (stable, dim, descending).
    order = [False, *rest] if str(call.node.target) == "aten.sort.default" else list(rest)
    dim = named.get("dim", order[1] if len(order) > 1 else -1)
    descending = named.get("descending", order[2] if len(order) > 2 else False)
    ids = ow.argsort(x, dim, descending, True)
    return ow.take_along_axis(x, ids, dim), ids.astype("i64")


@operator("argsort", "argsort.stable")
def _argsort(call: Call, x: Tensor, *rest: Any, **named: Any) -> Any:
    plain = str(call.node.target) == "aten.argsort.default"
    order = list(rest)
    dim = named.get("dim", order[0] if plain and order else -1)
    descending = named.get("descending", order[1] if plain and len(order) > 1 else False)
    return ow.argsort(x, dim, descending, True)
