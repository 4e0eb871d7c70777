"""Rotary position embedding, and sinusoidal embeddings of time steps."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step
from opweave.ops.rope import rope_frequencies, section_parts
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.kernels.tables import keep, table, turns
from opweave_opencl.layouts import (
    Axes,
    coalesce,
    element_offset,
    element_strides,
    optional_strides,
    padded,
    padded_strides,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

MOST_PARTS: Final = 8
"""Parts of sections for which ``rope.cl`` has parameters. More are refused."""


def _why_not(step: Step) -> str | None:
    parts = section_parts(step.attrs["sections"], step.attrs["interleaved"], step.attrs["dims"] // 2)
    return f"{len(parts)} parts of sections, not at most {MOST_PARTS}" if len(parts) > MOST_PARTS else None


@KERNELS("rope", dtypes="f32 f16 bf16", inplace=True, when=_why_not)
def rope(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    positions: Arg,
    factors: Arg | None = None,
    *,
    pairing: str,
    dims: int,
    sections: tuple[int, ...],
    interleaved: bool,
    **frequencies: Any,
) -> Call:
    angles, magnitude = rope_frequencies(dims, **frequencies)
    frequency = table(stream, turns(angles))
    o_steps, x_steps, p_steps = map(element_strides, (out, x, positions))
    section_step = p_steps[0] if sections else 0
    lengths, lead = coalesce(x.shape[:-1], [o_steps[:-1], x_steps[:-1], p_steps[1 if sections else 0 :]])
    heads, lengths, lead = _heads(lengths, lead) if stream.target.tuning.row_group == 1 else ((1, 0, 0), lengths, lead)
    words = [len(lengths), *padded(lengths, 1)]
    words += padded_strides(lead)
    operands = [out, x, positions, frequency, factors or x]
    words += map(element_offset, operands)
    words += [o_steps[-1], x_steps[-1], section_step, *optional_strides(factors, 1)]
    words += [dims // 2, x.shape[-1], int(pairing == "adjacent")]
    parts = section_parts(sections, interleaved, dims // 2)
    for values in zip(*[(row, part.start, part.stop, part.step or 1) for row, part in parts], strict=True):
        words += padded(values, 1, MOST_PARTS)
    words += [len(parts), *heads]
    macros = {"ROPE": "1", "T": x.dtype.name, "ID": positions.dtype.name}
    macros |= {"FACTORS": str(int(factors is not None)), "F": (factors or x).dtype.name}
    rows = x.size // x.shape[-1] // heads[0]
    size, group = spread((x.shape[-1] - dims // 2, rows, 1), stream.target.tuning.group)
    program = stream.target.programs.get("rope", macros)
    return keep(stream.launch(program, "rope", size, group, operands, words, (magnitude,)), frequency)


def _heads(lengths: Axes, lead: Sequence[Axes]) -> tuple[Axes, Axes, list[Axes]]:
    """The longest axis along which positions stay the same, as its length and the steps of out and x, and the others.

    A work-item of a processor takes the sine and cosine of an angle once for all of them.
    """
    same = [axis for axis, step in enumerate(lead[2]) if step == 0]
    if not same:
        return (1, 0, 0), lengths, list(lead)
    taken = max(same, key=lengths.__getitem__)
    kept = [axis for axis in range(len(lengths)) if axis != taken]
    heads = (lengths[taken], lead[0][taken], lead[1][taken])
    return heads, tuple([lengths[a] for a in kept]), [tuple([own[a] for a in kept]) for own in lead]


@KERNELS("timestep_embedding", dtypes="f32 f16 bf16")
def timestep_embedding(stream: OpenCLStream, op: str, out: Arg, t: Arg, *, dim: int, max_period: float) -> Call:
    half = dim // 2
    frequency = table(stream, turns(np.exp(np.arange(half) * (-log(max_period) / half))))
    words = [half, dim, t.size, *element_strides(out), *element_strides(t)]
    words += [element_offset(out), element_offset(t)]
    macros = {"WAVES": "1", "T": t.dtype.name}
    size, group = spread((dim, t.size, 1), stream.target.tuning.group)
    program = stream.target.programs.get("rope", macros)
    return keep(stream.launch(program, "waves", size, group, (out, t, frequency), words), frequency)
