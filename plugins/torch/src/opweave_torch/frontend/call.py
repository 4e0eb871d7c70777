"""`Call`: what the builder of a node asks for beside the node's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

import opweave as ow
from opweave.graph.dtypes import DType
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.values import array_of, dtype_of

__all__ = ["Call", "constant_of", "leaves_of"]


class Call:
    """One node while it is built.

    Attributes:
        node: of the graph of ATen.
        known: for a tensor whose values are known when the graph is traced, a weight or a constant, these values.
        used: the tensors whose values somebody asked for.
    """

    __slots__ = ("_known", "node", "used")

    def __init__(self, node: torch.fx.Node, known: Mapping[Tensor, torch.Tensor], used: set[Tensor]) -> None:
        self.node: Final = node
        self._known: Final = known
        self.used: Final = used

    @property
    def dtype(self) -> DType:
        """The dtype of the result, of the first one if there are several."""
        value = self.node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        return dtype_of(first.dtype.to_real(), f"the result of {self.node.target}")

    def known(self, value: Any) -> torch.Tensor | None:
        """The values of a tensor that are known, ``None`` for what devices compute."""
        found = self._known.get(value) if isinstance(value, Tensor) else None
        if found is not None:
            self.used.add(value)
        return found

    def common(self, a: Any, b: Any) -> DType:
        """The dtype to which torch promotes two operands, tensors or numbers."""
        return dtype_of(torch.result_type(_shown(a), _shown(b)), str(self.node.target))

    def wants(self, output: int) -> bool:
        """Whether somebody reads this one of several results."""
        return any(len(user.args) > 1 and user.args[1] == output for user in self.node.users)

    def fallback(self, *args: Any, **kwargs: Any) -> Any:
        """The operator itself, which torch computes on the host: for cases that opweave has no operation for."""
        from opweave_torch.frontend.operators.fallback import run_by_torch

        return run_by_torch(self, args, kwargs)


def _shown(value: Any) -> Any:
    """A stand-in that torch promotes in the same way: numbers and tensors without axes count less."""
    if not isinstance(value, Tensor):
        return value
    from opweave_torch.memory import torch_dtype

    return torch.empty((1,) * min(value.ndim, 1), dtype=torch_dtype(value.dtype), device="meta")


def leaves_of(value: Any, found: Callable[[Any], bool]) -> list[Any]:
    """What is ``found`` in arguments: in nested sequences and mappings."""
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves_of(v, found)]
    if isinstance(value, dict):
        return leaves_of(list(value.values()), found)
    return [value] if found(value) else []


def constant_of(values: torch.Tensor) -> Tensor:
    """A constant of these values; of equal ones a view of one of them."""
    dtype = dtype_of(values.dtype, "a constant")
    if values.ndim and values.numel() and not any(values.stride()):
        return ow.broadcast_to(ow.constant(array_of(values[(0,) * values.ndim]), dtype), tuple(values.shape))
    return ow.constant(array_of(values), dtype)
