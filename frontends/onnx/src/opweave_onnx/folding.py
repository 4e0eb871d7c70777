"""`fold`: the value of a tensor of constants, computed on the host by the references of the operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from opweave.graph.tensor import Tensor
from opweave_onnx.tensors import Array

__all__ = ["FOLDED", "fold"]

FOLDED: Final = 1 << 20
"""Bytes of results up to which they are computed when a graph is traced; larger ones are left to the devices."""


def fold(tensor: Tensor, leaf: Callable[[Tensor], Array | None], known: dict[Tensor, Array] | None = None) -> Array:
    """The value of a tensor that only leaves lead to whose values ``leaf`` gives."""
    known = {} if known is None else known
    if tensor not in known:
        known[tensor] = _folded(tensor, leaf, known)
    return known[tensor]


def _folded(tensor: Tensor, leaf: Callable[[Tensor], Array | None], known: dict[Tensor, Array]) -> Array:
    if tensor.op is None:
        value = leaf(tensor)
        assert value is not None
        return value
    if not tensor.size:
        return np.empty(tensor.shape, tensor.dtype.numpy)
    if tensor.is_view:
        root = np.ascontiguousarray(fold(tensor.root, leaf, known))
        return np.ndarray(tensor.shape, root.dtype, root, tensor.offset, tensor.strides).copy()
    sources: list[Any] = [fold(source, leaf, known) for source in tensor.srcs]
    with np.errstate(all="ignore"):
        return np.asarray(tensor.op.reference(*sources, **tensor.attrs)).astype(tensor.dtype.numpy, copy=False)
