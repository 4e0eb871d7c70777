"""Attention in tiles: some queries against some keys at a time, the softmax carried on from tile to tile.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.layout import Shape, dense_strides
from opweave.ops.normalization import alibi_slopes
from opweave.ops.operands import optional_operands
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import Array, compute_dtype, constant, copies, for_rows, row_sums, window, worker_scratch
from opweave_cpu.tunables import ATTENTION_WORK, limit
from opweave_cpu.workers import Cut, bind_workers, full_cuts, is_blas_matrix, worker_count

QUERY_ROWS: Final = limit("attention_query_rows", 256, 1, 1 << 12)
"""Queries of a tile: enough for BLAS to be at full speed."""

SCORES: Final = limit("attention_scores", 1 << 17, 1, 1 << 22)
"""Elements of a tile of scores: what several passes find in the second-level cache."""

FEWEST_KEYS: Final = limit("attention_keys", 256, 1, 1 << 14)
"""Keys of a tile at least, if there are so many."""

FEW_ROWS: Final = limit("attention_few_rows", 8, 1, 256)
"""Up to so many queries of a group BLAS is faster with the keys on the left, although that transposes the scores."""

FEW_QUERIES: Final = 16
"""Queries of a group at most, and the number of which sizes are multiples, for compiled functions that read keys and
values once: the lanes of a vector."""

MOST_ELEMENTS: Final = 512
"""Of a key and of a value, for compiled functions, which keep the queries of a group in the first-level cache."""

Job = tuple[int, Cut]


class _AttentionTiling:
    """How attention is cut into tiles. Axes are (batch, groups, heads of a group, tokens). A tile is some whole groups,
    some whole heads of one group, or some tokens of one head."""

    def __init__(self, out: Arg, q: Arg, k: Arg, v: Arg, attrs: Mapping[str, Any]) -> None:
        self.dtype = compute_dtype(q.dtype)
        batch, heads, tokens, size = q.shape
        groups, keys, values = k.shape[1], k.shape[2], v.shape[3]
        self.axes = (batch, groups, heads // groups, tokens)
        work = heads * tokens * keys * batch * (size + values)
        # The fewer queries a tile has, the more of its keys are hidden from all of them, and left out.
        most = QUERY_ROWS.value if attrs["causal"] else max(QUERY_ROWS.value, 2 * SCORES.value // keys)
        cuts = full_cuts(self.axes[1:], min(most, heads * tokens))
        self.jobs: list[Job] = list(product(range(batch), cuts))
        rows = max(prod([c.stop - c.start for c in cut]) for cut in cuts)
        together = max(cut[0].stop - cut[0].start for cut in cuts)
        self.pack = [self._packs(k), self._packs(v)]
        self.keys = max(FEWEST_KEYS.value, SCORES.value // rows)
        for width, packs in zip((size, values), self.pack, strict=True):
            if packs:
                self.keys = min(self.keys, max(FEWEST_KEYS.value, SCORES.value // (together * width)))
        self.keys = min(self.keys, keys)
        self.tokens = max(cut[2].stop - cut[2].start for cut in cuts)
        several, scores, results = self.keys < keys, rows * self.keys, rows * values
        stores = out.dtype is not self.dtype or not out.is_dense
        self.workers = worker_count(len(self.jobs), work) if work >= ATTENTION_WORK.value else 1
        self.scratch = worker_scratch(
            self.workers,
            self.dtype,
            queries=rows * size,
            scores=scores,
            top=rows,
            weight=rows,
            part=rows,
            total=results * stores,
            higher=rows * several,
            products=results * several,
            sloped=scores if attrs["max_bias"] else 0,
            turned=scores if rows // together <= FEW_ROWS.value else 0,
            keys=together * self.keys * size * self.pack[0],
            values=together * self.keys * values * self.pack[1],
        )

    def _packs(self, x: Arg) -> bool:
        return x.dtype is not self.dtype or not is_blas_matrix(x.shape, x.strides, x.dtype.itemsize)


def _why_not_few(step: Step) -> str | None:
    (q, k, v, *rest), given = step.srcs, step.attrs
    rows, sizes = q.shape[1] // k.shape[1] * q.shape[2], (q.shape[3], v.shape[3])
    if not 1 <= rows <= FEW_QUERIES or any(n % FEW_QUERIES or not 1 <= n <= MOST_ELEMENTS for n in sizes):
        return (
            f"it takes up to {FEW_QUERIES} queries of a group, and keys and values whose sizes are multiples of "
            f"{FEW_QUERIES} up to {MOST_ELEMENTS}"
        )
    if given["max_bias"] or len(rest) > given["masked"] or (given["causal"] and q.shape[2] > 1):
        return "it takes no slopes and no sinks, and causal attention of one token only"
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.compiler import has_fma
    from opweave_cpu.jit.writer import takes

    args = (step.out, *step.srcs)
    if not has_fma() or not all(takes(arg, wide=False) for arg in args):
        return "the processor does not convert its type, or does not multiply and add at once"
    return None if all(arg.strides[-1] == q.dtype.itemsize for arg in args) else "elements of a row do not lie in line"


def _workspace_few(step: Step) -> Arrays:
    from opweave_cpu.jit.attention import padded, stretches

    q, k, v, *_ = step.srcs
    batch, groups, keys = k.shape[:3]
    lead = batch, groups, stretches(keys)[1]
    return {
        "sums": ("f32", (*lead, padded(q.shape[1] // groups * q.shape[2]), v.shape[3])),
        "largest": ("f32", (*lead, 2, FEW_QUERIES)),
    }


@KERNELS("attention", dtypes="f32 f16 bf16", when=_why_not_few, workspace=_workspace_few)
def attention_of_few_queries(
    stream: Stream, op: str, out: Arg, q: Arg, k: Arg, v: Arg, mask: Arg | None = None, *, sums: Arg, largest: Arg,
    scale: float, soft_cap: float, **_: Any,
) -> Call:  # fmt: skip
    from opweave_cpu.jit.attention import bind_attention

    return bind_attention(stream, out, q, k, v, mask, scale, soft_cap, sums, largest)


def _workspace(step: Step) -> Arrays:
    q, k, v, *_ = step.srcs
    return _AttentionTiling(step.out, q, k, v, step.attrs).scratch


@KERNELS("attention", workspace=_workspace)
def attention(stream: Stream, op: str, out: Arg, q: Arg, k: Arg, v: Arg, *rest: Arg, **given: Any) -> Call:
    plan = _AttentionTiling(out, q, k, v, given)
    scale, causal, max_bias, soft_cap = [given[name] for name in ("scale", "causal", "max_bias", "soft_cap")]
    dtype, axes = plan.dtype, plan.axes
    tokens, keys = q.shape[2], k.shape[2]
    queries, results = q.view.reshape(*axes, -1), out.view.reshape(*axes, -1)
    all_keys, all_values = k.view, v.view
    mask, sinks = optional_operands([arg.view for arg in rest], given["masked"])
    mask = None if mask is None else mask.reshape(*axes, keys)
    sinks = None if sinks is None else sinks.reshape(*axes[1:3], 1)
    slopes = alibi_slopes(q.shape[1], max_bias).astype(dtype.numpy).reshape(*axes[1:3], 1, 1) if max_bias else None
    factor = constant(scale / soft_cap if soft_cap else scale, dtype)
    cap = constant(soft_cap, dtype) if soft_cap else None
    lowest, hidden = constant(float(np.finfo(dtype.numpy).min), dtype), constant(-np.inf, dtype)
    # The keys behind the last one that a query sees: a window of this line, which moves along with the query.
    behind = np.arange(-plan.tokens - plan.keys, plan.tokens + plan.keys) > 0 if causal else None

    # With all keys in one tile, compiled functions make one pass instead of six. Their threads are those of the jobs.
    whole = sinks is None and plan.workers == 1

    def tile_calls(job: Job, worker: int) -> Iterator[Call]:
        n, (gs, hs, ts) = job
        shape = (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start)
        groups, rows = shape[0], shape[1] * shape[2]
        at = (n, gs, hs, ts)

        def own(name: str, *lengths: int) -> Array:
            return window(given[name].view[worker], (groups, *lengths))

        some = own("queries", rows, queries.shape[-1])
        yield partial(np.multiply, queries[at], factor, some.reshape(*shape, -1))
        result = results[at]
        stores = "total" in given
        total = own("total", rows, result.shape[-1]) if stores else result.reshape(groups, rows, -1)
        top, weight, part = (own(name, rows, 1) for name in ("top", "weight", "part"))
        # The last key that the first query of the tile sees, and the first key that none of its queries sees.
        seen = keys - tokens + ts.start
        end = max(1, min(keys, seen + shape[2])) if causal else keys
        for first in range(0, end, plan.keys):
            ks = slice(first, min(first + plan.keys, end))
            count = ks.stop - first
            some_keys, some_values = all_keys[n, gs, ks], all_values[n, gs, ks]
            right = own("keys", count, some_keys.shape[-1]) if plan.pack[0] else some_keys
            values = own("values", count, some_values.shape[-1]) if plan.pack[1] else some_values
            yield from copies((right, some_keys), (values, some_values))
            scores = own("scores", rows, count)
            yield from _products(some, right, scores, own("turned", count, rows) if "turned" in given else None)
            if cap is not None:
                yield partial(np.tanh, scores, scores)
                yield partial(np.multiply, scores, cap, scores)
            grid = scores.reshape(*shape, count)
            if mask is not None:
                sloped = None if slopes is None else own("sloped", rows, count).reshape(grid.shape)
                yield from add_mask(grid, mask[(*at, ks)], None if slopes is None else slopes[gs, hs], sloped)
            if behind is not None and ks.stop > seen + 1:
                skip = max(0, seen + 1 - first)  # keys that every query of the tile sees
                gone = _behind(behind, shape[2], count - skip, first + skip - seen)
                yield partial(np.copyto, grid[..., skip:], hidden, where=gone)
            compiled = None
            if whole and end <= plan.keys:
                compiled = _compiled_softmax(stream, given["scores"], worker, (groups, rows, count))
            if compiled is not None:
                yield compiled
                yield partial(np.matmul, scores, values, total)
                break
            if first == 0:
                sunk = None if sinks is None else sinks[gs, hs]
                yield from _first_shares(scores, top, weight, part, shape, lowest, sunk)
                yield partial(np.matmul, scores, values, total)
                continue
            add = row_sums(count, dtype.numpy)
            higher, products = own("higher", rows, 1), own("products", rows, result.shape[-1])
            yield partial(np.maximum.reduce, scores, -1, None, higher, True)
            yield partial(np.maximum, higher, top, out=higher)
            yield partial(np.subtract, scores, higher, scores)
            yield partial(np.exp, scores, scores)
            yield partial(add, scores, part)
            # The sums so far are relative to the old maximum.
            yield partial(np.subtract, top, higher, top)
            yield partial(np.exp, top, top)
            yield partial(np.multiply, weight, top, weight)
            yield partial(np.add, weight, part, weight)
            yield partial(np.matmul, scores, values, products)
            yield partial(np.multiply, total, top, total)
            yield partial(np.add, total, products, total)
            yield partial(np.copyto, top, higher)
        if compiled is None:  # whose shares are divided already
            yield partial(np.divide, total, weight, total)
        if stores:
            yield partial(np.copyto, result, total.reshape(result.shape), "unsafe")

    return for_rows(bind_workers(stream, plan.jobs, plan.workers, tile_calls), plan.keys)


def _products(some: Array, keys: Array, scores: Array, turned: Array | None) -> Iterator[Call]:
    """The products of queries and keys; by way of ``turned``, where that is given, with the keys on the left."""
    if turned is None:
        yield partial(np.matmul, some, keys.swapaxes(1, 2), scores)
    else:
        yield partial(np.matmul, keys, some.swapaxes(1, 2), turned)
        yield partial(np.copyto, scores, turned.swapaxes(1, 2))


def add_mask(scores: Array, mask: Array, slopes: Array | None, sloped: Array | None) -> Iterator[Call]:
    """Adds a mask, multiplied by slopes by way of ``sloped`` where there are some, to scores of its shape."""
    if slopes is not None:
        yield partial(np.multiply, mask, slopes, sloped)
        mask = sloped if sloped is not None else mask
    yield partial(np.add, scores, mask, scores)


def _compiled_softmax(stream: Stream, scores: Arg, worker: int, shape: Shape) -> Call | None:
    """The compiled softmax of the scores of a worker, if the stream has it for them."""
    if not isinstance(stream, CpuStream):
        return None
    strides = dense_strides(shape, scores.dtype)
    shares = Arg(scores.buffer, scores.offset + worker * scores.strides[0], scores.dtype, shape, strides)
    return stream.bind_rows(Step("softmax", shares, (shares,), {"scale": 1.0}))


def _first_shares(
    scores: Array, top: Array, weight: Array, part: Array, shape: Shape, lowest: Array, sinks: Array | None
) -> Iterator[Call]:
    """Sets ``top`` to the largest scores, the scores to what they and ``top`` give, and ``weight`` to its sums."""
    yield partial(np.maximum.reduce, scores, -1, None, top, True)
    if sinks is not None:
        yield partial(np.maximum, top.reshape(shape), sinks, out=top.reshape(shape))
    # Where nothing is visible yet, -inf would be subtracted from -inf.
    yield partial(np.maximum, top, lowest, out=top)
    yield partial(np.subtract, scores, top, scores)
    yield partial(np.exp, scores, scores)
    yield partial(row_sums(scores.shape[-1], scores.dtype), scores, weight)
    if sinks is not None:
        yield partial(np.subtract, sinks, top.reshape(shape), part.reshape(shape))
        yield partial(np.exp, part, part)
        yield partial(np.add, weight, part, weight)


def _behind(ones: Array, tokens: int, keys: int, ahead: int) -> Array:
    """Whether key j lies behind the last one that query i sees, where key 0 is ``ahead`` of the last of query 0."""
    middle = len(ones) // 2
    (item,) = ones.strides
    # Beyond the ends of a tile the answer is the same all over.
    ahead = max(-middle + tokens, min(ahead, middle - keys))
    start = middle + ahead
    return np.lib.stride_tricks.as_strided(ones[start:], (tokens, keys), (-item, item), writeable=False)
