"""Sparse attention: the scores of the indexer in tiles of tokens, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import compute_dtype, constant, stretches, window
from opweave_cpu.tunables import limit
from opweave_cpu.workers import bind_workers

SCORES: Final = limit("sparse_attention_scores", 1 << 17, 1, 1 << 22)
"""Elements of a tile of products: what several passes find in the second-level cache."""


def _tile_rows(tokens: int, keys: int) -> int:
    return min(tokens, max(1, SCORES.value // max(1, keys)))


def _workspace(step: Step) -> Arrays:
    q, k, _ = step.srcs
    dtype = compute_dtype(step.out.dtype)
    tile = _tile_rows(q.shape[2], k.shape[1]) * k.shape[1]
    arrays: Arrays = {"products": (dtype, (tile,)), "sums": (dtype, (tile,))}
    converted = {f"wide{i}": (dtype, arg.shape) for i, arg in enumerate(step.srcs) if arg.dtype is not dtype}
    return {**arrays, **converted}


@KERNELS("indexer_scores", workspace=_workspace)
def indexer_scores(stream: Stream, op: str, out: Arg, *srcs: Arg, products: Arg, sums: Arg, **wide: Arg) -> Call:
    sources = [arg.view for arg in srcs]
    q, k, weights = arrays = [wide[f"wide{i}"].view if f"wide{i}" in wide else x for i, x in enumerate(sources)]
    batch, heads, tokens, _ = q.shape
    zero, target = constant(0, compute_dtype(out.dtype)), out.view
    jobs = list(product(range(batch), stretches(tokens, _tile_rows(tokens, k.shape[1]))))

    def calls(job: tuple[int, slice], worker: int) -> Iterator[Call]:
        i, some = job
        if job == jobs[0]:
            for source, array in zip(sources, arrays, strict=True):
                if array is not source:
                    yield partial(np.copyto, array, source)
        shape = (some.stop - some.start, k.shape[1])
        tile, total = window(products.view, shape), window(sums.view, shape)
        for head in range(heads):
            into = tile if head else total
            yield partial(np.matmul, q[i, head, some], k[i].T, into)
            yield partial(np.maximum, into, zero, out=into)
            yield partial(np.multiply, into, weights[i, head, some, None], into)
            if head:
                yield partial(np.add, total, tile, total)
        yield partial(np.copyto, target[i, some], total, "unsafe")

    return bind_workers(stream, jobs, 1, calls)
