"""Attention in tiles: some queries against some keys at a time, the softmax carried on from tile to tile.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import Shape, dense_strides
from opweave.ops.normalization import alibi_slopes
from opweave.ops.operands import optional_operands
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.jit.supported import BLOCKS, VECTOR
from opweave_cpu.kernels.indexing import id_check
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, compute_dtype, constant, for_rows, in_turn, row_sums, window, worker_scratch
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

FEW_QUERIES: Final = limit("few_queries", 16, 1, 16, bounds=(1, 16))
"""Queries of a group up to which compiled functions read keys and values once: no more than a vector has lanes."""

MOST_ELEMENTS: Final = limit("few_queries_elements", 512, 16, 512, bounds=(1, 512))
"""Elements of a key, and of a value, up to which they do: the queries of a group stay in the first-level cache."""

Job = tuple[int, Cut]


class _AttentionTiling:
    """How attention is cut into tiles. Axes are (batch, groups, heads of a group, tokens). A tile is some whole groups,
    some whole heads of one group, or some tokens of one head."""

    def __init__(self, out: Arg, q: Arg, k: Arg, v: Arg, rest: Sequence[Arg], attrs: Mapping[str, Any]) -> None:
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
        self.compiles = self.dtype.name == "f32" and _compiles(q, k, v, *rest[: attrs["masked"]])
        self.scratch = worker_scratch(
            self.workers,
            self.dtype,
            queries=rows * size,
            scores=scores,
            top=rows,
            weight=rows,
            rescale=rows,
            part=rows * (not self.compiles),
            total=results * stores,
            products=results * several,
            sloped=scores if attrs["max_bias"] else 0,
            turned=scores if rows // together <= FEW_ROWS.value else 0,
            keys=together * self.keys * size * self.pack[0],
            values=together * self.keys * values * self.pack[1],
        )
        if attrs["causal"]:
            self.scratch["behind"] = as_dtype("bool"), (1, 2 * self._middle)

    @property
    def _middle(self) -> int:
        return int(self.tokens + self.keys)

    def line(self, behind: Array) -> Iterator[Call]:
        """Calls that fill the line of which `behind` shows windows."""
        yield partial(behind[0, : self._middle + 1].fill, False)
        yield partial(behind[0, self._middle + 1 :].fill, True)

    def line_start(self, tokens: int, keys: int, ahead: int) -> int:
        """Where in the line the window for the first query begins, whose key 0 is ``ahead`` of the last that it
        sees."""
        # Beyond the ends of a tile the answer is the same all over.
        return self._middle + max(-self._middle + tokens, min(ahead, self._middle - keys))

    def behind(self, line: Array, tokens: int, keys: int, ahead: int) -> Array:
        """Whether key j lies behind the last one that query i sees."""
        start = self.line_start(tokens, keys, ahead)
        return np.lib.stride_tricks.as_strided(line[0, start:], (tokens, keys), (-1, 1), writeable=False)

    def _packs(self, x: Arg) -> bool:
        return x.dtype is not self.dtype or not is_blas_matrix(x.shape, x.strides, x.dtype.itemsize)


def _compiles(*args: Arg) -> bool:
    """Whether compiled functions read all operands."""
    if why_not() is not None:
        return False
    from opweave_cpu.jit.compiler import has_fma
    from opweave_cpu.jit.writer import takes

    def reads(arg: Arg) -> bool:
        if arg.dtype.is_float:
            return takes(arg, wide=False)
        return arg.dtype.name in BLOCKS and (arg.buffer_type is None or arg.buffer_type.is_raw)

    return has_fma() and all(map(reads, args))


def _why_not_few(step: Step) -> str | None:
    (q, k, v, *rest), given = step.srcs, step.attrs
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    if not 1 <= rows <= FEW_QUERIES.value:
        return f"it takes up to {FEW_QUERIES.value} queries of a group"
    if any(x.shape[3] % max(VECTOR, x.dtype.block) or not 1 <= x.shape[3] <= MOST_ELEMENTS.value for x in (k, v)):
        return f"it takes keys and values whose sizes are multiples of {VECTOR} up to {MOST_ELEMENTS.value}"
    if given["max_bias"] or len(rest) > given["masked"] or (given["causal"] and q.shape[2] > 1):
        return "it takes no slopes and no sinks, and causal attention of one token only"
    args = (step.out, *step.srcs)
    if not _compiles(*args):
        return why_not() or "the processor does not convert its type, or does not multiply and add at once"
    return (
        None if all(arg.strides[-1] == arg.dtype.itemsize for arg in args) else "elements of a row do not lie in line"
    )


def _workspace_few(step: Step) -> Arrays:
    from opweave_cpu.jit.attention import chunks_of, padded

    q, k, v, *_ = step.srcs
    groups, keys = k.shape[1], step.attrs.get("keys", k.shape[2])
    lead = q.shape[0], groups, chunks_of(keys)[1]
    return {
        "sums": ("f32", (*lead, padded(q.shape[1] // groups * q.shape[2]), v.shape[3])),
        "largest": ("f32", (*lead, 2, VECTOR)),
    }


@KERNELS("attention", dtypes="f32 f16 bf16", when=_why_not_few, workspace=_workspace_few)
def attention_of_few_queries(
    stream: Stream, op: str, out: Arg, q: Arg, k: Arg, v: Arg, mask: Arg | None = None, *, sums: Arg, largest: Arg,
    scale: float, soft_cap: float, table: Arg | None = None, keys: int = 0, **_: Any,
) -> Call:  # fmt: skip
    """The stream gives the last two where keys and values are read by a block table."""
    from opweave_cpu.jit.attention import bind_attention

    call = bind_attention(stream, out, q, k, v, mask, scale, soft_cap, sums, largest, table, keys)
    return call if table is None else in_turn([id_check(table.view, k.shape[0], "embedding"), call])


def _workspace(step: Step) -> Arrays:
    q, k, v, *rest = step.srcs
    return _AttentionTiling(step.out, q, k, v, rest, step.attrs).scratch


@KERNELS("attention", workspace=_workspace)
def attention(stream: Stream, op: str, out: Arg, q: Arg, k: Arg, v: Arg, *rest: Arg, **given: Any) -> Call:
    plan = _AttentionTiling(out, q, k, v, rest, given)
    scale, causal, soft_cap = given["scale"], given["causal"], given["soft_cap"]
    tokens, keys = q.shape[2], k.shape[2]
    queries, results = q.view.reshape(*plan.axes, -1), out.view.reshape(*plan.axes, -1)
    factor = constant(scale / soft_cap if soft_cap else scale, plan.dtype)
    softmax = (_CompiledSoftmax if plan.compiles else _Softmax)(stream, plan, given, k, v, rest)

    def tile_calls(job: Job, worker: int) -> Iterator[Call]:
        n, (gs, hs, ts) = job
        shape = (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start)
        groups, rows = shape[0], shape[1] * shape[2]
        own = partial(softmax.own, worker)
        some = own("queries", groups, rows, queries.shape[-1])
        yield partial(np.multiply, queries[n, gs, hs, ts], factor, some.reshape(*shape, -1))
        result = results[n, gs, hs, ts]
        stores = "total" in given
        total = own("total", groups, rows, result.shape[-1]) if stores else result.reshape(groups, rows, -1)
        weight, rescale = own("weight", groups, rows, 1), own("rescale", groups, rows, 1)
        yield from softmax.begin(job, worker)
        # The last key that the first query of the tile sees, and the first key that none of its queries sees.
        seen = keys - tokens + ts.start
        end = max(1, min(keys, seen + shape[2])) if causal else keys
        for first in range(0, end, plan.keys):
            ks = slice(first, min(first + plan.keys, end))
            right, values = softmax.operands(n, gs, ks, worker)
            yield from softmax.copies(n, gs, ks, worker)
            scores = own("scores", groups, rows, ks.stop - first)
            turned = own("turned", groups, ks.stop - first, rows) if "turned" in given else None
            yield from _products(some, right, scores, turned)
            yield from softmax.update(job, ks, worker, first - seen if causal and ks.stop > seen + 1 else None)
            if first == 0:
                yield partial(np.matmul, scores, values, total)
                continue
            products = own("products", groups, rows, result.shape[-1])
            yield partial(np.matmul, scores, values, products)
            yield partial(np.multiply, total, rescale, total)
            yield partial(np.add, total, products, total)
        yield partial(np.divide, total, weight, total)
        if stores:
            yield partial(np.copyto, result, total.reshape(result.shape), "unsafe")

    return for_rows(bind_workers(stream, plan.jobs, plan.workers, tile_calls), plan.keys)


class _Softmax:
    """What lies between the products of tiles, by NumPy: an online softmax, which is updated by each tile.

    Of each query it keeps the largest score so far, ``top``; ``weight``, the sum of the shares relative to it; and
    ``rescale``, by which sums relative to the largest score before the last tile are multiplied.

    Args:
        given: the workspace, and the attributes.
        rest: mask and sinks, as the step is given them.
    """

    def __init__(
        self, stream: Stream, plan: _AttentionTiling, given: Mapping[str, Any], k: Arg, v: Arg, rest: Sequence[Arg]
    ) -> None:
        self._stream, self._plan, self._given = stream, plan, given
        self._sources: Final = k, v
        self._mask, sinks = optional_operands(rest, given["masked"])
        dtype, (_, groups, heads, _) = plan.dtype, plan.axes
        bias = given["max_bias"]
        slopes = alibi_slopes(groups * heads, bias).astype(dtype.numpy).reshape(groups, heads, 1, 1) if bias else None
        self._slopes: Final = slopes
        self._shown: Final = None if self._mask is None else self._mask.view.reshape(*plan.axes, k.shape[2])
        self._sinks: Final = None if sinks is None else sinks.view.reshape(groups, heads, 1, 1)
        self._cap: Final = constant(given["soft_cap"], dtype) if given["soft_cap"] else None
        self._lowest: Final = constant(float(np.finfo(dtype.numpy).min), dtype)
        self._hidden: Final = constant(-np.inf, dtype)

    def own(self, worker: int, name: str, *shape: int) -> Array:
        """The first elements of an array of a worker."""
        return window(self._given[name].view[worker], shape)

    def operands(self, n: int, gs: slice, ks: slice, worker: int) -> list[Array]:
        """Keys and values of a tile, as products read them."""
        shapes = [(gs.stop - gs.start, ks.stop - ks.start, x.shape[3]) for x in self._sources]
        return [
            self.own(worker, name, *shape) if packs else x.view[n, gs, ks]
            for name, x, shape, packs in zip(("keys", "values"), self._sources, shapes, self._plan.pack, strict=True)
        ]

    def copies(self, n: int, gs: slice, ks: slice, worker: int) -> Iterator[Call]:
        """The calls that pack them."""
        for target, x, packs in zip(self.operands(n, gs, ks, worker), self._sources, self._plan.pack, strict=True):
            if packs:
                yield partial(np.copyto, target, x.view[n, gs, ks], "unsafe")

    def begin(self, job: Job, worker: int) -> Iterator[Call]:
        """The calls that set what is kept to what it is before the first key."""
        _, (gs, hs, ts) = job
        shape = (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start, 1)
        top, weight = self.own(worker, "top", *shape), self.own(worker, "weight", *shape)
        if "behind" in self._given:
            yield from self._plan.line(self._given["behind"].view)
        if self._sinks is None:
            yield partial(top.fill, self._lowest)
            yield partial(weight.fill, 0)
            return
        sinks = self._sinks[gs, hs]
        # Where nothing is visible yet, -inf would be subtracted from -inf.
        yield partial(np.maximum, sinks, self._lowest, out=top)
        yield partial(np.subtract, sinks, top, weight)
        yield partial(np.exp, weight, weight)

    def update(self, job: Job, ks: slice, worker: int, ahead: int | None) -> Iterator[Call]:
        """The calls that make scores of a tile its shares.

        Args:
            ahead: the place of the first key, beside the last one that the first query sees; ``None``: all queries see
                all keys.
        """
        yield from self._biased(job, ks, worker)
        _, (gs, hs, ts) = job
        count, shape = ks.stop - ks.start, (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start)
        grid = self.own(worker, "scores", *shape, count)
        if ahead is not None:
            skip = max(0, 1 - ahead)  # keys that every query of the tile sees
            gone = self._plan.behind(self._given["behind"].view, shape[2], count - skip, ahead + skip)
            yield partial(np.copyto, grid[..., skip:], self._hidden, where=gone)
        top, weight, rescale, part = (
            self.own(worker, name, *shape, 1) for name in ("top", "weight", "rescale", "part")
        )
        yield partial(np.maximum.reduce, grid, -1, None, part, True)
        yield partial(np.maximum, part, top, out=part)
        yield partial(np.subtract, grid, part, grid)
        yield partial(np.exp, grid, grid)
        yield partial(np.subtract, top, part, rescale)
        yield partial(np.exp, rescale, rescale)
        yield partial(np.copyto, top, part)
        yield partial(row_sums(count, grid.dtype), grid, part)
        yield partial(np.multiply, weight, rescale, weight)
        yield partial(np.add, weight, part, weight)

    def _biased(self, job: Job, ks: slice, worker: int) -> Iterator[Call]:
        """The calls that cap scores and add the mask."""
        n, (gs, hs, ts) = job
        shape = (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start, ks.stop - ks.start)
        grid = self.own(worker, "scores", *shape)
        if self._cap is not None:
            yield partial(np.tanh, grid, grid)
            yield partial(np.multiply, grid, self._cap, grid)
        if self._shown is not None:
            slopes = None if self._slopes is None else self._slopes[gs, hs]
            sloped = None if slopes is None else self.own(worker, "sloped", *shape)
            yield from add_mask(grid, self._shown[n, gs, hs, ts, ks], slopes, sloped)


class _CompiledSoftmax(_Softmax):
    """The same by compiled functions, in the worker's thread if there are several workers."""

    def _arg(self, worker: int, name: str, shape: Shape, offset: int = 0, strides: Shape | None = None) -> Arg:
        array: Arg = self._given[name]
        start = array.offset + worker * array.strides[0] + offset
        return Arg(array.buffer, start, array.dtype, shape, strides or dense_strides(shape, array.dtype))

    def copies(self, n: int, gs: slice, ks: slice, worker: int) -> Iterator[Call]:
        from opweave_cpu.jit.products import bind_decoded

        for name, x, packs in zip(("keys", "values"), self._sources, self._plan.pack, strict=True):
            if packs:
                shape = (gs.stop - gs.start, ks.stop - ks.start, x.shape[3])
                start = n * x.strides[0] + gs.start * x.strides[1] + ks.start * x.strides[2]
                source = Arg(x.buffer, x.offset + start, x.dtype, shape, x.strides[1:])
                target = self._arg(worker, name, shape)
                yield bind_decoded(self._stream, target, source, alone=self._plan.workers > 1)

    def update(self, job: Job, ks: slice, worker: int, ahead: int | None) -> Iterator[Call]:
        from opweave_cpu.jit.attention import bind_shares

        n, (gs, hs, ts) = job
        shape = (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start, ks.stop - ks.start)
        mask, behind, cap = self._mask, None, self._given["soft_cap"]
        if self._slopes is not None:
            yield from self._biased(job, ks, worker)
            mask, cap = None, 0.0
        if mask is not None:
            batch, head, token, key = mask.strides
            group = head * self._plan.axes[2]
            start = n * batch + gs.start * group + hs.start * head + ts.start * token + ks.start * key
            mask = Arg(mask.buffer, mask.offset + start, mask.dtype, shape, (group, head, token, key))
        if ahead is not None:
            start = self._plan.line_start(shape[2], shape[3], ahead)
            behind = self._arg(0, "behind", shape, start, (0, 0, -1, 1))
        scores = self._arg(worker, "scores", shape)
        kept = [self._arg(worker, name, (*shape[:3], 1)) for name in ("top", "weight", "rescale")]
        yield bind_shares(self._stream, scores, mask, behind, kept, cap, alone=self._plan.workers > 1)


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
