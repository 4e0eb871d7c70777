"""Mixtures of experts: each row is multiplied by the weights, and shifted by the bias, of the experts it is sent to."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import SAMPLE_IDS, OpDef, flops_per_element
from opweave.graph.tensor import Tensor, node
from opweave.ops.indexing import check_ids
from opweave.ops.matmul import with_weights
from opweave.ops.movement import expand_dims
from opweave.ops.operands import Array, as_ids, builds, make, misfit, no_bools, promoted, wide, wide_weights
from opweave.ops.samples import measured, operand

__all__ = ["add_expert", "expert_linear"]


# --- expert_linear --------------------------------------------------------------------------------------------------


def _expert_linear_infer(x: Tensor, w: Tensor, ids: Tensor, *, blocks: DType | None = None) -> tuple[Shape, DType]:
    fits = x.ndim == 3 and w.ndim == 3 and ids.ndim == 2
    if not fits or x.shape[0] != ids.shape[0] or x.shape[1] not in (1, ids.shape[1]) or x.shape[2] != w.shape[2]:
        needs = "x (tokens, in) or (tokens, used, in), w (experts, out, in) and ids (tokens, used)"
        raise misfit("expert_linear", needs, x, w, ids)
    return (*ids.shape, w.shape[1]), x.dtype


def _expert_linear(x: Array, w: Array, ids: Array, *, blocks: DType | None = None) -> Array:
    check_ids("expert_linear", ids, w.shape[0])
    x = np.broadcast_to(wide(x), (*ids.shape, x.shape[2]))
    result = np.zeros((*ids.shape, w.shape[1]), x.dtype)
    for expert in np.unique(ids):
        some = ids == expert
        result[some] = np.matmul(x[some], wide_weights(w[expert], blocks).T)
    return result


def _routed(*sizes: tuple[int, int]) -> list[Tensor]:
    return [
        expert_linear(operand(rows, n), operand(SAMPLE_IDS, n, n), operand(rows, 2, dtype="i32")) for rows, n in sizes
    ]


EXPERT_LINEAR = OpDef(
    "expert_linear",
    infer=_expert_linear_infer,
    reference=_expert_linear,
    indices=(2,),
    selects=(1, 2),
    flops=lambda out: 2 * out.size * out.srcs[0].shape[-1],
    formula="y[t, u, o] = Σᵢ x[t, u, i] · w[ids[t, u], o, i]",
    product=True,
    slack=4.0,
    samples=measured(lambda: _routed((4, 16), (4, 64), (4, 256)), lambda: _routed((8, 16), (32, 64), (64, 256))),
)


@builds(EXPERT_LINEAR)
def expert_linear(x: Any, w: Any, ids: Any) -> Tensor:
    """`linear` with weights chosen for each row: rows of tokens multiplied by the experts that they are routed to.

    Args:
        x: shape (tokens, in), each row for all experts of its token; or (tokens, used, in), a row for each.
        w: shape (experts, out, in). A plain one is promoted with ``x``. Beside a quantized one ``x`` keeps its float
            dtype, and integers become f32.
        ids: i32 or i64, shape (tokens, used), each 0 .. experts - 1; the reference raises `BoundsError` for others.

    Nodes have an ``x`` of three axes, the middle one ``used`` or 1. Those with a quantized ``w`` carry its type as the
    attribute ``blocks``; the others have no attributes.

    Returns:
        Shape (tokens, used, out).

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: a quantized ``x``, ids of another dtype, only bool operands.
        LayoutError: ``w`` is the transpose of a quantized tensor.
    """
    x, w, i = make("expert_linear", x), make("expert_linear", w), as_ids("expert_linear", "ids of experts", ids)
    (x, w), attrs = with_weights("expert_linear", x, w)
    return node(EXPERT_LINEAR, (expand_dims(x, 1) if x.ndim == 2 else x, w, i), attrs)


# --- add_expert -----------------------------------------------------------------------------------------------------


def _add_expert_infer(x: Tensor, table: Tensor, ids: Tensor) -> tuple[Shape, DType]:
    if table.ndim != 2 or x.shape != (*ids.shape, table.shape[1]) or x.dtype is not table.dtype:
        raise misfit("add_expert", "x (..., n), a table (experts, n) and ids (...)", x, table, ids)
    return x.shape, x.dtype


def _add_expert(x: Array, table: Array, ids: Array) -> Array:
    check_ids("add_expert", ids, table.shape[0])
    return np.add(wide(x), wide(table[ids]))


ADD_EXPERT = OpDef(
    "add_expert",
    infer=_add_expert_infer,
    reference=_add_expert,
    inplace=(0,),
    indices=(2,),
    selects=(1, 2),
    flops=flops_per_element(1),
    formula="y[t, u, n] = x[t, u, n] + table[ids[t, u], n]",
    runs_like="embedding",
)


@builds(ADD_EXPERT)
def add_expert(x: Any, table: Any, ids: Any) -> Tensor:
    """Add to each row the row of ``table`` at its id: the bias of the expert that computed it.

    Args:
        x: shape (..., n), e.g. (tokens, used, n).
        table: shape (experts, n), promoted with ``x``.
        ids: i32 or i64, shape (...), each 0 .. experts - 1; the reference raises `BoundsError` for others.

    Returns:
        The shape of ``x``.

    Raises:
        ShapeError: shapes that do not fit.
        DTypeError: quantized or two bool operands, ids of another dtype.
    """
    i = as_ids("add_expert", "ids of experts", ids)
    x, t = promoted("add_expert", make("add_expert", x), make("add_expert", table))
    no_bools("add_expert", x, t)
    return node(ADD_EXPERT, (x, t, i), {})
