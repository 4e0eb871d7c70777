"""Linear attention: the recurrence over the tokens, heads shared among workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.linear_attention import linear_attention_operands
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, compute_dtype, shares, stretches
from opweave_cpu.tunables import limit
from opweave_cpu.workers import bind_workers, worker_count

TOKENS: Final = limit("linear_attention_tokens", 64, 1, 1 << 10)
"""Tokens after which a run can be cancelled."""


def _head_jobs(q: Arg, v: Arg) -> tuple[list[tuple[int, slice]], int]:
    """Parts of the heads of each example, and how many workers share them."""
    batch, heads = q.shape[:2]
    workers = worker_count(batch * heads, 8 * q.size * v.shape[3])
    parts = shares(heads, min(heads, -(-workers // batch)))
    return [(i, part) for i in range(batch) for part in parts], workers


def _workspace(step: Step) -> Arrays:
    """The state, one term that is added to it, one row of each head; and operands of another type converted."""
    q, _, v, *_ = step.srcs
    batch, heads, _, size = q.shape
    dtype, width = compute_dtype(step.out.dtype), v.shape[3]
    arrays: Arrays = {
        "states": (dtype, (batch, heads, size, width)),
        "term": (dtype, (batch, heads, size, width)),
        "row": (dtype, (batch, heads, 1, width)),
    }
    converted = {f"wide{i}": (dtype, arg.shape) for i, arg in enumerate(step.srcs) if arg.dtype is not dtype}
    return {**arrays, **converted, **({"result": (dtype, v.shape)} if step.out.dtype is not dtype else {})}


@KERNELS("linear_attention", workspace=_workspace)
def linear_attention(
    stream: Stream,
    op: str,
    out: Arg,
    *srcs: Arg,
    decay: bool,
    bonus: bool,
    removal: bool,
    state: bool,
    last: bool,
    states: Arg,
    term: Arg,
    row: Arg,
    **scratch: Arg,
) -> Call:
    sources = [arg.view for arg in srcs]
    arrays = [scratch[f"wide{i}"].view if f"wide{i}" in scratch else x for i, x in enumerate(sources)]
    q, k, v, *rest = arrays
    w, u, a, b, before = linear_attention_operands(rest, decay, bonus, removal, state)
    flat = out.view.reshape(-1)
    stored = flat[: v.size].reshape(v.shape)
    result = scratch["result"].view if "result" in scratch else stored
    finals = flat[v.size :].reshape(states.shape) if last else None
    jobs, workers = _head_jobs(srcs[0], srcs[2])

    def head_calls(job: tuple[int, slice], worker: int) -> Iterator[Call]:
        for source, array in zip(sources, arrays, strict=True):
            if array is not source:
                part = job[1:] if source.ndim == 2 else job
                yield partial(np.copyto, array[part], source[part])
        s = states.view[job]
        yield partial(np.copyto, s, 0 if before is None else before[job])
        factors = None if u is None else _Bonus(q[job], u[job[1]], k[job])
        decays, removed, inserted = [None if x is None else x[job] for x in (w, a, b)]
        for some in stretches(q.shape[2], TOKENS.value):
            yield partial(_advance, some, q[job], k[job], v[job], decays, removed, inserted, factors, s, result[job],
                          term.view[job], row.view[job])  # fmt: skip
        if result is not stored:
            yield partial(np.copyto, stored[job], result[job], "unsafe")
        if finals is not None:
            yield partial(np.copyto, finals[job], s, "unsafe")

    return bind_workers(stream, jobs, workers, head_calls)


class _Bonus:
    """How strongly the output of a token reads the values of that token: Σ q · u · k for each head."""

    def __init__(self, q: Array, u: Array, k: Array) -> None:
        self._operands: Final = (q, u, k)

    def at(self, t: int) -> Array:
        q, u, k = self._operands
        factors: Array = np.einsum("hi,hi,hi->h", q[:, t], u, k[:, t])
        return factors[:, None, None]


def _advance(
    tokens: slice,
    q: Array,
    k: Array,
    v: Array,
    w: Array | None,
    a: Array | None,
    b: Array | None,
    bonus: _Bonus | None,
    s: Array,
    y: Array,
    term: Array,
    row: Array,
) -> None:
    """Advance the states ``s`` (heads, size, width) by some tokens, and write these rows of ``y``."""
    for t in range(tokens.start, tokens.stop):
        value, target = v[:, t, None], y[:, t, None]
        if bonus is not None:
            np.matmul(q[:, t, None], s, row)
            np.multiply(value, bonus.at(t), target)
            np.add(target, row, target)
        if a is not None:
            np.matmul(a[:, t, None], s, row)
        if w is not None:
            np.multiply(s, w[:, t, :, None], s)
        if b is not None:
            np.multiply(b[:, t, :, None], row, term)
            np.add(s, term, s)
        np.multiply(k[:, t, :, None], value, term)
        np.add(s, term, s)
        if bonus is None:
            np.matmul(q[:, t, None], s, target)
