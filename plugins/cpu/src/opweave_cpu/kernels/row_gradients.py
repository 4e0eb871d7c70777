"""The gradients of softmax and of norms over rows, in tiles of whole rows."""

from __future__ import annotations

from functools import partial

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, bind_tiled, constant, repeated, row_dots, row_sums, tile_scratch


@KERNELS("softmax_backward", inplace=True, workspace=partial(tile_scratch, stats=1, by_rows=True))
def softmax_backward(
    stream: Stream, op: str, out: Arg, grad: Arg, y: Arg, *, scale: float, stats: Arg, tiles: Arg | None = None
) -> Call:
    factor, dot = constant(scale, stats.dtype), row_dots(out.shape[-1])

    def body(out: Array, grad: Array, y: Array, along: Array) -> None:
        dot(grad, y, along)
        np.subtract(grad, along, out)
        np.multiply(out, y, out)
        np.multiply(out, factor, out)

    return bind_tiled(stream, body, out.view, [grad.view, y.view], tiles, stats, by_rows=True)


@KERNELS("log_softmax_backward", inplace=True, workspace=partial(tile_scratch, tiles=1, stats=1, by_rows=True))
def log_softmax_backward(stream: Stream, op: str, out: Arg, grad: Arg, y: Arg, *, tiles: Arg, stats: Arg) -> Call:
    add = row_sums(out.shape[-1], tiles.dtype.numpy)

    def body(out: Array, grad: Array, y: Array, powers: Array, total: Array) -> None:
        add(grad, total)
        np.copyto(powers, y)
        np.exp(powers, powers)
        np.multiply(powers, total, powers)
        np.subtract(grad, powers, out)

    return bind_tiled(stream, body, out.view, [grad.view, y.view], tiles, stats, by_rows=True)


@KERNELS(
    "layer_norm_backward", "rms_norm_backward", inplace=True,
    workspace=partial(tile_scratch, tiles=1, stats=2, by_rows=True),
)  # fmt: skip
def norm_backward(
    stream: Stream, op: str, out: Arg, grad: Arg, x: Arg, *weight: Arg, eps: float, tiles: Arg, stats: Arg
) -> Call:
    n, dtype = out.shape[-1], tiles.dtype
    count, epsilon = constant(n, dtype), constant(eps, dtype)
    add, dot = row_sums(n, dtype.numpy), row_dots(n)
    centred = op == "layer_norm_backward"

    def body(out: Array, grad: Array, x: Array, *rest: Array) -> None:
        values, factor, along = rest[-3:]
        np.copyto(values, x)
        if weight:
            grad = np.multiply(grad, rest[0], out)
        if centred:
            for terms, to in ((values, values), (grad, out)):
                add(terms, along)
                np.divide(along, count, along)
                np.subtract(terms, along, to)
            grad = out
        dot(values, values, factor)
        np.divide(factor, count, factor)
        np.add(factor, epsilon, factor)
        dot(grad, values, along)
        np.divide(along, count, along)
        np.divide(along, factor, along)
        np.sqrt(factor, factor)
        np.multiply(values, along, values)
        np.subtract(grad, values, out)
        np.divide(out, factor, out)

    srcs = [grad.view, x.view, *[repeated(w, out.shape) for w in weight]]
    return bind_tiled(stream, body, out.view, srcs, tiles, stats, by_rows=True)
