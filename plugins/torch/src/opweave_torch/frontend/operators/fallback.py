"""Operators that opweave has no operation for: torch computes them on the host, as a custom node.

So every functional operator runs whose results have shapes that follow from those of its arguments, also those of other
libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import opweave as ow
from opweave.errors import UnsupportedOpError
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.native import is_operator, schema_of, without_values
from opweave_torch.frontend.values import Array, array_of, dtype_of, tensor_of
from opweave_torch.memory import torch_dtype

__all__ = ["random_by_torch", "run_by_torch", "runs_by_torch"]


def runs_by_torch(target: Any) -> bool:
    """Whether an operator changes none of its arguments and returns tensors only."""
    if not is_operator(target) or schema_of(target).is_mutable:
        return False
    kinds = [str(value.type) for value in schema_of(target).returns]
    return bool(kinds) and all(kind in ("Tensor", "List[Tensor]") for kind in kinds)


@dataclass(frozen=True)
class _Place:
    """Where the argument of this number goes."""

    number: int


@dataclass(frozen=True)
class _ByTorch:
    """Calls an operator on arrays and returns one of its results.

    Attributes:
        target: the operator.
        args: positional arguments and pairs of names and others, hashable.
        output: which of several results; ``None`` if there is one.
        node: tells nodes apart that make random numbers.
    """

    target: Any
    args: Any
    output: int | None
    node: str

    def __call__(self, *arrays: Array) -> Array:
        with torch.inference_mode(False), torch.no_grad():
            result = _applied(self.target, self.args, [tensor_of(a) for a in arrays])
        return array_of(result if self.output is None else result[self.output])

    @property
    def __name__(self) -> str:
        return str(self.target)


def _applied(target: Any, args: Any, tensors: Sequence[torch.Tensor]) -> Any:
    positional, named = _thawed(args, tensors)
    return target(*positional, **named)


def _frozen(value: Any, tensors: list[Tensor]) -> Any:
    """Hashable arguments, in which tensors are places; the tensors are appended."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple([_frozen(v, tensors) for v in value])
    if isinstance(value, Mapping):
        return "dict", tuple([(k, _frozen(v, tensors)) for k, v in value.items()])
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _thawed(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    match value:
        case _Place(number):
            return tensors[number]
        case ("dict", tuple(pairs)):
            return {k: _thawed(v, tensors) for k, v in pairs}
        case (("list" | "tuple" | "immutable_list") as kind, tuple(values)):
            found = [_thawed(v, tensors) for v in values]
            return tuple(found) if kind == "tuple" else found
    return value


def run_by_torch(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operator that torch computes on the host; ``None`` for those that nobody reads."""
    target: Any = call.node.target
    tensors: list[Tensor] = []
    frozen = _frozen((tuple(args), dict(kwargs)), tensors)
    with without_values():
        shown = _applied(target, frozen, [torch.empty(t.shape, dtype=torch_dtype(t.dtype)) for t in tensors])
    name = call.node.name if torch.Tag.nondeterministic_seeded in target.tags else ""

    def built(value: torch.Tensor, output: int | None) -> Tensor:
        like = tuple(value.shape), dtype_of(value.dtype, f"a result of {target}")
        return ow.custom(_ByTorch(target, frozen, output, name), *tensors, like=like)

    if isinstance(shown, torch.Tensor):
        return built(shown, None)
    if name and sum([call.wants(i) for i in range(len(shown))]) > 1:
        raise UnsupportedOpError("several results that depend on the same random numbers")
    return tuple([built(v, i) if call.wants(i) else None for i, v in enumerate(shown)])


def random_by_torch(call: Call, target: Any, like: Tensor, *args: Any) -> Tensor:
    """Random numbers of the shape and dtype of ``like``, other ones in each run, from the generator of torch."""
    frozen = _frozen(((like, *args), {}), [])
    return ow.custom(_ByTorch(target, frozen, None, call.node.name), like, like=like)
