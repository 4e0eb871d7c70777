"""`fold`: the value of a tensor of constants, computed on the host by the references of the operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from opweave.graph.tensor import Tensor
from opweave_onnx.tensors import Array

__all__ = ["FOLDED", "fold"]

FOLDED: Final = 1 << 20
"""Results of up to so many bytes are computed while a graph is traced; larger ones are computed by the devices."""


def fold(tensor: Tensor, leaf: Callable[[Tensor], Array | None], known: dict[Tensor, Array] | None = None) -> Array:
    """The value of a tensor that depends on constants and weights only, by the references of the operations.

    Args:
        leaf: returns the values of a leaf.
        known: values of tensors that were computed before; those computed here are added.
    """
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
