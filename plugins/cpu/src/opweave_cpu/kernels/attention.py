"""Attention in tiles: some queries against some keys at a time, the softmax carried on from tile to tile.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.ops.normalization import alibi_slopes
from opweave_cpu.kernels.table import FLOATS, KERNELS
from opweave_cpu.lanes import Cut, Rooms, bind_lanes, full_cuts, is_blas_matrix, lane_count
from opweave_cpu.tiles import Array, compute_dtype, constant

QUERY_ROWS: Final = 256
"""Queries of a tile: enough for BLAS to be at full speed."""

SCORES: Final = 1 << 17
"""Elements of a tile of scores: what several passes find in the second-level cache."""

FEWEST_KEYS: Final = 256

Job = tuple[int, Cut]


class _Tiles:
    """How attention is cut. Axes are (batch, groups, heads of a group, tokens); a tile is of groups that are taken
    whole, or of heads of one group that are, or of tokens of one head."""

    def __init__(self, q: Arg, k: Arg, v: Arg, biased: bool) -> None:
        self.dtype = compute_dtype(q.dtype)
        batch, heads, tokens, size = q.shape
        groups, keys, values = k.shape[1], k.shape[2], v.shape[3]
        self.axes = (batch, groups, heads // groups, tokens)
        work = heads * tokens * keys * batch * (size + values)
        # A single token has few rows: halve them rather than leave a lane without work.
        lanes = lane_count(heads * tokens, work)
        cuts = full_cuts(self.axes[1:], min(QUERY_ROWS, -(-heads * tokens // lanes)))
        self.jobs: list[Job] = list(product(range(batch), cuts))
        rows = max(prod([c.stop - c.start for c in cut]) for cut in cuts)
        together = max(cut[0].stop - cut[0].start for cut in cuts)
        self.pack = [self._packs(k), self._packs(v)]
        self.keys = max(FEWEST_KEYS, SCORES // rows)
        for width, packs in zip((size, values), self.pack, strict=True):
            if packs:
                self.keys = min(self.keys, max(FEWEST_KEYS, SCORES // (together * width)))
        self.keys = min(self.keys, keys)
        columns = [rows] * 4
        sizes = [rows * size, rows * self.keys, rows * values, rows * values, *columns]
        sizes.append(rows * self.keys if biased else 0)
        sizes += [together * self.keys * n if p else 0 for n, p in zip((size, values), self.pack, strict=True)]
        self.rooms = Rooms(lane_count(len(self.jobs), work), [(n, self.dtype) for n in sizes])

    def _packs(self, x: Arg) -> bool:
        return x.dtype is not self.dtype or not is_blas_matrix(x.shape, x.strides, x.dtype.itemsize)


def _workspace(step: Step) -> int:
    q, k, v, *_ = step.srcs
    return _Tiles(q, k, v, bool(step.attrs["max_bias"])).rooms.nbytes


@KERNELS("attention", dtypes=FLOATS, workspace=_workspace)
def attention(
    stream: Stream,
    op: str,
    out: Arg,
    q: Arg,
    k: Arg,
    v: Arg,
    *rest: Arg,
    scale: float,
    causal: bool,
    max_bias: float,
    soft_cap: float,
    masked: bool,
    workspace: Arg | None,
) -> Call:
    plan = _Tiles(q, k, v, bool(max_bias))
    dtype, axes = plan.dtype, plan.axes
    tokens, keys = q.shape[2], k.shape[2]
    queries, results = q.view.reshape(*axes, -1), out.view.reshape(*axes, -1)
    all_keys, all_values = k.view, v.view
    mask = rest[0].view.reshape(*axes, keys) if masked else None
    sinks = rest[-1].view.reshape(*axes[1:3], 1) if len(rest) > masked else None
    slopes = alibi_slopes(q.shape[1], max_bias).astype(dtype.numpy).reshape(*axes[1:3], 1, 1) if max_bias else None
    factor = constant(scale / soft_cap if soft_cap else scale, dtype)
    cap = constant(soft_cap, dtype) if soft_cap else None
    lowest, hidden = constant(float(np.finfo(dtype.numpy).min), dtype), constant(-np.inf, dtype)
    # Of a query, the keys behind the last one that it sees: a window of ones that moves along with the query.
    behind = np.arange(-QUERY_ROWS - plan.keys, QUERY_ROWS + plan.keys) > 0 if causal else None

    def run(jobs: Sequence[Job], rooms: list[Array]) -> None:
        for n, (gs, hs, ts) in jobs:
            shape = (gs.stop - gs.start, hs.stop - hs.start, ts.stop - ts.start)
            groups, rows = shape[0], shape[1] * shape[2]
            at = (n, gs, hs, ts)

            def room(i: int, *lengths: int, groups: int = groups) -> Array:
                return rooms[i][: groups * prod(lengths)].reshape(groups, *lengths)

            some = room(0, rows, queries.shape[-1])
            np.copyto(some.reshape(*shape, -1), queries[at])
            np.multiply(some, factor, some)
            total, product_ = room(2, rows, results.shape[-1]), room(3, rows, results.shape[-1])
            top, new_top, weight, part = [room(i, rows, 1) for i in (4, 5, 6, 7)]
            total.fill(0)
            if sinks is None:
                top.fill(-np.inf)
                weight.fill(0)
            else:
                np.copyto(top.reshape(shape), sinks[gs, hs])
                weight.fill(1)
            # The last key that the first query of the tile sees, and one behind the last key that anyone sees.
            seen = keys - tokens + ts.start
            end = min(keys, seen + shape[2]) if causal else keys
            for first in range(0, end, plan.keys):
                ks = slice(first, min(first + plan.keys, end))
                count = ks.stop - first
                right, values = all_keys[n, gs, ks], all_values[n, gs, ks]
                if plan.pack[0]:
                    packed = room(9, count, right.shape[-1])
                    np.copyto(packed, right)
                    right = packed
                if plan.pack[1]:
                    packed = room(10, count, values.shape[-1])
                    np.copyto(packed, values)
                    values = packed
                scores = room(1, rows, count)
                np.matmul(some, right.swapaxes(-1, -2), scores)
                if cap is not None:
                    np.tanh(scores, scores)
                    np.multiply(scores, cap, scores)
                grid = scores.reshape(*shape, count)
                if mask is not None:
                    bias = mask[(*at, ks)]
                    if slopes is not None:
                        bias = np.multiply(bias, slopes[gs, hs], room(8, rows, count).reshape(grid.shape))
                    np.add(grid, bias, grid)
                if behind is not None and ks.stop > seen + 1:
                    np.copyto(grid, hidden, where=_behind(behind, shape[2], count, first - seen))
                np.maximum.reduce(scores, -1, out=new_top, keepdims=True)
                np.maximum(new_top, top, out=new_top)
                # Where nothing is visible yet, -inf would be subtracted from -inf.
                np.maximum(new_top, lowest, out=new_top)
                np.subtract(scores, new_top, scores)
                np.exp(scores, scores)
                np.subtract(top, new_top, top)
                np.exp(top, top)
                np.multiply(weight, top, weight)
                np.add.reduce(scores, -1, out=part, keepdims=True)
                np.add(weight, part, weight)
                np.matmul(scores, values, product_)
                np.multiply(total, top, total)
                np.add(total, product_, total)
                top, new_top = new_top, top
            np.divide(total, weight, total)
            np.copyto(results[at], total.reshape(*shape, -1), "unsafe")

    return bind_lanes(stream, plan.jobs, plan.rooms, workspace, run)


def _behind(ones: Array, tokens: int, keys: int, ahead: int) -> Array:
    """Whether key j lies behind the last one that query i sees, where key 0 is ``ahead`` of the last of query 0."""
    middle = len(ones) // 2
    (item,) = ones.strides
    # Beyond the ends of a tile the answer is the same all over.
    ahead = max(-middle + tokens, min(ahead, middle - keys))
    start = middle + ahead
    return np.lib.stride_tricks.as_strided(ones[start:], (tokens, keys), (-item, item), writeable=False)
