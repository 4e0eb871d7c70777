"""Operations that exporters write as several nodes, found while the last of them is built."""

from __future__ import annotations

from math import isclose
from typing import Final

import opweave as ow
from opweave.graph.tensor import Tensor

__all__ = ["as_gelu"]

ROOT: Final = 0.5**0.5


def as_gelu(a: Tensor, b: Tensor) -> Tensor | None:
    """``gelu(x)``, if ``a * b`` is ``x · (1 + erf(x / √2)) / 2`` in any order of the factors; else ``None``."""
    factors, number = _factors(a)
    more, other = _factors(b)
    factors, number = factors + more, number * other
    if len(factors) != 2 or not isclose(number, 0.5, rel_tol=1e-3):
        return None
    for x, rest in (factors, factors[::-1]):
        inner = _erf_plus_one(rest)
        if inner is None:
            continue
        inside, scale = _factors(inner)
        if inside == [x] and isclose(scale, ROOT, rel_tol=1e-3):
            return ow.gelu(x)
    return None


def _factors(x: Tensor) -> tuple[list[Tensor], float]:
    """The tensors and the number whose product ``x`` is."""
    number = _number(x)
    if number is not None:
        return [], number
    op = x.op.name if x.op is not None else ""
    if op == "mul":
        (a, m), (b, n) = _factors(x.srcs[0]), _factors(x.srcs[1])
        return a + b, m * n
    if op == "scale" and not x.attrs["bias"]:
        inside, m = _factors(x.srcs[0])
        return inside, m * x.attrs["scale"]
    if op == "div":
        divisor = _number(x.srcs[1])
        if divisor:
            inside, m = _factors(x.srcs[0])
            return inside, m / divisor
    return [x], 1.0


def _erf_plus_one(x: Tensor) -> Tensor | None:
    """``u`` of ``1 + erf(u)``."""
    if x.op is None:
        return None
    erf: Tensor | None = None
    if x.op.name == "add":
        a, b = x.srcs
        erf = a if _number(b) == 1.0 else b if _number(a) == 1.0 else None
    elif x.op.name == "scale" and x.attrs["scale"] == x.attrs["bias"] == 1.0:
        erf = x.srcs[0]
    return erf.srcs[0] if erf is not None and erf.op is not None and erf.op.name == "erf" else None


def _number(x: Tensor) -> float | None:
    """The value of a constant of one element, or of one that is broadcast."""
    leaf = x.root.leaf
    if leaf is None or leaf.kind != "constant" or x.root.size != 1 or leaf.data is None:
        return None
    return float(leaf.data.reshape(()))
