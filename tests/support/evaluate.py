"""The truth that schedulers are compared with: each tensor evaluated by its reference, in memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from opweave.graph.layout import array_shape
from opweave.graph.tensor import Tensor

Array = np.ndarray[Any, Any]


def window(tensor: Tensor, root: Array) -> Array:
    """A copy of what ``tensor`` shows of its root's values."""
    shape = array_shape(tensor.shape, tensor.dtype)
    strides = (*tensor.strides[:-1], 1) if tensor.dtype.is_quantized else tensor.strides
    if not tensor.size:
        return np.empty(shape, root.dtype)  # wherever its offset leads
    return np.ndarray(shape, root.dtype, np.ascontiguousarray(root), tensor.offset, strides).copy()


def evaluate(tensor: Tensor, leaves: Mapping[Tensor, Array], known: dict[Tensor, Array] | None = None) -> Array:
    """The value of ``tensor``; every version of a state is a value of its own, so no order can go wrong."""
    known = {} if known is None else known
    if tensor in known:
        return known[tensor]
    if tensor.op is None:
        leaf = tensor.leaf
        assert leaf is not None
        given = leaves.get(tensor, leaf.data)
        assert given is not None
        value = given
    elif not tensor.size:
        value = np.empty(tensor.shape, tensor.dtype.numpy)  # never computed by a device either
    elif tensor.is_view:
        value = window(tensor, evaluate(tensor.root, leaves, known))
    elif tensor.op.writes:
        target = tensor.srcs[0]
        value = np.array(evaluate(target.root, leaves, known), order="C", copy=True)
        strides = (*target.strides[:-1], 1) if target.dtype.is_quantized else target.strides
        region = np.ndarray(array_shape(target.shape, target.dtype), value.dtype, value, target.offset, strides)
        tensor.op.reference(region, *[evaluate(s, leaves, known) for s in tensor.srcs[1:]], **tensor.attrs)
    else:
        arrays = [evaluate(s, leaves, known) for s in tensor.srcs]
        with np.errstate(all="ignore"):
            value = np.asarray(tensor.op.reference(*arrays, **tensor.attrs)).astype(tensor.dtype.numpy)
    known[tensor] = value
    return value
