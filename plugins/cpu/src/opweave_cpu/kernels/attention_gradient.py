"""The gradient of attention in tiles: some queries of some groups against all of their keys, whose scores are computed
again. No more than a tile of scores lives at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.layout import Shape, dense_strides
from opweave.ops.attention_gradient import attention_gradient_sizes
from opweave.ops.normalization import alibi_slopes
from opweave.ops.operands import optional_operands
from opweave_cpu.kernels.attention import add_mask
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import (
    Array,
    compute_dtype,
    constant,
    for_rows,
    row_dots,
    row_sums,
    stretches,
    window,
    worker_scratch,
)
from opweave_cpu.tunables import limit
from opweave_cpu.workers import bind_workers, full_cuts, is_blas_matrix, worker_count

SCORES: Final = limit("attention_gradient_scores", 1 << 16, 1, 1 << 22)
"""Elements of a tile of scores: two of them stay in the second-level cache."""

FEWEST_ROWS: Final = limit("attention_gradient_rows", 32, 1, 1 << 10)
"""Queries of a tile at least, so that products stay fast however many keys there are."""

SPREAD_WORK: Final = limit("attention_gradient_work", 1 << 28, 1, 1 << 32)
"""Multiplications from which on workers with one thread of BLAS each are faster than one with all of them."""


class _Tiling:
    """How the work is cut. A job is some groups of one example, which one worker does, as the gradients of keys and
    values are sums over all queries of a group; its tiles are some heads and tokens of these.

    Attributes:
        packs: whether (queries, gradients, keys, values) are copied, as BLAS does not read them where they lie.
        stores: whether results are copied into the output.
        compiles: whether rows may be left to compiled functions: tiles are so small that these start no threads.
    """

    def __init__(self, out: Arg, grad: Arg, q: Arg, k: Arg, v: Arg, attrs: Mapping[str, Any], sinking: bool) -> None:
        self.dtype = compute_dtype(q.dtype)
        batch, heads, tokens, size = q.shape
        groups, keys, values = k.shape[1], k.shape[2], v.shape[3]
        self.axes = (batch, groups, heads // groups, tokens)
        rows = heads // groups * tokens
        most = max(SCORES.value // keys, FEWEST_ROWS.value)
        self.cuts = full_cuts(self.axes[2:], min(most, rows))
        together = max(1, min(groups, most // rows))
        self.jobs = list(product(range(batch), stretches(groups, together)))
        work = batch * heads * tokens * keys * (3 * size + 2 * values)
        self.workers = worker_count(len(self.jobs), work) if work >= SPREAD_WORK.value else 1
        apart = [heads > groups and x.strides[1] != tokens * x.strides[2] for x in (q, grad)]
        self.packs = [self._packs(x) or a for x, a in zip((q, grad, k, v), (*apart, False, False), strict=True)]
        self.stores = out.dtype is not self.dtype or not out.is_dense
        some = together * max(prod([c.stop - c.start for c in cut]) for cut in self.cuts)
        self.compiles = not sinking and (self.workers == 1 or some * keys <= SCORES.value)
        self.scratch = worker_scratch(
            self.workers,
            self.dtype,
            shares=some * keys,
            along=some * keys,
            capped=some * keys if attrs["soft_cap"] else 0,
            sloped=some * keys if attrs["max_bias"] else 0,
            behind=tokens + keys if attrs["causal"] else 0,
            top=some,
            weight=some,
            queries=some * size * self.packs[0],
            given=some * values * self.packs[1],
            keys=together * keys * size * self.packs[2],
            values=together * keys * values * self.packs[3],
            turns=some * size * self.stores,
            sums=together * keys * (size + values) * self.stores,
            products=together * keys * max(size, values) if len(self.cuts) > 1 else 0,
        )

    def _packs(self, x: Arg) -> bool:
        return x.dtype is not self.dtype or not is_blas_matrix(x.shape, x.strides, x.dtype.itemsize)


def _tiling(step: Step) -> _Tiling:
    grad, q, k, v, *rest = step.srcs
    return _Tiling(step.out, grad, q, k, v, step.attrs, len(rest) > step.attrs["masked"])


def _why_not(step: Step) -> str | None:
    return None if step.srcs[0].size and step.srcs[1].size else "operands without elements"


@KERNELS("attention_backward", when=_why_not, workspace=lambda step: _tiling(step).scratch)
def attention_backward(
    stream: CpuStream, op: str, out: Arg, grad: Arg, q: Arg, k: Arg, v: Arg, *rest: Arg, **given: Any
) -> Call:
    mask, sinks = optional_operands([arg.view for arg in rest], given["masked"])
    plan = _Tiling(out, grad, q, k, v, given, sinks is not None)
    scale, max_bias, soft_cap = given["scale"], given["max_bias"], given["soft_cap"]
    dtype, axes = plan.dtype, plan.axes
    tokens, size, keys = *q.shape[2:], k.shape[2]
    queries, grads = q.view.reshape(*axes, -1), grad.view.reshape(*axes, -1)
    mask = None if mask is None else mask.reshape(*axes, keys)
    sinks = None if sinks is None else sinks.reshape(*axes[1:3], 1)
    slopes = alibi_slopes(q.shape[1], max_bias).astype(dtype.numpy).reshape(*axes[1:3], 1, 1) if max_bias else None
    cap, one = constant(soft_cap, dtype), constant(1, dtype)
    ends = np.cumsum(attention_gradient_sizes(q.shape, k.shape, v.shape)).tolist()

    def job_calls(job: tuple[int, slice], worker: int) -> Iterator[Call]:
        n, gs = job
        groups = gs.stop - gs.start
        arrays = _Arrays(given, dtype, worker)
        own, shown = arrays.array, arrays.operand
        right, copies = arrays.packed_rows("keys", k.view[n, gs], (groups, keys), packs=plan.packs[2])
        values, others = arrays.packed_rows("values", v.view[n, gs], (groups, keys), packs=plan.packs[3])
        yield from (*copies, *others)
        if "behind" in given:  # a window of it moves along with the query: 0 for keys that the query sees
            yield partial(own("behind", keys).fill, 0)
            yield partial(own("behind", tokens + keys)[keys:].fill, -np.inf)
        packed = out.view[n, gs]
        by_keys = own("sums", groups, ends[2] - ends[0]) if plan.stores else packed[:, ends[0] :]
        middle = ends[1] - ends[0]
        totals = by_keys[:, :middle].reshape(right.shape), by_keys[:, middle:].reshape(values.shape)

        for hs, ts in plan.cuts:
            at = (n, gs, hs, ts)
            shape = (groups, hs.stop - hs.start, ts.stop - ts.start, keys)
            start, rows = hs.start * tokens + ts.start, shape[1] * shape[2]
            some, copies = arrays.packed_rows("queries", queries[at], (groups, rows), packs=plan.packs[0])
            arriving, others = arrays.packed_rows("given", grads[at], (groups, rows), packs=plan.packs[1])
            yield from (*copies, *others)
            shares, along = own("shares", groups, rows, keys), own("along", groups, rows, keys)
            factor = scale
            yield partial(np.matmul, some, right.swapaxes(1, 2), shares)
            if soft_cap:
                capped = own("capped", groups, rows, keys)
                yield partial(np.multiply, shares, constant(scale / soft_cap, dtype), shares)
                yield partial(np.tanh, shares, shares)
                yield partial(np.multiply, shares, shares, capped)
                yield partial(np.subtract, one, capped, capped)
                yield partial(np.multiply, shares, cap, shares)
                factor = 1.0
            if mask is not None:
                if factor != 1:
                    yield partial(np.multiply, shares, constant(factor, dtype), shares)
                    factor = 1.0
                sloped = None if slopes is None else own("sloped", *shape)
                slope = None if slopes is None else slopes[gs, hs]
                yield from add_mask(shares.reshape(shape), mask[at], slope, sloped)
            step, operands = dtype.itemsize, [shown("shares", shape)]
            if "behind" in given:
                operands.append(shown("behind", shape, tokens - 1 - ts.start, (0, 0, -step, step)))
            given_shares, given_along = operands[0], shown("along", shape)
            soft = Step("softmax", given_shares, tuple(operands), {"scale": factor})
            back = Step("softmax_backward", given_along, (given_along, given_shares), {"scale": scale})
            compiled = [stream.bind_rows(x) if plan.compiles else None for x in (soft, back)]
            yield compiled[0] or _softmax(
                shares.reshape(shape), factor, operands[1].view if len(operands) > 1 else None,
                None if sinks is None else sinks[gs, hs], own("top", *shape[:3], 1), own("weight", *shape[:3], 1),
            )  # fmt: skip
            yield from arrays.add_product(totals[1], shares, arriving, first=start == 0)
            yield partial(np.matmul, arriving, values.swapaxes(1, 2), along)
            yield compiled[1] or _softmax_backward(along, shares, scale, own("top", groups, rows, 1))
            if soft_cap:
                yield partial(np.multiply, along, capped, along)
            yield from arrays.add_product(totals[0], along, some, first=start == 0)
            result = packed[:, start * size : (start + rows) * size]
            turns = own("turns", groups, rows, size) if plan.stores else result.reshape(groups, rows, size)
            yield partial(np.matmul, along, right, turns)
            if plan.stores:
                yield partial(np.copyto, result, turns.reshape(result.shape), "unsafe")
        if plan.stores:
            yield partial(np.copyto, packed[:, ends[0] :], by_keys, "unsafe")

    return for_rows(bind_workers(stream, plan.jobs, plan.workers, job_calls), keys)


class _Arrays:
    """The workspace of one worker.

    Args:
        given: the arrays of all workers, by name.
    """

    def __init__(self, given: Mapping[str, Arg], dtype: DType, worker: int) -> None:
        self._given, self._dtype, self._worker = given, dtype, worker

    def array(self, name: str, *shape: int) -> Array:
        return window(self._given[name].view[self._worker], shape)

    def operand(self, name: str, shape: Shape, start: int = 0, strides: Shape | None = None) -> Arg:
        """An array as an operand of a step."""
        array = self._given[name]
        offset = array.offset + self._worker * array.strides[0] + start * self._dtype.itemsize
        return Arg(array.buffer, offset, self._dtype, shape, strides or dense_strides(shape, self._dtype))

    def packed_rows(self, name: str, x: Array, lead: Shape, *, packs: bool) -> tuple[Array, list[Call]]:
        """Matrices in the shape of ``lead`` and the last axis, and the calls that pack them."""
        if not packs:
            return x.reshape(*lead, x.shape[-1]), []
        made = self.array(name, *lead, x.shape[-1])
        return made, [partial(np.copyto, made.reshape(x.shape), x)]

    def add_product(self, target: Array, weights: Array, x: Array, *, first: bool) -> Iterator[Call]:
        """Writes the product of transposed weights for the first tile, and adds it for the others."""
        made = target if first else self.array("products", *target.shape)
        yield partial(np.matmul, weights.swapaxes(1, 2), x, made)
        if not first:
            yield partial(np.add, target, made, target)


def _softmax(scores: Array, scale: float, bias: Array | None, sinks: Array | None, top: Array, weight: Array) -> Call:
    """The call that computes the softmax of scores and sinks in place of the scores."""
    factor, add = constant(scale, as_dtype(scores.dtype.name)), row_sums(scores.shape[-1], scores.dtype)

    def call() -> None:
        if scale != 1:
            np.multiply(scores, factor, scores)
        if bias is not None:
            np.add(scores, bias, scores)
        np.maximum.reduce(scores, axis=-1, out=top, keepdims=True)
        if sinks is not None:
            np.maximum(top[..., 0], sinks, out=top[..., 0])
        np.subtract(scores, top, scores)
        np.exp(scores, scores)
        add(scores, weight)
        if sinks is not None:
            np.subtract(sinks, top[..., 0], top[..., 0])
            np.exp(top, top)
            np.add(weight, top, weight)
        np.divide(scores, weight, scores)

    return call


def _softmax_backward(along: Array, shares: Array, scale: float, total: Array) -> Call:
    """The call that makes the gradient of the scores of that of their softmax, ``shares``, in place."""
    factor, dot = constant(scale, as_dtype(along.dtype.name)), row_dots(along.shape[-1])

    def call() -> None:
        dot(along, shares, total)
        np.subtract(along, total, along)
        np.multiply(along, shares, along)
        np.multiply(along, factor, along)

    return call
