"""Softmax and its kin, layer, root-mean-square, group and Euclidean normalization. Half types compute in f32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.ops.normalization import alibi_slopes
from opweave_torch.kernels.binding import F32, Scratch, in_turn, padded, rounded, scalar, widened
from opweave_torch.kernels.table import HALVES, KERNELS, WIDE
from opweave_torch.memory import tensor

# --- softmax --------------------------------------------------------------------------------------------------------


def _has_logits(step: Step) -> bool:
    """Whether something is to be done before torch's own softmax."""
    return len(step.srcs) > 1 or step.attrs["scale"] != 1


def _logits(target: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> Call:
    if mask is None:
        return partial(torch.mul, x, scalar(scale, x), out=target)
    return partial(torch.add, mask, x, alpha=scale, out=target)


@KERNELS("softmax", dtypes=WIDE, inplace=True)
def softmax(stream: Stream, op: str, out: Arg, x: Arg, mask: Arg | None = None, *, scale: float) -> Call:
    target, source, scale = tensor(out), tensor(x), rounded(scale, out.dtype)
    if mask is None and scale == 1:
        return partial(torch.softmax, source, -1, out=target)
    return in_turn([
        _logits(target, source, None if mask is None else tensor(mask), scale),
        partial(torch.softmax, target, -1, out=target),
    ])  # fmt: skip


def _logits_workspace(step: Step) -> int:
    return len(step.srcs) * _f32_bytes(step.out) if _has_logits(step) else 0


def _f32_bytes(x: Arg) -> int:
    return padded(x.size * F32.itemsize)


@KERNELS("softmax", dtypes=HALVES, inplace=True, workspace=_logits_workspace)
def softmax_of_halves(
    stream: Stream, op: str, out: Arg, x: Arg, mask: Arg | None = None, *, scale: float, workspace: Arg | None
) -> Call:
    target, source = tensor(out), tensor(x)
    if workspace is None:
        return partial(torch.softmax, source, -1, out=target)
    scratch = Scratch(workspace)
    wide = scratch.take(out.shape, F32)
    calls: list[Call] = [partial(wide.copy_, source)]
    added = None if mask is None else scratch.take(out.shape, F32)
    if mask is not None and added is not None:
        calls.append(partial(added.copy_, tensor(mask)))
    return in_turn([
        *calls,
        _logits(wide, wide, added, rounded(scale, F32)),
        partial(torch.softmax, wide, -1, out=wide),
        partial(target.copy_, wide),
    ])  # fmt: skip


def _sink_shape(out: Arg) -> tuple[int, ...]:
    return (*out.shape[:-1], out.shape[-1] + 1)


def _sink_workspace(step: Step) -> int:
    return padded(math.prod(_sink_shape(step.out)) * max(step.out.dtype.itemsize, F32.itemsize))


@KERNELS("head_softmax", inplace=True, workspace=_sink_workspace)
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
    workspace: Arg,
) -> Call:
    """The sink is one more key, whose column is left out afterwards."""
    source, dtype = tensor(x), widened(out.dtype)
    scale = rounded(scale, dtype)
    keys = Scratch(workspace).take(_sink_shape(out), dtype)
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
    return in_turn(calls)


@KERNELS("log_softmax", dtypes=WIDE, inplace=True)
def log_softmax(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(torch.log_softmax, tensor(x), -1, out=tensor(out))


@KERNELS("log_softmax", dtypes=HALVES, inplace=True, workspace=lambda step: _f32_bytes(step.out))
def log_softmax_of_halves(stream: Stream, op: str, out: Arg, x: Arg, *, workspace: Arg) -> Call:
    """torch's own rounds in between on the CPU."""
    wide = Scratch(workspace).take(out.shape, F32)
    return in_turn([
        partial(wide.copy_, tensor(x)),
        partial(torch.log_softmax, wide, -1, out=wide),
        partial(tensor(out).copy_, wide),
    ])  # fmt: skip


# --- norms ----------------------------------------------------------------------------------------------------------


def _norm_workspace(step: Step) -> int:
    """One number for each row."""
    return padded(step.out.size // step.out.shape[-1] * max(step.out.dtype.itemsize, F32.itemsize))


def _norms(x: torch.Tensor, out: Arg, workspace: Arg) -> tuple[Call, torch.Tensor]:
    """The call that computes the Euclidean norms of rows, and where they are then, shape (..., 1)."""
    dtype = widened(out.dtype)
    norms = Scratch(workspace).take((*out.shape[:-1], 1), dtype)
    return partial(torch.linalg.vector_norm, x, 2, -1, True, dtype=norms.dtype, out=norms), norms


@KERNELS("l2_norm", inplace=True, workspace=_norm_workspace)
def l2_norm(stream: Stream, op: str, out: Arg, x: Arg, *, eps: float, workspace: Arg) -> Call:
    source = tensor(x)
    call, norms = _norms(source, out, workspace)
    return in_turn([
        call,
        partial(torch.clamp_min, norms, scalar(eps, norms), out=norms),
        partial(torch.div, source, norms, out=tensor(out)),
    ])  # fmt: skip


@KERNELS("rms_norm", dtypes=WIDE, inplace=True, workspace=_norm_workspace)
def rms_norm(
    stream: Stream, op: str, out: Arg, x: Arg, weight: Arg | None = None, *, eps: float, workspace: Arg
) -> Call:
    """Each row times ``1 / √(|x|² / n + eps)``: on the CPU torch's own makes several tensors of the whole size."""
    source, target = tensor(x), tensor(out)
    if source.device.type != "cpu":
        return _own_rms_norm(target, source, weight, eps)
    call, norms = _norms(source, out, workspace)
    calls: list[Call] = [
        call,
        partial(torch.mul, norms, norms, out=norms),
        partial(torch.add, scalar(eps, norms), norms, alpha=1 / x.shape[-1], out=norms),
        partial(torch.rsqrt, norms, out=norms),
        partial(torch.mul, source, norms, out=target),
    ]
    if weight is not None:
        calls.append(partial(target.mul_, tensor(weight)))
    return in_turn(calls)


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
    """The norm of single elements, which differ from their mean by 0, where torch leaves what rounding does."""
    weight, bias = parameters
    calls: list[Call] = [partial(torch.sub, x, x, out=out)]
    if weight is not None:
        calls.append(partial(out.mul_, weight))
    if bias is not None:
        calls.append(partial(out.add_, bias))
    return in_turn(calls)


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
