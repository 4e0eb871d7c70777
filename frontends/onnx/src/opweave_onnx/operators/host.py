"""`host_operation`: operations of ONNX that opweave's core does not have, defined in NumPy. The device ``host`` runs
them; backends may have kernels for them, by name, as for every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import opweave as ow
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import Tensor, node
from opweave_onnx.tensors import Array

__all__ = ["HostOperation", "host_operation"]


class HostOperation:
    """An operation that a NumPy function defines; calling it builds a node.

    Attributes:
        definition: the definition of the operation, ``onnx.NAME``.
    """

    def __init__(self, name: str, function: Callable[..., Array]) -> None:
        def reference(*arrays: Array, shape: tuple[int, ...], dtype: DType, **attrs: Any) -> Array:
            return function(*arrays, **attrs)

        def infer(*sources: Tensor, shape: tuple[int, ...], dtype: DType, **attrs: Any) -> tuple[Any, DType]:
            return shape, dtype

        formula = (function.__doc__ or "").split("\n")[0]
        self.definition = ow.define_op(OpDef(f"onnx.{name}", infer=infer, reference=reference, formula=formula))

    def __call__(self, *sources: Tensor, shape: Any, dtype: Any, **attrs: Any) -> Tensor:
        """A node with a result of this shape and dtype; the attributes are hashable."""
        return node(self.definition, sources, {"shape": tuple(shape), "dtype": as_dtype(dtype), **attrs})


def host_operation(name: str) -> Callable[[Callable[..., Array]], HostOperation]:
    """Decorator: defines the operation ``onnx.NAME`` by a function of arrays and attributes."""
    return lambda function: HostOperation(name, function)
