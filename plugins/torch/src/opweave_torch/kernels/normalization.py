"""Softmax, log-softmax, layer, root-mean-square, group and Euclidean normalization. Half types compute in f32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import f32
from opweave.ops.normalization import alibi_slopes
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, rounded, scalar, widened
from opweave_torch.kernels.table import HALVES, KERNELS, WIDE
from opweave_torch.memory import tensor

# --- softmax --------------------------------------------------------------------------------------------------------


def _logits(target: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> Call:
    if mask is None:
        return partial(torch.mul, x, scalar(scale, x), out=target)
    return partial(torch.add, mask, x, alpha=scale, out=target)


@KERNELS("softmax", dtypes=WIDE, inplace=True)
def softmax(stream: Stream, op: str, out: Arg, x: Arg, mask: Arg | None = None, *, scale: float) -> Call:
    target, source, scale = tensor(out), tensor(x), rounded(scale, out.dtype)
    if mask is None and scale == 1:
        return partial(torch.softmax, source, -1, out=target)
    return in_order([
        _logits(target, source, None if mask is None else tensor(mask), scale),
        partial(torch.softmax, target, -1, out=target),
    ])  # fmt: skip


def _logits_arrays(step: Step) -> Arrays:
    """The operands in f32, where something is to be done before torch's own softmax."""
    plain = len(step.srcs) == 1 and step.attrs["scale"] == 1
    return {} if plain else conversion_arrays(f32, step.srcs)


@KERNELS("softmax", dtypes=HALVES, inplace=True, workspace=_logits_arrays)
def softmax_of_halves(stream: Stream, op: str, out: Arg, *srcs: Arg, scale: float, **arrays: Arg) -> Call:
    target = tensor(out)
    if not arrays:
        return partial(torch.softmax, tensor(srcs[0]), -1, out=target)
    (logits, *masks), calls = converted(f32, srcs, arrays)
    return in_order([
        *calls,
        _logits(logits, logits, masks[0] if masks else None, rounded(scale, f32)),
        partial(torch.softmax, logits, -1, out=logits),
        partial(target.copy_, logits),
    ])  # fmt: skip


def _sink_array(step: Step) -> Arrays:
    out = step.out
    return {"with_sink": (widened(out.dtype), (*out.shape[:-1], out.shape[-1] + 1))}


@KERNELS("head_softmax", inplace=True, workspace=_sink_array)
def head_softmax(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    sinks: Arg,
    mask: Arg | None = None,
    *,
    scale: float,
    max_bias: float,
    with_sink: Arg,
) -> Call:
    """The sink is one more key, whose column is left out afterwards."""
    source, keys = tensor(x), tensor(with_sink)
    scale = rounded(scale, with_sink.dtype)
    logits, extra = keys[..., :-1], keys[..., -1]
    calls: list[Call] = [partial(extra.copy_, tensor(sinks)[:, None])]
    if mask is None:
        calls += [partial(logits.copy_, source), partial(logits.mul_, scalar(scale, logits))]
    else:
        slopes = torch.tensor(alibi_slopes(sinks.size, max_bias), dtype=keys.dtype, device=keys.device)
        calls += [
            partial(torch.mul, tensor(mask), slopes[:, None, None], out=logits),
            partial(logits.add_, source, alpha=scale),
        ]
    calls += [partial(torch.softmax, keys, -1, out=keys), partial(tensor(out).copy_, logits)]
    return in_order(calls)


@KERNELS("log_softmax", dtypes=WIDE, inplace=True)
def log_softmax(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(torch.log_softmax, tensor(x), -1, out=tensor(out))


@KERNELS("log_softmax", dtypes=HALVES, inplace=True, workspace=lambda step: {"wide": (f32, step.out.shape)})
def log_softmax_of_halves(stream: Stream, op: str, out: Arg, x: Arg, *, wide: Arg) -> Call:
    """In f32: torch's own rounds intermediate values on the CPU."""
    values = tensor(wide)
    return in_order([
        partial(values.copy_, tensor(x)),
        partial(torch.log_softmax, values, -1, out=values),
        partial(tensor(out).copy_, values),
    ])  # fmt: skip


# --- norms ----------------------------------------------------------------------------------------------------------


def _norms_array(step: Step) -> Arrays:
    """One number for each row."""
    return {"norms": (widened(step.out.dtype), (*step.out.shape[:-1], 1))}


def _euclidean(x: torch.Tensor, norms: torch.Tensor) -> Call:
    """The call that computes the Euclidean norm of each row."""
    return partial(torch.linalg.vector_norm, x, 2, -1, True, dtype=norms.dtype, out=norms)


@KERNELS("l2_norm", inplace=True, workspace=_norms_array)
def l2_norm(stream: Stream, op: str, out: Arg, x: Arg, *, eps: float, norms: Arg) -> Call:
    source, lengths = tensor(x), tensor(norms)
    return in_order([
        _euclidean(source, lengths),
        partial(torch.clamp_min, lengths, scalar(eps, lengths), out=lengths),
        partial(torch.div, source, lengths, out=tensor(out)),
    ])  # fmt: skip


@KERNELS("rms_norm", dtypes=WIDE, inplace=True, workspace=_norms_array)
def rms_norm(stream: Stream, op: str, out: Arg, x: Arg, weight: Arg | None = None, *, eps: float, norms: Arg) -> Call:
    """Each row times ``1 / √(|x|² / n + eps)``: on the CPU torch's own makes several tensors of the whole size."""
    source, target, factors = tensor(x), tensor(out), tensor(norms)
    if source.device.type != "cpu":
        return _own_rms_norm(target, source, weight, eps)
    calls: list[Call] = [
        _euclidean(source, factors),
        partial(torch.mul, factors, factors, out=factors),
        partial(torch.add, scalar(eps, factors), factors, alpha=1 / x.shape[-1], out=factors),
        partial(torch.rsqrt, factors, out=factors),
        partial(torch.mul, source, factors, out=target),
    ]
    if weight is not None:
        calls.append(partial(target.mul_, tensor(weight)))
    return in_order(calls)


@KERNELS("rms_norm", dtypes=HALVES, inplace=True)
def rms_norm_of_halves(stream: Stream, op: str, out: Arg, x: Arg, weight: Arg | None = None, *, eps: float) -> Call:
    return _own_rms_norm(tensor(out), tensor(x), weight, eps)


def _own_rms_norm(out: torch.Tensor, x: torch.Tensor, weight: Arg | None, eps: float) -> Call:
    factor = None if weight is None else tensor(weight)
    return partial(_copy_result, out, partial(torch.rms_norm, x, x.shape[-1:], factor, eps))


# torch's own norms have no out= form.


def _copy_result(out: torch.Tensor, function: Callable[[], Any]) -> None:
    out.copy_(function())


def _of_ones(out: torch.Tensor, x: torch.Tensor, parameters: Sequence[torch.Tensor | None]) -> Call:
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
