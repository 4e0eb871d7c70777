"""Softmax, log-softmax, layer, root-mean-square, group and Euclidean normalization. Half types compute in f32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.normalization import alibi_slopes
from opweave_torch.kernels.binding import (
    conversion_arrays,
    converted,
    in_order,
    rounded,
    scalar,
    through_f32,
    wide_array,
    widened,
)
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor
from opweave_torch.tunables import limit

__all__ = ["euclidean", "norm_arrays"]

# --- softmax --------------------------------------------------------------------------------------------------------


def _logits(target: Tensor, x: Tensor, mask: Tensor | None, scale: float) -> Call:
    if mask is None:
        return partial(torch.mul, x, scalar(scale, x), out=target)
    return partial(torch.add, mask, x, alpha=scale, out=target)


def _is_plain(step: Step) -> bool:
    return len(step.srcs) == 1 and step.attrs["scale"] == 1


def _logits_arrays(step: Step) -> Arrays:
    """Half types in f32, where something is to be done before torch's own softmax."""
    return {} if _is_plain(step) else conversion_arrays(widened(step.out.dtype), step.srcs)


@KERNELS("softmax", inplace=True, workspace=_logits_arrays)
def softmax(stream: Stream, op: str, out: Arg, *srcs: Arg, scale: float, **arrays: Arg) -> Call:
    target, dtype = tensor(out), widened(out.dtype)
    if len(srcs) == 1 and scale == 1:
        return partial(torch.softmax, tensor(srcs[0]), -1, out=target)
    (x, *masks), calls = converted(dtype, srcs, arrays)
    logits = x if arrays else target
    calls += [
        _logits(logits, x, masks[0] if masks else None, rounded(scale, dtype)),
        partial(torch.softmax, logits, -1, out=logits),
    ]
    return in_order([*calls, partial(target.copy_, logits)] if arrays else calls)


def _sink_array(step: Step) -> Arrays:
    out = step.out
    return {"with_sink": (widened(out.dtype), (*out.shape[:-1], out.shape[-1] + 1))}


@KERNELS("head_softmax", inplace=True, workspace=_sink_array)
def head_softmax(
    stream: Stream, op: str, out: Arg, x: Arg, sinks: Arg, *mask: Arg, scale: float, max_bias: float, with_sink: Arg
) -> Call:
    """The sink is one more key, whose column is left out afterwards."""
    source, keys = tensor(x), tensor(with_sink)
    scale = rounded(scale, with_sink.dtype)
    logits, extra = keys[..., :-1], keys[..., -1]
    calls: list[Call] = [partial(extra.copy_, tensor(sinks)[:, None])]
    if not mask:
        calls += [partial(logits.copy_, source), partial(logits.mul_, scalar(scale, logits))]
    else:
        slopes = torch.tensor(alibi_slopes(sinks.size, max_bias), dtype=keys.dtype, device=keys.device)
        calls += [
            partial(torch.mul, tensor(mask[0]), slopes[:, None, None], out=logits),
            partial(logits.add_, source, alpha=scale),
        ]
    calls += [partial(torch.softmax, keys, -1, out=keys), partial(tensor(out).copy_, logits)]
    return in_order(calls)


@KERNELS("log_softmax", inplace=True, workspace=wide_array)
def log_softmax(stream: Stream, op: str, out: Arg, x: Arg, *, wide: Arg | None = None) -> Call:
    """Half types in f32: torch's own rounds intermediate values on the CPU."""
    return through_f32(partial(torch.log_softmax, dim=-1), out, x, wide)


# --- norms ----------------------------------------------------------------------------------------------------------


LONGEST: Final = limit("norm_part", 1 << 14, 1, 1 << 16)
"""Elements of the longest row whose Euclidean norm torch computes at once: it adds up squares in order. Longer rows are
cut into parts of that length, which takes no more time."""


