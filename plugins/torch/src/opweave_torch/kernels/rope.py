"""Rotary position embedding and waves. Angles are computed in f64: positions are large, and only their rest counts."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final

import numpy as np
import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DTYPES, DType
from opweave.ops.rope import rope_frequencies
from opweave_torch.kernels.binding import Scratch, in_turn, lies_over, padded, widened
from opweave_torch.kernels.table import FLOATS, KERNELS
from opweave_torch.memory import tensor

F64: Final = DTYPES["f64"]


def _numbers(values: Any, device: torch.device) -> torch.Tensor:
    """Numbers for angles: f64, or f32 on devices without it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.from_numpy(np.asarray(values)).to(device, dtype)


def _wide(scratch: Scratch, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Scratch memory for such numbers."""
    return scratch.take(shape, DTYPES["f32"] if device.type == "mps" else F64)


# --- rotary position embedding --------------------------------------------------------------------------------------


def _lead(positions: Arg, sections: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of positions, those along which they are repeated of length 1."""
    lead = [n if step else 1 for n, step in zip(positions.shape, positions.strides, strict=True)]
    return (len(sections), *lead[1:]) if sections else tuple(lead)


def _workspace(step: Step) -> int:
    x, positions, *_ = step.srcs
    attrs, dtype = step.attrs, widened(x.dtype)
    dims, lead = attrs["dims"], _lead(positions, attrs["sections"])
    count = prod(lead[1:] if attrs["sections"] else lead)
    angles = [count * dims // 2, prod(lead), dims, dims]
    tables = [count * dims, count * dims]
    copies = [x.size, x.size if x.dtype is not dtype else 0]
    return sum([padded(n * F64.itemsize) for n in angles] + [padded(n * dtype.itemsize) for n in tables + copies])


@KERNELS("rope", dtypes=FLOATS, inplace=True, workspace=_workspace)
def rope(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    positions: Arg,
    factors: Arg | None = None,
    *,
    pairing: str,
    dims: int,
    sections: tuple[int, ...],
    workspace: Arg,
    **frequencies: Any,
) -> Call:
    scratch, source, target = Scratch(workspace), tensor(x), tensor(out)
    turns, magnitude = rope_frequencies(dims, **frequencies)
    angles, calls = _bind_angles(positions, sections, _numbers(turns, source.device), factors, scratch)
    turned = source[..., :dims], target[..., :dims]
    rotate = _rotate_adjacent if pairing == "adjacent" else _rotate_halves
    calls += rotate(*turned, angles, magnitude, widened(x.dtype), scratch)
    if x.shape[-1] > dims and not lies_over(target, source):
        calls.append(partial(target[..., dims:].copy_, source[..., dims:]))
    return in_turn(calls)


def _bind_angles(
    positions: Arg, sections: tuple[int, ...], turns: torch.Tensor, factors: Arg | None, scratch: Scratch
) -> tuple[torch.Tensor, list[Call]]:
    """The angle of each pair, (..., pairs), and what computes it."""
    lead, half, device = _lead(positions, sections), len(turns), turns.device
    places = _wide(scratch, lead, device)
    rows = places if sections else places.unsqueeze(0)
    angles = _wide(scratch, (*rows.shape[1:], half), device)
    calls: list[Call] = [partial(places.copy_, tensor(positions)[tuple([slice(n) for n in lead])])]
    if factors is not None:
        wide, divided = _wide(scratch, (half,), device), _wide(scratch, (half,), device)
        calls += [partial(wide.copy_, tensor(factors)), partial(torch.div, turns, wide, out=divided)]
        turns = divided
    edges = pairwise(accumulate(sections or (half,), initial=0))
    for row, (first, last) in zip(rows, edges, strict=True):
        calls.append(partial(torch.mul, row.unsqueeze(-1), turns[first:last], out=angles[..., first:last]))
    return angles, calls


def _rotate_adjacent(
    x: torch.Tensor, out: torch.Tensor, angles: torch.Tensor, magnitude: float, dtype: DType, scratch: Scratch
) -> list[Call]:
    """Pairs as complex numbers, turned by a product."""
    table = scratch.take((*angles.shape, 2), dtype)
    calls: list[Call] = [partial(torch.cos, angles, out=table[..., 0]), partial(torch.sin, angles, out=table[..., 1])]
    if magnitude != 1:
        calls.append(partial(table.mul_, magnitude))
    turn = torch.view_as_complex(table)
    source, target = _as_complex(x), _as_complex(out)
    if source is not None and target is not None:
        return [*calls, partial(torch.mul, source, turn, out=target)]
    packed = scratch.take(x.shape, dtype)
    pairs = torch.view_as_complex(packed.unflatten(-1, (-1, 2)))
    return [*calls, partial(packed.copy_, x), partial(torch.mul, pairs, turn, out=pairs), partial(out.copy_, packed)]


def _as_complex(x: torch.Tensor) -> torch.Tensor | None:
    """Adjacent elements as complex numbers, where they lie as such."""
    even = all(step % 2 == 0 for step in x.stride()[:-1]) and x.storage_offset() % 2 == 0
    if x.itemsize < 4 or x.stride(-1) != 1 or not even:
        return None
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _rotate_halves(
    x: torch.Tensor, out: torch.Tensor, angles: torch.Tensor, magnitude: float, dtype: DType, scratch: Scratch
) -> list[Call]:
    """x · cos + (the other one of each pair) · ±sin."""
    half = angles.shape[-1]
    low, high = slice(None, half), slice(half, None)
    cos, sin = [scratch.take((*angles.shape[:-1], 2 * half), dtype) for _ in range(2)]
    others = scratch.take(x.shape, dtype)
    calls: list[Call] = [partial(torch.cos, angles, out=cos[..., low]), partial(torch.sin, angles, out=sin[..., high])]
    if magnitude != 1:
        calls += [partial(cos[..., low].mul_, magnitude), partial(sin[..., high].mul_, magnitude)]
    calls += [
        partial(cos[..., high].copy_, cos[..., low]),
        partial(torch.neg, sin[..., high], out=sin[..., low]),
        partial(others[..., low].copy_, x[..., high]),
        partial(others[..., high].copy_, x[..., low]),
    ]
    if out.dtype == others.dtype:
        return [*calls, partial(torch.mul, x, cos, out=out), partial(torch.addcmul, out, others, sin, out=out)]
    wide = scratch.take(x.shape, dtype)
    return [
        *calls,
        partial(wide.copy_, x),
        partial(torch.mul, wide, cos, out=wide),
        partial(torch.addcmul, wide, others, sin, out=wide),
        partial(out.copy_, wide),
    ]


# --- waves ----------------------------------------------------------------------------------------------------------


def _wave_workspace(step: Step) -> int:
    count, half = step.out.shape[0], step.attrs["dim"] // 2
    return padded(count * F64.itemsize) + padded(count * half * F64.itemsize)


@KERNELS("timestep_embedding", dtypes=FLOATS, workspace=_wave_workspace)
def timestep_embedding(
    stream: Stream, op: str, out: Arg, t: Arg, *, dim: int, max_period: float, workspace: Arg
) -> Call:
    scratch, target, half = Scratch(workspace), tensor(out), dim // 2
    turns = _numbers(max_period ** -(np.arange(half) / half), target.device)
    times = _wide(scratch, (len(target), 1), target.device)
    angles = _wide(scratch, (len(target), half), target.device)
    calls = [
        partial(times.copy_, tensor(t).unsqueeze(1)),
        partial(torch.mul, times, turns, out=angles),
        partial(torch.cos, angles, out=target[:, :half]),
        partial(torch.sin, angles, out=target[:, half : 2 * half]),
    ]
    if dim % 2:
        calls.append(target[:, 2 * half :].zero_)
    return in_turn(calls)
