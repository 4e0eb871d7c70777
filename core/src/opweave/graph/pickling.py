"""How tensors and graphs pickle."""

from __future__ import annotations

from typing import Any

from opweave.graph.dtypes import DType
from opweave.graph.graph import Graph
from opweave.graph.layout import Shape
from opweave.graph.leaf import Leaf
from opweave.graph.loading import decode, leaf_tensor
from opweave.graph.saving import encode, values
from opweave.graph.tensor import Tensor

__all__ = ["reduce_graph", "reduce_tensor"]


def reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor is rebuilt: a leaf from its values; a computed tensor from the bytes of its graph and its leaves.

    Leaves are objects of their own in the pickle. So a leaf of several tensors is pickled once, and they share it again
    when they are loaded.
    """
    leaf = tensor.leaf
    if leaf is None:
        return _restore_tensor, _structure(Graph(tensor))
    facts = {"fill": leaf.fill, "group": leaf.group, "borrowed": leaf.borrowed}
    label = (tensor.given_name, tensor.site)
    return _restore_leaf, (leaf.kind, leaf.name, values(tensor), facts, tensor.shape, tensor.dtype, label)


def reduce_graph(graph: Graph) -> tuple[Any, ...]:
    """How a graph is rebuilt: from its bytes and its leaves, as in `reduce_tensor`."""
    return _restore_graph, _structure(graph)


def _structure(graph: Graph) -> tuple[bytes, tuple[Tensor, ...]]:
    return encode(graph.outputs, (*graph.leaves, *graph.nodes), lambda leaf: None), graph.leaves


def _restore_leaf(
    kind: Any, key: str, data: Any, facts: dict[str, Any], shape: Shape, dtype: DType, label: tuple[str, str]
) -> Tensor:
    leaf = Leaf(kind, key, data, **facts)
    tensor = leaf_tensor(leaf, shape, dtype)
    if tensor.leaf is leaf:  # else it lived before
        tensor.given_name, tensor.built_at = label
    return tensor


def _restore_tensor(data: bytes, leaves: tuple[Tensor, ...]) -> Tensor:
    return decode(data, {}, leaves)[0]


def _restore_graph(data: bytes, leaves: tuple[Tensor, ...]) -> Graph:
    return Graph(decode(data, {}, leaves))
