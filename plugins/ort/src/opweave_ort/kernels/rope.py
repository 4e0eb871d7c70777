"""Rotary position embedding, and the sinusoidal embedding of timesteps. Angles are computed in f64."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.graph.dtypes import f32, f64
from opweave.graph.layout import Shape
from opweave.ops.rope import pair_rows, rope_frequencies
from opweave_ort.kernels.table import emits
from opweave_ort.model import MICROSOFT, Model, Operand


@emits("rope")
def rope(
    m: Model,
    op: str,
    out: Operand,
    x: Operand,
    positions: Operand,
    factors: Operand | None = None,
    *,
    pairing: str,
    dims: int,
    sections: tuple[int, ...],
    interleaved: bool,
    **frequencies: Any,
) -> str:
    cos, sin = _cos_and_sin(m, positions, factors, dims, sections, interleaved, frequencies, out)
    value = m.expanded(x)
    lead = (positions.lead[1:] if sections else positions.lead, x.shape[:-1])
    if x.dtype is f32 and len(x.shape) == 4 and lead[0][1:] == (1, x.shape[2]):
        return _by_one_operator(m, value, x.shape, lead[0][0], cos, sin, dims, pairing == "adjacent")
    half, size = dims // 2, x.shape[-1]
    whole, rest = value, []
    if dims < size:
        whole, other = m.several(2, "Split", value, m.integers(dims, size - dims), axis=-1)
        rest = [other]
    if pairing == "half":
        a, b = m.several(2, "Split", whole, m.integers(half, half), axis=-1)
    else:
        pairs = m.reshape(whole, (*x.shape[:-1], half, 2))
        a, b = (m("Gather", pairs, m.constant(np.int64(i)), axis=-1) for i in (0, 1))
    first = m("Sub", m("Mul", a, cos), m("Mul", b, sin))
    second = m("Add", m("Mul", a, sin), m("Mul", b, cos))
    if pairing == "half":
        return m("Concat", first, second, *rest, axis=-1)
    pairs = m("Concat", *[m("Unsqueeze", each, m.integers(-1)) for each in (first, second)], axis=-1)
    turned = m.reshape(pairs, (*x.shape[:-1], dims))
    return m("Concat", turned, *rest, axis=-1) if rest else turned


def _cos_and_sin(
    m: Model,
    positions: Operand,
    factors: Operand | None,
    dims: int,
    sections: tuple[int, ...],
    interleaved: bool,
    frequencies: dict[str, Any],
    out: Operand,
) -> tuple[str, str]:
    """Cosines and sines of the angles, of shape (..., tokens, pairs), not repeated where positions are not."""
    angles, magnitude = rope_frequencies(dims, **frequencies)
    places = m.cast(positions.name, positions.dtype, f64)
    if sections:
        rows = pair_rows(sections, interleaved, dims // 2) if positions.lead[0] > 1 else np.zeros(dims // 2, np.int64)
        places = m("Gather", places, m.constant(rows), axis=0)
        places = m("Transpose", places, perm=[*range(1, len(positions.shape)), 0])
    else:
        places = m("Unsqueeze", places, m.integers(-1))
    each = m.constant(angles)
    if factors is not None:
        each = m("Div", each, m.cast(m.expanded(factors), factors.dtype, f64))
    turn = m("Mul", places, each)
    found = [m("Mul", m(kind, turn), m.constant(magnitude, f64)) for kind in ("Cos", "Sin")]
    cos, sin = [m.cast(each, f64, out.dtype) for each in found]
    return cos, sin


def _by_one_operator(
    m: Model, value: str, shape: Shape, batches: int, cos: str, sin: str, dims: int, interleaved: bool
) -> str:
    """``RotaryEmbedding`` of ONNX Runtime, where all heads have the same positions."""
    batch, heads, tokens, size = shape
    rows = np.arange(batches * tokens).reshape(batches, tokens)
    tables = [m.reshape(table, (-1, dims // 2)) for table in (cos, sin)]
    part = {"rotary_embedding_dim": dims, "num_heads": heads} if dims < size else {}
    ids = m.constant(np.ascontiguousarray(np.broadcast_to(rows, (batch, tokens))))
    return m("RotaryEmbedding", value, ids, *tables, domain=MICROSOFT, interleaved=int(interleaved), **part)


@emits("timestep_embedding")
def timestep_embedding(m: Model, op: str, out: Operand, t: Operand, *, dim: int, max_period: float) -> str:
    half = dim // 2
    times = m("Unsqueeze", m.cast(m.expanded(t), t.dtype, f64), m.integers(-1))
    angles = m("Mul", times, m.constant(max_period ** -(np.arange(half) / half)))
    parts = [m("Cos", angles), m("Sin", angles)]
    if dim % 2:
        parts.append(m.constant(np.zeros((t.shape[0], 1))))
    return m.cast(m("Concat", *parts, axis=-1), f64, out.dtype)