def norm_arrays(step: Step) -> Arrays:
    """One number for each row, and one for each part of long rows."""
    dtype, (*lead, n) = widened(step.out.dtype), step.out.shape
    parts = -(-n // LONGEST.value)
    arrays: Arrays = {"norms": (dtype, (*lead, 1))}
    return arrays if parts == 1 else {**arrays, "parts": (dtype, (*lead, parts))}


def _factors_array(step: Step) -> Arrays:
    """Numbers for each row, where torch's own function is not called."""
    return {} if step.out.dtype.is_half else norm_arrays(step)


def euclidean(x: Tensor, norms: Tensor, parts: Arg | None) -> list[Call]:
    """The calls that compute the Euclidean norm of each row, with the memory of `norm_arrays`."""

    def norm(of: Tensor, out: Tensor) -> Call:
        return partial(torch.linalg.vector_norm, of, 2, -1, dtype=norms.dtype, out=out)

    if parts is None:
        return [norm(x, norms.squeeze(-1))]
    each, length = tensor(parts), LONGEST.value
    count = each.shape[-1] - 1
    whole, rest = x[..., : count * length], x[..., count * length :]
    return [
        norm(whole.unflatten(-1, (count, length)), each[..., :-1]),
        norm(rest, each[..., -1]),
        norm(each, norms.squeeze(-1)),
    ]


@KERNELS("l2_norm", inplace=True, workspace=norm_arrays)
def l2_norm(stream: Stream, op: str, out: Arg, x: Arg, *, eps: float, norms: Arg, parts: Arg | None = None) -> Call:
    source, lengths = tensor(x), tensor(norms)
    return in_order([
        *euclidean(source, lengths, parts),
        partial(torch.clamp_min, lengths, scalar(eps, lengths), out=lengths),
        partial(torch.div, source, lengths, out=tensor(out)),
    ])  # fmt: skip


@KERNELS("rms_norm", inplace=True, workspace=_factors_array)
def rms_norm(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    weight: Arg | None = None,
    *,
    eps: float,
    norms: Arg | None = None,
    parts: Arg | None = None,
) -> Call:
    """Each row times ``1 / √(|x|² / n + eps)``: on the CPU torch's own makes several tensors of the whole size."""
    source, target, factor = tensor(x), tensor(out), None if weight is None else tensor(weight)
    if norms is None or source.device.type != "cpu":
        return partial(_copy_result, target, partial(torch.rms_norm, source, x.shape[-1:], factor, eps))
    factors = tensor(norms)
    calls: list[Call] = [
        *euclidean(source, factors, parts),
        partial(torch.mul, factors, factors, out=factors),
        partial(torch.add, scalar(eps, factors), factors, alpha=1 / x.shape[-1], out=factors),
        partial(torch.rsqrt, factors, out=factors),
        partial(torch.mul, source, factors, out=target),
    ]
    if factor is not None:
        calls.append(partial(target.mul_, factor))
    return in_order(calls)


# torch's own norms have no out= form.


def _copy_result(out: Tensor, function: Callable[[], Any]) -> None:
    out.copy_(function())


def _of_ones(out: Tensor, x: Tensor, parameters: Sequence[Tensor | None]) -> Call:
    """The norm of single elements, each of which is its own mean: 0, where torch's own gives the rounding error."""
    weight, bias = parameters
    calls: list[Call] = [partial(torch.sub, x, x, out=out)]
    if weight is not None:
        calls.append(partial(out.mul_, weight))
    if bias is not None:
        calls.append(partial(out.add_, bias))
    return in_order(calls)


@KERNELS("layer_norm", inplace=True)
def layer_norm(
    stream: Stream, op: str, out: Arg, x: Arg, weight: Arg | None = None, bias: Arg | None = None, *, eps: float
) -> Call:
    parameters = [None if p is None else tensor(p) for p in (weight, bias)]
    if x.shape[-1] == 1:
        return _of_ones(tensor(out), tensor(x), parameters)
    return partial(_copy_result, tensor(out), partial(torch.layer_norm, tensor(x), x.shape[-1:], *parameters, eps))


@KERNELS("group_norm", inplace=True)
def group_norm(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    weight: Arg | None = None,
    bias: Arg | None = None,
    *,
    groups: int,
    eps: float,
) -> Call:
    parameters = [None if p is None else tensor(p) for p in (weight, bias)]
    if math.prod(x.shape[1:]) == groups:
        each = (-1, *[1] * (len(x.shape) - 2))
        return _of_ones(tensor(out), tensor(x), [None if p is None else p.view(each) for p in parameters])
    return partial(_copy_result, tensor(out), partial(torch.group_norm, tensor(x), groups, *parameters, eps))
