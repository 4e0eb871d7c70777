"""Operands of the nodes with which profiles measure operations, and samples of operations on matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from opweave.graph import opdef
from opweave.graph.dtypes import as_dtype
from opweave.graph.leaf import Leaf
from opweave.graph.opdef import Sample
from opweave.graph.tensor import Tensor, input, new_leaf

__all__ = ["ROWS", "measured", "operand", "over_rows", "weight"]

ROWS: Final = ((8, 64), (128, 512), (1024, 1024))
"""Shapes of the matrices that operations over rows are measured with."""

Samples = Callable[[], Sequence[Sample]]
"""The type of `OpDef.samples`: a function, so that the nodes are only made when somebody measures."""


def operand(*shape: int, dtype: str = "f32") -> Tensor:
    """An input of this shape; of equal ones the same one."""
    return input("measured " + "x".join(map(str, shape)) + dtype, shape, dtype)


def weight(*shape: int, dtype: str = "f32") -> Tensor:
    """A weight of this shape without values."""
    return new_leaf(Leaf("weight", "measured"), shape, as_dtype(dtype))


def measured(build: Callable[[], list[Tensor]], products: Callable[[], list[Tensor]] | None = None) -> Samples:
    """Samples in f32 only."""
    return lambda: [Sample("f32", build, products)]


def over_rows(
    op: str, *args: Any, operands: int = 1, scaled: bool = False, dtypes: Sequence[str] = ("f32",)
) -> Samples:
    """Samples of an operation over matrices.

    Args:
        args: what its builder takes behind the operands.
        operands: how many matrices it takes.
        scaled: a row of scales is the second operand.
        dtypes: the types in which it is measured.
    """

    def build(dtype: str) -> list[Tensor]:
        made = []
        for shape in ROWS:
            srcs = [operand(*shape, dtype=dtype)] * operands
            scales = [operand(shape[1], dtype=dtype)] if scaled else []
            made.append(opdef.build(op, *srcs, *scales, *args))
        return made

    return lambda: [Sample(dtype, lambda dtype=dtype: build(dtype)) for dtype in dtypes]  # type: ignore[misc]
