"""What a node has to do at least: bytes that it reads and writes, and its floating-point operations."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from opweave.graph.layout import nbytes

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.tensor import Tensor

__all__ = ["traffic", "window_bytes", "work"]


def window_bytes(window: tuple[DType, Shape, Strides]) -> int:
    """Bytes of an operand; axes with stride 0 count once."""
    dtype, shape, strides = window
    return nbytes(tuple([1 if s == 0 else n for n, s in zip(shape, strides, strict=True)]), dtype)


def traffic(node: Tensor) -> tuple[list[int], int]:
    """Bytes that a node reads of each of its sources, without the state that one writes, and bytes that it writes."""
    signature, op = node.signature, node.op
    assert signature is not None
    assert op is not None
    sizes = [window_bytes(window) for window in signature.srcs[op.writes :]]
    if 0 in node.shape:
        return [0] * len(sizes), 0
    if op.writes:
        return sizes, sum(sizes)
    if op.selects is not None:
        table, ids = op.selects
        rows = signature.srcs[table][1][0]
        # At most as many rows as there are ids are read.
        sizes[table] = sizes[table] // max(rows, 1) * min(rows, prod(signature.srcs[ids][1]))
    return sizes, nbytes(node.shape, node.dtype)


def work(node: Tensor) -> tuple[int, int]:
    """Bytes that a node reads and writes, and its floating-point operations."""
    read, written = traffic(node)
    assert node.op is not None
    return sum(read) + written, 0 if 0 in node.shape else node.op.flops(node)
