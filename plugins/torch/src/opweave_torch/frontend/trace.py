"""`Trace`: walks over the nodes of a graph of ATen, for arguments of certain shapes, and builds opweave's.

While a graph is traced, a node stands for a tensor of torch, if its values are known; for a `Tensor`; for a number, as
a length; or for several of these. What depends on known values only is computed at once, by torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

import opweave as ow
from opweave.errors import OpweaveError, ShapeError, UnsupportedOpError
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.call import Call, constant_of, leaves_of
from opweave_torch.frontend.folding import is_pure, on_host
from opweave_torch.frontend.native import is_operator, name_of
from opweave_torch.frontend.operators import OPERATORS, of_complex
from opweave_torch.frontend.operators.fallback import run_by_torch
from opweave_torch.frontend.source import CHECKS, SHAPES, Source, module_path, place_of
from opweave_torch.frontend.updates import Updates
from opweave_torch.frontend.values import Complex, as_real, dtype_of

__all__ = ["Trace"]


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of opweave, or complex numbers made of two."""
    return isinstance(value, (Tensor, Complex))


def is_complex(value: Any) -> bool:
    """Whether a value is complex numbers."""
    return isinstance(value, Complex) or (isinstance(value, torch.Tensor) and value.is_complex())


class Trace:
    """Builds the graph.

    Args:
        source: what is traced.
        leaves: what nodes stand for that are the same in each trace: weights, states, what was folded.
        known: the values of the weights among the leaves.
        norms: batch norms that convolutions compute -> these convolutions.
        args: node -> the arguments that it gets instead of its own.
        fed: what the arguments stand for.
        updates: how states are written.

    Attributes:
        values: what each node stands for.
        used: the weights and constants whose values the graph depends on.
    """

    def __init__(
        self,
        source: Source,
        leaves: Mapping[torch.fx.Node, Any],
        known: Mapping[Tensor, torch.Tensor],
        norms: Mapping[torch.fx.Node, torch.fx.Node],
        args: Mapping[torch.fx.Node, Any],
        fed: Sequence[Any],
        updates: Updates,
    ) -> None:
        self.source: Final = source
        self.updates: Final = updates
        self.used: Final[set[Tensor]] = set()
        self.values: Final[dict[torch.fx.Node, Any]] = {**leaves, **dict(zip(source.fed, fed, strict=True))}
        self._known: Final = dict(known)
        self._constants: Final[dict[int, tuple[torch.Tensor, Tensor]]] = {}
        self._args: Final = args
        for node in source.graph.nodes:
            if node in norms:
                self.values[node] = self.values[norms[node]], None, None
            elif node.op == "call_function" and node not in self.values:
                self.values[node] = self._checked(node)

    def tensor(self, value: Any) -> Tensor:
        """A value as a tensor."""
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value)
        made = self._constants.get(id(value))
        if made is None:
            made = self._constants[id(value)] = value, constant_of(value)
            self._known[made[1]] = value
        return made[1]

    def operand(self, value: Any) -> Any:
        """A value as an operand: tensors of torch as tensors of opweave."""
        if not isinstance(value, torch.Tensor):
            return value
        return Complex.of(self.tensor(as_real(value))) if value.is_complex() else self.tensor(value)

    def of(self, node: Any) -> Any:
        """What a node, or a plain value, stands for."""
        return self.values[node] if isinstance(node, torch.fx.Node) else node

    def _checked(self, node: torch.fx.Node) -> Any:
        path = module_path(node)
        try:
            with ow.scope(f"{path}/{node.name}" if path else node.name):
                return self._built(node)
        except UnsupportedOpError as error:
            raise UnsupportedOpError(f"{node.target} ({place_of(node)}): {error}", error.reasons) from error
        except OpweaveError as error:
            raise type(error)(f"{node.target} ({place_of(node)}): {error}") from error
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError, AssertionError) as error:
            raise UnsupportedOpError(
                f"{node.target} ({place_of(node)}) is not possible for these shapes and types: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _built(self, node: torch.fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = torch.fx.map_arg((self._args.get(node, node.args), node.kwargs), self.of)
        computed = leaves_of((args, kwargs), is_tensor)
        if not is_operator(target):
            if computed and target is not operator.getitem:
                raise UnsupportedOpError("Python computes with the values of tensors")
            return target(*args, **kwargs)
        name = name_of(target)
        if name in CHECKS:
            self._check(name, args, computed)
            return None
        if str(target).removeprefix("aten.") in SHAPES:
            return self._length(name, *args)
        if not computed and is_pure(target):
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), on_host)
            with torch.no_grad():
                return target(*args, **kwargs)
        written = self.updates.written(node, args, self.tensor)
        if written is not None:
            return written
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self.operand)
        call = Call(node, self._known, self.used)
        if leaves_of((args, kwargs, node.meta.get("val")), is_complex):
            return self._typed(of_complex(target)(call, *args, **kwargs), node.meta.get("val"))
        build = OPERATORS.get(target)
        result = build(call, *args, **kwargs) if build else run_by_torch(call, args, kwargs)
        return self._typed(result, node.meta.get("val"))

    def _check(self, name: str, args: Any, computed: Sequence[Tensor]) -> None:
        """A check that the module makes of a length."""
        if name == "_assert_scalar" and not computed and not args[0]:
            raise ShapeError(f"the module requires: {args[1]}")

    def _length(self, name: str, x: Any, dim: int = 0) -> Any:
        match name:
            case "sym_size":
                return x.shape[dim]
            case "sym_numel":
                return x.size if isinstance(x, Tensor) else x.numel()
        raise UnsupportedOpError("strides are not those of torch")

    def _typed(self, result: Any, promised: Any) -> Any:
        """Results of the types that torch gives them."""
        if isinstance(result, (tuple, list)):
            shown = promised if isinstance(promised, (tuple, list)) else [None] * len(result)
            return type(result)(
                [self._typed(r, p) for r, p in zip(result, [*shown, *[None] * len(result)], strict=False)]
            )
        if not isinstance(result, Tensor) or not isinstance(promised, torch.Tensor):
            return result
        return result.astype(dtype_of(promised.dtype, "a result"))
