"""Sparse attention: the scores of the indexer, head by head."""

from __future__ import annotations

from functools import partial

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor


def _arrays(step: Step) -> Arrays:
    """The products of a head, and the sum so far."""
    dtype = widened(step.out.dtype)
    arrays: Arrays = {"products": (dtype, step.out.shape), "sums": (dtype, step.out.shape)}
    return {**arrays, **conversion_arrays(dtype, step.srcs)}


@KERNELS("indexer_scores", workspace=_arrays)
def indexer_scores(stream: Stream, op: str, out: Arg, *srcs: Arg, **arrays: Arg) -> Call:
    (q, k, weights), calls = converted(widened(out.dtype), srcs, arrays)
    products, sums = tensor(arrays["products"]), tensor(arrays["sums"])
    for head in range(q.shape[1]):
        calls.append(partial(torch.bmm, q[:, head], k.mT, out=products))
        calls.append(partial(products.clamp_min_, 0))
        weight = weights[:, head, :, None]
        if head:
            calls.append(partial(torch.addcmul, sums, products, weight, out=sums))
        else:
            calls.append(partial(torch.mul, products, weight, out=sums))
    calls.append(partial(tensor(out).copy_, sums))
    return in_order(calls)
