"""Cases of long and thin operands: rows that kernels cut into parts for threads, vectors and partial sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.ops.row_gradients import layer_norm_backward, rms_norm_backward
from opweave_conformance.case import FLOATS, Case, Layout, Operand, case
from opweave_conformance.cases.sorting import where

__all__ = ["LONG_CASES"]

ROWS: Final = tuple((1 << power) + beside for power in (15, 16, 17, 20) for beside in (0, 1, -1))
"""Lengths of one row."""

THIN: Final[tuple[Shape, ...]] = (
    (65537, 2), (131071, 1), (3, 10007), (1, 32771, 1), (2, 1, 65537), (251, 509), (1, 1, 131073), (2, 1, 32767, 1),
)  # fmt: skip
"""Many rows of 2, one long column, primes, axes of length 1 in between."""

OPERATIONS: Final[tuple[tuple[str, Callable[..., Tensor] | None, dict[str, Any]], ...]] = (
    ("softmax", None, {}), ("log_softmax", None, {}), ("rms_norm", None, {}), ("layer_norm", None, {}),
    ("l2_norm", None, {}), ("cumsum", None, {"axis": -1}), ("sum", None, {"axis": -1}), ("mean", None, {"axis": -1}),
    ("max", None, {"axis": -1}), ("argmax", None, {"axis": -1}), ("argsort", None, {"axis": -1}),
    ("top_k", where, {"k": 1, "axis": -1}), ("sum", None, {"axis": 0}), ("max", None, {"axis": 0}),
    ("cumsum", None, {"axis": 0}), ("argmax", None, {"axis": 0}), ("exp", None, {}), ("gelu", None, {}),
    ("contiguous", None, {}), ("rms_norm_backward", rms_norm_backward, {"eps": 1e-5}),
    ("layer_norm_backward", layer_norm_backward, {"eps": 1e-5}),
)  # fmt: skip
"""Operation, builder, options."""


def _cases() -> Iterator[Case]:
    """For each operation one row of each power of two, 1-d or 2-d, and three thin shapes, in f32; with one of each in
    another type. Which ones moves on with the operations, so that most pairs of a kind of operation and a shape
    occur."""
    for i, (op, build, options) in enumerate(OPERATIONS):
        rows = [ROWS[3 * j + (i + j) % 3] for j in range(4)]
        shapes: list[Shape] = [(n,) if (i + j) % 2 else (1, n) for j, n in enumerate(rows)]
        shapes += [THIN[(3 * i + j) % len(THIN)] for j in range(3)]
        other = FLOATS[1 + i % 3]
        kinds = [*((shape, "f32") for shape in shapes), (shapes[0], other), (shapes[-1], other)]
        tag = f"axis{options['axis']}" if "axis" in options else ""
        layout: Layout = "sliced" if op == "contiguous" else "contiguous"
        for shape, dtype in kinds:
            count = 2 if op.endswith("_backward") else 1
            found = case(op, *[Operand(shape, dtype, layout)] * count, build=build, tag=tag, **options)
            yield found._replace(id=f"long-{found.id}")


LONG_CASES: Final = tuple(_cases())
"""Every case; not among `CASES`, which have small operands and are run in many ways."""
