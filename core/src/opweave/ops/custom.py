"""Python functions in graphs: as a node, and as a part that gradients compute again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import Shape, check_shape
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node, view_node
from opweave.ops.operands import Array, builds, make, plain

__all__ = ["custom", "recompute"]


def call_custom(fn: Callable[..., Any], arrays: Sequence[Array], shape: Shape, dtype: DType) -> Array:
    """What ``fn`` returns for read-only views of ``arrays``, as an array of ``shape`` that converts to ``dtype``.

    For kernels of backends. A function that writes into its sources would change tensors that others read.

    Raises:
        ShapeError, DTypeError: ``fn`` returned something else than ``like=`` promised.
    """
    views = [a.view() for a in arrays]
    for view in views:
        view.flags.writeable = False
    result = np.asarray(fn(*views))
    if result.shape != shape:
        raise ShapeError(f"custom: {_name(fn)} returned shape {result.shape}, not {shape} as promised by like=")
    if result.dtype.kind in "cOSUMm":
        raise DTypeError(f"custom: {_name(fn)} returned {result.dtype}, which does not become {dtype}")
    return result


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


CUSTOM = OpDef(
    "custom",
    infer=lambda *srcs, fn, shape, dtype: (shape, dtype),
    reference=lambda *arrays, fn, shape, dtype: call_custom(fn, arrays, shape, dtype),
    formula="fn(*srcs)",
)


@builds(CUSTOM)
def custom(fn: Callable[..., Any], *srcs: Any, like: Any) -> Tensor:
    """The value of a Python function of arrays, as a node. It runs on devices whose memory is the host's, such as
    ``host``.

    ``fn`` gets the sources as read-only NumPy arrays (bf16 as ``ml_dtypes.bfloat16``), valid only during the call, and
    returns an array, which is converted to the promised dtype. It has to be a pure function: nodes with equal ``fn``
    and sources are one node.

    Args:
        fn: called as ``fn(*arrays)``.
        srcs: its sources.
        like: shape and dtype of the result: a tensor, or a pair ``(shape, dtype)``.

    Raises:
        DTypeError: ``fn`` is not callable or not hashable, quantized sources or result.
        ShapeError: ``like`` is neither a tensor nor a pair.
        UnknownNameError: no such dtype.
        ExecutionError: when it runs: ``fn`` raised, or returned another shape, or something that is no array of
            numbers.
    """
    if not callable(fn):
        raise DTypeError(f"custom: the function comes first, and {type(fn).__name__} is not callable")
    try:
        hash(fn)
    except TypeError:
        raise DTypeError(f"custom: {_name(fn)} is not hashable; wrap it in a function") from None
    tensors = tuple([make("custom", s) for s in srcs])
    plain("custom", *tensors)
    if isinstance(like, Tensor):
        shape, dtype = like.shape, like.dtype
    elif isinstance(like, tuple) and len(like) == 2:
        dtype = as_dtype(like[1])
        shape = check_shape(like[0], dtype)
    else:
        raise ShapeError(f"custom: like is a tensor or a pair (shape, dtype), not {like!r}")
    if dtype.is_quantized:
        raise DTypeError(f"custom: a node cannot produce {dtype}; like= takes a plain dtype")
    return node(CUSTOM, tensors, {"fn": fn, "shape": shape, "dtype": dtype})


RECOMPUTE = OpDef(
    "recompute",
    infer=lambda x, *args: (x.shape, x.dtype),
    reference=lambda x, *args: x,
    is_view=True,
    formula="x; its gradient computes the nodes between args and x again",
)


@builds(RECOMPUTE)
def recompute(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """What ``function(*args)`` builds, as a part of the graph whose values gradients do not keep: the backward graph
    computes them again, from ``args``, when it gets there. It needs less memory and takes longer; gradients are the
    same. torch's ``utils.checkpoint``: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    Nodes that do not depend on ``args``, and those that write states, are not computed again. A scheduler with
    ``memory_limit=`` chooses such parts by itself.

    Args:
        function: builds one tensor from ``args``; it may use parameters and other tensors besides.
        args: tensors.

    Raises:
        DTypeError: ``function`` is not callable, or returns no tensor.
    """
    if not callable(function):
        raise DTypeError(f"recompute: the function comes first, and {type(function).__name__} is not callable")
    tensors = tuple([make("recompute", a) for a in args])
    out = function(*tensors)
    if not isinstance(out, Tensor):
        raise DTypeError(f"recompute: {_name(function)} returned {type(out).__name__}, not a tensor")
    return view_node(RECOMPUTE, out, {}, out.shape, out.strides, out.offset, tensors)
