"""What a node has to do at least: bytes that it reads and writes, and its floating-point operations."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from opweave.graph.layout import nbytes

if TYPE_CHECKING:
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.tensor import Tensor

__all__ = ["window_bytes", "work"]


def window_bytes(window: tuple[DType, Shape, Strides]) -> int:
    """Bytes of an operand; axes with stride 0 count once."""
    dtype, shape, strides = window
    return nbytes(tuple([1 if s == 0 else n for n, s in zip(shape, strides, strict=True)]), dtype)


def work(node: Tensor) -> tuple[int, int]:
    """Bytes that a node reads and writes, and its floating-point operations."""
    signature, op = node.signature, node.op
    assert signature is not None
    assert op is not None
    if 0 in node.shape:
        return 0, 0
    sizes = [window_bytes(window) for window in signature.srcs]
    if op.writes:
        return 2 * sum(sizes[1:]), op.flops(node)
    if op.selects is not None:
        table, ids = op.selects
        rows = signature.srcs[table][1][0]
        # At most as many rows as there are ids are read.
        sizes[table] = sizes[table] // max(rows, 1) * min(rows, prod(signature.srcs[ids][1]))
    return sum(sizes) + nbytes(node.shape, node.dtype), op.flops(node)
