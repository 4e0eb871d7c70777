"""`OPERATORS`: the builders of ONNX's operators, and the decorator that adds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

__all__ = ["MICROSOFT", "OPERATORS", "Operator", "operator"]

F = TypeVar("F", bound=Callable[..., Any])
MICROSOFT: Final = "com.microsoft"


class Operator(NamedTuple):
    """How nodes of an operator are built.

    Attributes:
        build: called with the `Call` and the inputs; those that the node leaves out are ``None``, and at the end of the
            list they are not passed. Returns the output, or a tuple of the outputs.
        raw: inputs are passed as they are: arrays where they are known, sequences as lists. Otherwise all are passed as
            tensors, and results that depend on known inputs only are computed at once.
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
