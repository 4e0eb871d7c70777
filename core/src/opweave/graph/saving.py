"""Graphs as bytes, and back: what `Graph.to_bytes`, `Graph.from_bytes` and pickling are made of.

The header of the container (`opweave.graph.container`) has a list of tensors, sources first, and the numbers of the
outputs. A node has its operation's name, the numbers of its sources and its attributes; a view its window too. Values
of leaves are buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opweave.errors import ExecutionError
from opweave.graph.attributes import encode_attrs
from opweave.graph.container import pack
from opweave.graph.layout import array_shape
from opweave.graph.leaf import Leaf
from opweave.graph.tensor import Tensor

__all__ = ["encode", "values"]

Array = np.ndarray[Any, Any]


def encode(outputs: Sequence[Tensor], order: Sequence[Tensor], values: Callable[[Tensor], Array | None]) -> bytes:
    """A graph as bytes.

    Args:
        outputs: its outputs.
        order: all tensors that they need, sources first.
        values: returns the values of a leaf, or ``None`` to leave them out.

    Raises:
        SchedulerError: an attribute that cannot be saved (`encode_attrs`).
    """
    numbers = {tensor: i for i, tensor in enumerate(order)}
    sites: dict[str, int] = {}
    groups: dict[int, int] = {}
    buffers: list[Array] = []
    rows = []
    for tensor in order:
        row: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        if tensor.leaf is not None:
            row |= _encode_leaf(tensor.leaf, groups)
            array = values(tensor)
            if array is not None:
                row["data"] = len(buffers)
                buffers.append(np.ascontiguousarray(array))
        else:
            assert tensor.op is not None
            row |= {"op": tensor.op.name, "srcs": [numbers[s] for s in tensor.srcs]}
            row["attrs"] = encode_attrs(tensor.attrs, tensor.describe())
            if tensor.base is not None:
                row["window"] = [list(tensor.strides), tensor.offset]
        if tensor.scope:
            row["scope"] = tensor.scope
        if tensor.given_name:
            row["name"] = tensor.given_name
        row["site"] = sites.setdefault(tensor.site, len(sites))
        rows.append(row)
    header = {
        "tensors": rows,
        "outputs": [numbers[t] for t in outputs],
        "sites": list(sites),
        "buffers": [b.nbytes for b in buffers],
    }
    return pack(header, buffers)


def _encode_leaf(leaf: Leaf, groups: dict[int, int]) -> dict[str, Any]:
    row: dict[str, Any] = {"leaf": leaf.kind, "key": leaf.name}
    if leaf.borrowed:
        row["borrowed"] = True
    if leaf.kind == "state":
        row |= encode_attrs({"fill": leaf.fill}, f"state {leaf.name!r}")
    if leaf.group is not None:
        row["group"] = groups.setdefault(id(leaf.group), len(groups))
    return row


def values(tensor: Tensor) -> Array | None:
    """The present values of a leaf, as its array on the host; ``None`` if it has none, as inputs.

    Raises:
        ExecutionError: a state is half written, or queued work of its device failed.
    """
    leaf = tensor.leaf
    if leaf is None or leaf.kind == "input":
        return None
    if leaf.damaged:
        raise ExecutionError(leaf.damaged, states=(leaf.name,))
    if leaf.kind == "state" and leaf.shards is not None:
        parts = [part for tensor in leaf.shards.parts if (part := values(tensor)) is not None]
        return np.concatenate(parts, leaf.shards.axis)
    if leaf.placement is None or (leaf.data is not None and leaf.kind != "state"):
        return leaf.data
    buffer, offset, _ = leaf.placement
    buffer.device.synchronize()
    shape = array_shape(tensor.shape, tensor.dtype)
    data: np.ndarray[Any, Any] = buffer.read(offset, tensor.nbytes)
    return data.view(tensor.dtype.numpy).reshape(shape)
