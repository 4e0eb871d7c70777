"""The gradients of softmax and of norms over rows. Half types compute in f32."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, scalar, widened
from opweave_torch.kernels.normalization import euclidean, norm_arrays
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor
from opweave_torch.native import log_softmax_gradient, softmax_gradient

_SOFTMAX: Final = {"softmax_backward": softmax_gradient, "log_softmax_backward": log_softmax_gradient}


def _wide_arrays(step: Step) -> Arrays:
    return conversion_arrays(widened(step.out.dtype), step.srcs)


@KERNELS("softmax_backward", "log_softmax_backward", inplace=True, workspace=_wide_arrays)
def softmax_backward(
    stream: Stream, op: str, out: Arg, grad: Arg, y: Arg, *, scale: float = 1.0, **arrays: Arg
) -> Call:
    (given, result), calls = converted(widened(out.dtype), (grad, y), arrays)
    target = given if arrays else tensor(out)
    calls.append(partial(_SOFTMAX[op], given, result, target))
    if scale != 1:
        calls.append(partial(target.mul_, scalar(scale, target)))
    return in_order([*calls, partial(tensor(out).copy_, target)] if arrays else calls)


def _norm_arrays(step: Step) -> Arrays:
    """Beside the operands in f32, and what norms of rows take: a number for each row, and values without their mean."""
    dtype, shape = widened(step.out.dtype), step.out.shape
    arrays: Arrays = {**_wide_arrays(step), **norm_arrays(step), "along": (dtype, (*shape[:-1], 1))}
    return {**arrays, "centred": (dtype, shape)} if step.op == "layer_norm_backward" else arrays


@KERNELS("layer_norm_backward", "rms_norm_backward", inplace=True, workspace=_norm_arrays)
def norm_backward(
    stream: Stream,
    op: str,
    out: Arg,
    *srcs: Arg,
    eps: float,
    norms: Arg,
    along: Arg,
    parts: Arg | None = None,
    centred: Arg | None = None,
    **arrays: Arg,
) -> Call:
    (given, x, *weight), calls = converted(widened(out.dtype), srcs, arrays)
    target = given if arrays else tensor(out)
    factor, share = tensor(norms), tensor(along)
    n = out.shape[-1]
    if weight:
        calls.append(partial(torch.mul, given, weight[0], out=target))
        given = target
    if centred is not None:
        for values, to in ((x, tensor(centred)), (given, target)):
            calls += [partial(torch.mean, values, -1, True, out=share), partial(torch.sub, values, share, out=to)]
        x, given = tensor(centred), target
    calls += [
        *euclidean(x, factor, parts),
        partial(torch.mul, factor, factor, out=factor),
        partial(torch.add, scalar(eps, factor), factor, alpha=1 / n, out=factor),
        partial(torch.linalg.vecdot, given, x, dim=-1, out=share.squeeze(-1)),
        partial(torch.div, share, factor, out=share),
        partial(torch.rsqrt, factor, out=factor),
        partial(torch.addcmul, given, x, share, value=-1 / n, out=target),
        partial(torch.mul, target, factor, out=target),
    ]
    return in_order([*calls, partial(tensor(out).copy_, target)] if arrays else calls)
