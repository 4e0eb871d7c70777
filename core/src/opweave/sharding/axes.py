"""`axes_of`: along which axis each weight of a graph is cut, so that few values have to be exchanged."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opweave.graph.graph import Graph
    from opweave.graph.tensor import Tensor

__all__ = ["axes_of"]

LEAST: Final = 1 << 12
"""Weights of products with fewer bytes stay whole; biases are cut where their weights are."""

KEEPS: Final = frozenset(
    ("attention", "broadcast_to", "concat", "reshape", "rope", "slice", "transpose")
)  # fmt: skip
"""Operations beside elementwise ones whose result stays split where their sources are."""


def axes_of(graph: Graph, weights: Collection[Tensor], states: Collection[Tensor] = ()) -> dict[Tensor, int]:
    """The axis of each weight and state that is to be cut; the others stay whole.

    As in Shoeybi et al., "Megatron-LM" (2019): a product of whole values is cut along its output features, one of
    values that are split along the features that are summed over, so that the two products of an MLP, and the four of
    an attention block, exchange values once. States of three axes to which rows of split values are copied are taken
    for key-value caches, which are cut by heads.
    """
    found: dict[Tensor, int] = {}
    split: set[Tensor] = set()  # values whose features are computed in parts
    for node in graph.nodes:
        op = node.op
        assert op is not None
        where = _weight_of(node)
        if where is not None and node.srcs[where[0]] in weights and node.srcs[where[0]].nbytes >= LEAST:
            at, x, outs, ins = where
            weight = node.srcs[at]
            axis = found.setdefault(weight, ins if x is not None and node.srcs[x] in split else outs)
            if axis == outs and x is not None:
                split.add(node)
                if op.name == "linear" and len(node.srcs) == 3 and node.srcs[2] in weights:
                    found.setdefault(node.srcs[2], 0)  # the bias, as its weight
        elif op.name == "index_copy" and node.srcs[0] in states and node.srcs[0].ndim == 3 and node.srcs[2] in split:
            found[node.srcs[0]] = 1
            split.add(node)
        elif (op.pointwise or op.name in KEEPS) and any(source in split for source in node.srcs):
            split.add(node)
    return found


def _weight_of(node: Tensor) -> tuple[int, int | None, int, int] | None:
    """The position of the source that may be a weight, that of the source which is multiplied with it (``None``: there
    is none), and the weight's axes of output and of input features; ``None`` for other operations."""
    assert node.op is not None
    name = node.op.name
    if name == "linear":
        return 1, 0, 0, 1
    if name == "matmul" and node.srcs[1].ndim == 2:
        return 1, 0, 1, 0
    if name == "expert_linear":
        return 1, 0, 1, 2
    if name == "embedding":
        return 0, None, 0, 0
    return None
