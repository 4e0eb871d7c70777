"""`OPERATORS`: the builders of ATen's operators, and how a module enters its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from opweave_torch.frontend.native import overload

__all__ = ["OPERATORS", "operator"]

F = TypeVar("F", bound=Callable[..., Any])

OPERATORS: Final[dict[Any, Callable[..., Any]]] = {}
"""An overload of an operator, as ``aten.add.Tensor`` -> what builds its nodes. It is called with the `Call`
and the arguments of the overload, its tensors as tensors of opweave, and returns a tensor, or a tuple of them for
several results; ``None`` stands for a result that it does not build."""


def operator(*names: str) -> Callable[[F], F]:
    """Decorator: the function builds the named overloads of ATen."""

    def register(function: F) -> F:
        for name in names:
            found = overload(name)
            if found is not None:
                OPERATORS[found] = function
        return function

    return register
