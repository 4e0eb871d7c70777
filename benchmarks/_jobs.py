"""Computations that several benchmarks run beside a peer: chains of additions and MLPs, written once for both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any, Final, NamedTuple

import numpy as np

import opweave as ow

__all__ = ["OPWEAVE", "Array", "Job", "Operations", "chain", "mlp"]

Array = np.ndarray[Any, Any]


class Operations(NamedTuple):
    """The operations of one side."""

    add: Callable[[Any, Any], Any]
    linear: Callable[[Any, Any, Any], Any]
    relu: Callable[[Any], Any]


OPWEAVE: Final = Operations(add, ow.linear, ow.relu)


class Job(NamedTuple):
    """One computation, written for both sides.

    Attributes:
        name: for the report.
        nodes: operations in it.
        x: what is fed.
        arrays: the parameters.
        ours: the graph, from the input and the parameters by name.
        theirs: the same of the peer.
    """

    name: str
    nodes: int
    x: Array
    arrays: Mapping[str, Array]
    ours: Callable[[ow.Tensor, Mapping[str, ow.Tensor]], ow.Tensor]
    theirs: Callable[[Any, Mapping[str, Any]], Any]


def chain(nodes: int, size: int, peer: Operations) -> Job:
    """As many additions of the same ``size`` numbers, one after the other."""

    def build(side: Operations, x: Any, w: Mapping[str, Any]) -> Any:
        for _ in range(nodes):
            x = side.add(x, w["w"])
        return x

    x, arrays = np.linspace(0, 1, size, dtype="f4"), {"w": np.full(size, 1e-3, "f4")}
    return Job(f"chain of {nodes:,}", nodes, x, arrays, partial(build, OPWEAVE), partial(build, peer))


def mlp(batch: int, sizes: tuple[int, ...], peer: Operations) -> Job:
    """Linear layers of these widths with a relu between each two."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        arrays[f"w{i}"] = (rng.standard_normal((m, n)) / np.sqrt(n)).astype("f4")
        arrays[f"b{i}"] = rng.standard_normal(m).astype("f4")
    layers = len(sizes) - 1

    def build(side: Operations, x: Any, w: Mapping[str, Any]) -> Any:
        for i in range(layers):
            x = side.linear(x, w[f"w{i}"], w[f"b{i}"])
            if i < layers - 1:
                x = side.relu(x)
        return x

    x = rng.standard_normal((batch, sizes[0])).astype("f4")
    name = f"MLP {batch} x {'-'.join(map(str, sizes))}"
    return Job(name, 2 * layers - 1, x, arrays, partial(build, OPWEAVE), partial(build, peer))
