"""`OPERATORS`: the builders of ONNX's operators, and how a module enters its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

__all__ = ["MICROSOFT", "OPERATORS", "Operator", "operator"]

F = TypeVar("F", bound=Callable[..., Any])
MICROSOFT: Final = "com.microsoft"


class Operator(NamedTuple):
    """How nodes of an operator are built.

    Attributes:
        build: called with the `Call` and the inputs; those that are left out are ``None``, at the end they are missing.
            Returns the output, or a tuple of the outputs.
        raw: inputs are given as they are: arrays where they are known, sequences as lists. Otherwise all are tensors,
            and what only known ones lead to is computed at once.
    """

    build: Callable[..., Any]
    raw: bool = False


OPERATORS: Final[dict[tuple[str, str], Operator]] = {}
"""``(domain, operator)`` -> how it is built; the standard domain is ``""``."""


def operator(*names: str, raw: bool = False, domain: str = "") -> Callable[[F], F]:
    """Decorator: the function builds the named operators."""

    def register(function: F) -> F:
        for name in names:
            OPERATORS[domain, name] = Operator(function, raw)
        return function

    return register
