"""Values that follow from attributes, shapes and seeds."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.tensor import Tensor
from opweave_onnx.folding import FOLDED
from opweave_onnx.operators.movement import axis_of
from opweave_onnx.operators.table import operator
from opweave_onnx.operators.types import converted
from opweave_onnx.tensors import Array, dtype_of
from opweave_onnx.trace import Call


@operator("Constant", raw=True)
def _constant(call: Call) -> Any:
    for name, value in call.node.attributes.items():
        if name in ("value", "sparse_value"):
            return value
        if name in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if name in ("value_int", "value_ints"):
            return np.array(value, np.int64)
    raise call.refuse("constants of texts are not supported")


@operator("ConstantOfShape", raw=True)
def _constant_of_shape(call: Call, shape: Any) -> Any:
    lengths = call.integers(shape)
    value = call.node.attributes.get("value", np.zeros(1, np.float32)).reshape(())
    if prod(lengths) * value.itemsize <= FOLDED:
        return np.full(lengths, value)
    return ow.full(lengths, value.item(), as_dtype(value.dtype))


@operator("Range", raw=True)
def _range(call: Call, start: Any, limit: Any, delta: Any) -> Any:
    first, last, step = [call.known(v).reshape(()) for v in (start, limit, delta)]
    count = max(ceil((last.item() - first.item()) / step.item()), 0)
    if count * first.itemsize <= FOLDED:
        return np.asarray(first.astype(np.float64) + np.arange(count) * step.astype(np.float64)).astype(first.dtype)
    return ow.arange(first.item(), last.item(), step.item(), dtype=as_dtype(first.dtype))


@operator("EyeLike", raw=True)
def _eye_like(call: Call, x: Any) -> Array:
    dtype = dtype_of(call.get("dtype", 0), "its result").numpy if call.has("dtype") else as_dtype(x.dtype).numpy
    rows, columns = x.shape
    return np.asarray(np.eye(rows, columns, k=call.get("k", 0)).astype(dtype))


@operator("OneHot")
def _one_hot(call: Call, ids: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    n, axis = int(call.known(depth).reshape(())), call.get("axis", -1)
    axis = axis_of(ids, axis, ids.ndim + 1)
    whole = ids if ids.dtype.is_integer else ids.astype("i64")
    whole = ow.where(whole < 0, whole + n, whole)
    places = ow.reshape(ow.arange(n, dtype=whole.dtype), [n if i == axis else 1 for i in range(ids.ndim + 1)])
    return ow.where(ow.equal(ow.expand_dims(whole, axis), places), values[1], values[0])


@operator("RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", raw=True)
def _random(call: Call, like: Any = None) -> Tensor:
    shape = call.get("shape", ()) if like is None else like.shape
    dtype = dtype_of(call.get("dtype", 1)) if call.has("dtype") or like is None else as_dtype(like.dtype)
    if "Uniform" in call.node.op:
        low, high = call.get("low", 0.0), call.get("high", 1.0)
        return ow.scale(ow.uniform(shape, seed_of(call), 0), high - low, low).astype(dtype)
    normal = ow.normal(shape, seed_of(call), 0)
    return ow.scale(normal, call.get("scale", 1.0), call.get("mean", 0.0)).astype(dtype)


def seed_of(call: Call) -> int:
    """The seed of a node's random numbers: from its attribute, else computed from its name."""
    seed = call.node.attributes.get("seed")
    if isinstance(seed, (int, float)):
        return int(abs(seed) * 1000003) & 0x7FFFFFFF
    return sum([ord(c) * (i + 1) for i, c in enumerate(call.node.name)])


@operator("Bernoulli")
def _bernoulli(call: Call, x: Tensor) -> Tensor:
    dtype = dtype_of(call.get("dtype", 1)) if call.has("dtype") else x.dtype
    return converted(ow.uniform(x.shape, seed_of(call), 0) < x.astype("f32"), dtype)


@operator("Dropout")
def _dropout(call: Call, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None) -> Any:
    old = call.before(12)
    share = call.get("ratio", 0.5) if old else 0.5 if ratio is None else float(call.known(ratio).reshape(()))
    if old:
        trains = call.before(7) and not call.get("is_test", 0)
    else:
        trains = training is not None and bool(call.known(training).item())
    mask = x.dtype if call.before(10) else "bool"
    if not trains or share == 0:
        return x, ow.full(x.shape, 1, mask)
    kept = ow.uniform(x.shape, seed_of(call), 0) >= share
    rest = ow.constant(0, x.dtype) if share == 1 else x * (1 / (1 - share))
    return ow.where(kept, rest, ow.constant(0, x.dtype)), kept.astype(mask)
