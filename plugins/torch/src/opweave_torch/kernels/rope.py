"""Rotary position embedding and timestep embedding. Angles are computed in f64: they are large, and cosine and sine
depend on their remainder of 2π alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import f32, f64
from opweave.graph.layout import dense_strides
from opweave.ops.rope import distinct_positions, rope_frequencies, section_parts
from opweave_torch.kernels.binding import in_order, same_elements, widened
from opweave_torch.kernels.table import FLOATS, KERNELS
from opweave_torch.memory import tensor


def _frequencies(values: Any, device: torch.device) -> Tensor:
    """The angle of each pair for one step of the position: f64, or f32 on devices without f64."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.from_numpy(np.asarray(values)).to(device, dtype)


def _angle_tensor(array: Arg, device: torch.device) -> Tensor:
    """An f64 array of the workspace; on devices without f64 as many elements of f32."""
    if device.type == "mps":
        array = Arg(array.buffer, array.offset, f32, array.shape, dense_strides(array.shape, f32))
    return tensor(array)


# --- rotary position embedding --------------------------------------------------------------------------------------


def _rope_arrays(step: Step) -> Arrays:
    """Positions, angles and, if there are factors, frequencies in f64; cosines and sines of all angles, and copies of
    the operand, in the type to compute in."""
    x, positions, *factors = step.srcs
    dims, sections, dtype = step.attrs["dims"], step.attrs["sections"], widened(x.dtype)
    distinct = distinct_positions(positions.shape, positions.strides, sections)
    rows = distinct[1:] if sections else distinct
    arrays = {"wide_positions": (f64, distinct), "angles": (f64, (*rows, dims // 2))}
    if factors:
        arrays["divided"] = f64, (dims // 2,)
    if step.attrs["pairing"] == "adjacent":
        return arrays | {"table": (dtype, (*rows, dims // 2, 2)), "copies": (dtype, (1, *x.shape[:-1], dims))}
    count = 1 if x.dtype is dtype else 2
    return arrays | {"table": (dtype, (2, *rows, dims)), "copies": (dtype, (count, *x.shape[:-1], dims))}


@KERNELS("rope", dtypes=FLOATS, inplace=True, workspace=_rope_arrays)
def rope(stream: Stream, op: str, out: Arg, x: Arg, positions: Arg, factors: Arg | None = None, **given: Any) -> Call:
    pairing, dims, sections, turns = [given.pop(n) for n in ("pairing", "dims", "sections", "interleaved")]
    wide_positions, angles, table, copies = [given.pop(n) for n in ("wide_positions", "angles", "table", "copies")]
    divided = given.pop("divided", None)
    source, target = tensor(x), tensor(out)
    angle, numbers = [_angle_tensor(array, source.device) for array in (angles, wide_positions)]
    values, magnitude = rope_frequencies(dims, **given)
    frequencies = _frequencies(values, source.device)
    calls: list[Call] = [partial(numbers.copy_, tensor(positions)[tuple([slice(n) for n in numbers.shape])])]
    if factors is not None and divided is not None:
        quotients = _angle_tensor(divided, source.device)
        calls += [partial(quotients.copy_, tensor(factors)), partial(torch.div, frequencies, quotients, out=quotients)]
        frequencies = quotients
    for row, part in section_parts(sections, turns, dims // 2):
        places = numbers[row] if sections else numbers
        calls.append(partial(torch.mul, places.unsqueeze(-1), frequencies[part], out=angle[..., part]))
    rotate = _rotate_adjacent if pairing == "adjacent" else _rotate_halves
    calls += rotate(source[..., :dims], target[..., :dims], angle, magnitude, tensor(table), tensor(copies))
    if x.shape[-1] > dims and not same_elements(target, source):
        calls.append(partial(target[..., dims:].copy_, source[..., dims:]))
    return in_order(calls)


def _rotate_adjacent(
    x: Tensor, out: Tensor, angles: Tensor, magnitude: float, table: Tensor, copies: Tensor
) -> list[Call]:
    """Pairs as complex numbers, multiplied by cos φ + i sin φ."""
    calls: list[Call] = [partial(torch.cos, angles, out=table[..., 0]), partial(torch.sin, angles, out=table[..., 1])]
    if magnitude != 1:
        calls.append(partial(table.mul_, magnitude))
    rotation = torch.view_as_complex(table)
    source, target = _as_complex(x), _as_complex(out)
    if source is not None and target is not None:
        return [*calls, partial(torch.mul, source, rotation, out=target)]
    dense = copies[0]
    pairs = torch.view_as_complex(dense.unflatten(-1, (-1, 2)))
    return [*calls, partial(dense.copy_, x), partial(torch.mul, pairs, rotation, out=pairs), partial(out.copy_, dense)]


def _as_complex(x: Tensor) -> Tensor | None:
    """Adjacent elements as a view of complex numbers, where strides and offset allow it."""
    even = all(step % 2 == 0 for step in x.stride()[:-1]) and x.storage_offset() % 2 == 0
    if x.itemsize < 4 or x.stride(-1) != 1 or not even:
        return None
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _rotate_halves(
    x: Tensor, out: Tensor, angles: Tensor, magnitude: float, table: Tensor, copies: Tensor
) -> list[Call]:
    """x · cos + (the other element of each pair) · ±sin."""
    half = angles.shape[-1]
    low, high = slice(None, half), slice(half, None)
    (cos, sin), others = table, copies[0]
    calls: list[Call] = [partial(torch.cos, angles, out=cos[..., low]), partial(torch.sin, angles, out=sin[..., high])]
    if magnitude != 1:
        calls += [partial(cos[..., low].mul_, magnitude), partial(sin[..., high].mul_, magnitude)]
    calls += [
        partial(cos[..., high].copy_, cos[..., low]),
        partial(torch.neg, sin[..., high], out=sin[..., low]),
        partial(others[..., low].copy_, x[..., high]),
        partial(others[..., high].copy_, x[..., low]),
    ]
    wide = copies[1] if len(copies) > 1 else None
    source, target = (x, out) if wide is None else (wide, wide)
    calls += [] if wide is None else [partial(wide.copy_, x)]
    calls += [partial(torch.mul, source, cos, out=target), partial(torch.addcmul, target, others, sin, out=target)]
    return calls if wide is None else [*calls, partial(out.copy_, wide)]


# --- cosines and sines of timesteps ---------------------------------------------------------------------------------


def _timestep_arrays(step: Step) -> Arrays:
    count, half = step.out.shape[0], step.attrs["dim"] // 2
    return {"wide_steps": (f64, (count, 1)), "angles": (f64, (count, half))}


@KERNELS("timestep_embedding", dtypes=FLOATS, workspace=_timestep_arrays)
def timestep_embedding(
    stream: Stream, op: str, out: Arg, t: Arg, *, dim: int, max_period: float, wide_steps: Arg, angles: Arg
) -> Call:
    target, half = tensor(out), dim // 2
    frequencies = _frequencies(max_period ** -(np.arange(half) / half), target.device)
    steps, angle = [_angle_tensor(array, target.device) for array in (wide_steps, angles)]
    calls = [
        partial(steps.copy_, tensor(t).unsqueeze(1)),
        partial(torch.mul, steps, frequencies, out=angle),
        partial(torch.cos, angle, out=target[:, :half]),
        partial(torch.sin, angle, out=target[:, half : 2 * half]),
    ]
    if dim % 2:
        calls.append(target[:, 2 * half :].zero_)
    return in_order(calls)
