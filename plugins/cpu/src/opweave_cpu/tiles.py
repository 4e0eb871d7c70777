"""Work in tiles: several passes over a part of the operands that stays in the cache, tiles shared among threads.

A kernel of several passes is a *body*: a function ``body(out, *srcs, *scratch, *stats)`` that makes a few ufunc calls
into ``out`` and its scratch arrays. Its ``out`` may be its first source. `bind_tiled` gives the call that applies it to
whole operands. For half types a body sees f32, and each result is rounded once.

Sizes and limits that differ between machines are in `opweave_cpu.tunables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from functools import cache, lru_cache, partial
from itertools import islice, pairwise, product
from math import copysign, prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import ALIGNMENT, Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave_cpu.threads import MOST, THREADS, set_up_numpy
from opweave_cpu.tunables import SHARED_TILE, SPREAD, SPREAD_PASS, TILE, limit

__all__ = [
    "LONGEST_ROW", "Array", "Body", "aligned", "at_once", "bind_tiled", "bound",
    "calls_within", "compute_dtype", "constant", "copy_call", "for_rows", "in_turn", "most_workers", "repeated",
    "row_dots", "row_sums", "shares", "show", "spread_pass", "stretches", "tile_cuts", "tile_rows", "tile_scratch",
    "window", "worker_scratch", "workers_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Body = Callable[..., Any]
Cut = tuple[Any, ...]

_F32: Final = as_dtype("f32")


def compute_dtype(dtype: DType) -> DType:
    """f32 for half types, else the type itself."""
    return _F32 if dtype.is_half else dtype


def constant(value: float, dtype: DType) -> Array:
    """A number as an array without axes, which a ufunc takes in half the time of a Python float. The array is shared by
    all callers: do not write to it. What ``dtype`` cannot hold becomes infinite without a warning."""
    return _constant(value, copysign(1, value), dtype)  # 0.0 and -0.0 are equal, and not the same


@lru_cache(maxsize=1024)
def _constant(value: float, sign: float, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return np.array(value, dtype.numpy)


def show(arg: Arg, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """The operand's memory as an array of another shape, and strides in bytes."""
    assert arg.buffer is not None
    return arg.buffer.view(arg.offset, arg.dtype, tuple(shape), tuple(strides))


def repeated(arg: Arg, shape: Sequence[int]) -> Array:
    """The operand as an array of ``shape``, by NumPy's rule of broadcasting."""
    lead = len(shape) - len(arg.shape)
    strides = [0 if n == 1 else stride for n, stride in zip(arg.shape, arg.strides, strict=True)]
    return show(arg, shape, (*(0,) * lead, *strides))


LONGEST_ROW: Final = limit("blas_row", 1 << 13, 1, 1 << 13, bounds=(1, 1 << 13))
"""The longest row that BLAS adds up. It keeps a few dozen running sums, whose rounding errors grow with the length."""


def copies(*pairs: tuple[Array, Array]) -> Iterator[Call]:
    """The calls that copy the second array of each pair into the first one; none where they are one."""
    for target, source in pairs:
        if target is not source:
            yield partial(np.copyto, target, source, "unsafe")


def row_sums(n: int, dtype: Any) -> Callable[[Array, Array], Any]:
    """``add(x, out)``: the sums along a last axis of ``n`` elements of a NumPy float type, into a last axis of 1."""
    return _add_pairwise if n > LONGEST_ROW.value else _sums_by_dot(n, dtype)


@lru_cache(maxsize=64)
def _sums_by_dot(n: int, dtype: Any) -> Callable[[Array, Array], Any]:
    return partial(_add_by_dot, np.ones(n, dtype))


def _add_pairwise(x: Array, out: Array) -> None:
    np.add.reduce(x, axis=-1, out=out, keepdims=True)


def _add_by_dot(ones: Array, x: Array, out: Array) -> None:
    # The product with ones is as accurate as NumPy's sum, and three times as fast.
    np.vecdot(x, ones, out[..., 0])


LONGEST_DOT: Final = limit("longest_dot", 1 << 16, 1, 1 << 16, bounds=(1, 1 << 16))
"""Elements of the longest rows that BLAS multiplies at once, as its running sums are few; longer ones go in parts."""


def row_dots(n: int) -> Callable[[Array, Array, Array], Any]:
    """``dot(a, b, out)``: the scalar products along a last axis of ``n`` elements, into a last axis of 1."""
    return _dot if n <= LONGEST_DOT.value else _dots_in_parts(n, LONGEST_DOT.value)


@lru_cache(maxsize=64)
def _dots_in_parts(n: int, length: int) -> Callable[[Array, Array, Array], Any]:
    first, *rest = [(..., cut) for cut in stretches(n, length)]
    return partial(_dot_in_parts, first, rest)


def _dot(a: Array, b: Array, out: Array) -> None:
    np.vecdot(a, b, out[..., 0])


def _dot_in_parts(first: Cut, rest: Sequence[Cut], a: Array, b: Array, out: Array) -> None:
    total = out[..., 0]
    np.vecdot(a[first], b[first], total)
    for cut in rest:
        np.add(total, np.vecdot(a[cut], b[cut]), total)


def aligned(elements: int, dtype: DType) -> int:
    """A number of elements rounded up to whole cache lines: rows of that length all begin at a cache line. In a
    workspace whose first axis is the worker, no two workers then write into one line."""
    itemsize = dtype.itemsize
    return -(-elements * itemsize // ALIGNMENT) * ALIGNMENT // itemsize


def worker_scratch(workers: int, dtype: DType, **elements: int) -> dict[str, tuple[DType, Sequence[int]]]:
    """Arrays of a workspace by name: each worker has the given number of elements. Arrays of 0 are left out."""
    return {name: (dtype, (workers, aligned(n, dtype))) for name, n in elements.items() if n}


def window(flat: Array, shape: Sequence[int]) -> Array:
    """The first elements of a flat array, in that shape."""
    return flat[: prod(shape)].reshape(shape)


def shares(n: int, count: int) -> list[slice]:
    """``range(n)`` cut into ``count`` slices of nearly one length, without empty ones."""
    edges = [n * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]


def stretches(n: int, length: int) -> list[slice]:
    """``range(n)`` cut into slices of ``length``, of which the last one may be shorter."""
    return [slice(i, min(i + length, n)) for i in range(0, n, length)]


def at_once(jobs: Sequence[Call]) -> Call:
    """One call that does all of ``jobs``, each in a thread of its own."""
    return jobs[0] if len(jobs) == 1 else partial(THREADS.spread, jobs)


def in_turn(calls: Sequence[Call]) -> Call:
    """One call that makes all of ``calls``."""
    return calls[0] if len(calls) == 1 else partial(_call_all, tuple(calls))


def calls_within(call: Call) -> Sequence[Call]:
    """The calls that `in_turn` joined to ``call``, or the one that `for_rows` was given; of any other call that call
    itself."""
    if isinstance(call, partial) and call.func is _call_all:
        within: Sequence[Call] = call.args[0]
        return within
    if isinstance(call, partial) and isinstance(getattr(call.func, "__self__", None), Context):
        return call.args
    return (call,)


def _call_all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()


FEW_CALLS: Final = limit("bound_calls", 1024, 1, 1 << 16)
"""Calls of one thread that are bound when a step is compiled. Longer sequences are bound anew in each run, call by
call: bound calls take memory, and the more of them there are, the longer each takes, as they leave the caches."""


def bound(calls: Callable[[], Iterable[Call]]) -> Call:
    """One call that makes all of ``calls()``."""
    some = list(islice(calls(), FEW_CALLS.value + 1))
    return in_turn(some) if len(some) <= FEW_CALLS.value else lambda: _call_all(calls())


# --- one pass -------------------------------------------------------------------------------------------------------


def spread_pass(stream: Stream, ufunc: Callable[..., Any], out: Array, *srcs: Array) -> Call:
    """The call ``ufunc(*srcs, out)``; for a large output, one part of the operands for each thread of the stream."""
    if out.nbytes < SPREAD_PASS.value or not out.ndim:
        return partial(ufunc, *srcs, out)
    if out.ndim > 1 and _all_dense(out, *srcs):
        out, srcs = out.reshape(-1), tuple([s.reshape(-1) for s in srcs])
    count = workers_of(stream)
    if count < 2 or len(out) < count:
        return partial(ufunc, *srcs, out)
    return at_once([partial(ufunc, *[s[p] for s in srcs], out[p]) for p in shares(len(out), count)])


LONGEST_ITEM: Final = limit("item_bytes", 512, 1, 1 << 12)
"""Bytes of a row up to which NumPy, whose copy starts anew for each row, copies it faster as a single item: rows of 8
bytes in an eighth of the time."""


def _rows_as_items(*arrays: Array) -> Sequence[Array]:
    """Arrays of one shape and type with their rows as items, if rows are short and have no gaps."""
    item, row = arrays[0].itemsize, arrays[0].itemsize * arrays[0].shape[-1]
    if not item < row <= LONGEST_ITEM.value or any(a.strides[-1] != item for a in arrays):
        return arrays
    return [a.view(f"V{row}")[..., 0] for a in arrays]


def copy_call(stream: Stream, out: Array, x: Array) -> Call:
    """The call that copies ``x`` to ``out``, converting where the types differ."""
    if out.ndim > 1 and out.dtype == x.dtype and not _all_dense(out, x):
        out, x = _rows_as_items(out, x)
    if out.nbytes < SPREAD_PASS.value:
        return partial(np.copyto, out, x, "unsafe")
    return spread_pass(stream, _copy, out, x)


def _copy(x: Array, out: Array) -> None:
    np.copyto(out, x, "unsafe")


def workers_of(stream: Stream) -> int:
    """How many threads share a big kernel of the stream, at most."""
    return min(getattr(stream, "threads", 1), MOST.value)


def _all_dense(*arrays: Array) -> bool:
    return all(a.flags.c_contiguous for a in arrays)


# --- several passes -------------------------------------------------------------------------------------------------


def tile_scratch(
    step: Step, tiles: int = 0, stats: int = 0, *, by_rows: bool = False, dtype: DType | None = None
) -> Arrays:
    """The workspace of a kernel that `bind_tiled` binds: each worker has ``tiles`` arrays of the size of a tile, and
    ``stats`` arrays of one element a row.

    Args:
        by_rows: as of `bind_tiled`.
        dtype: what the body computes in where that is not `compute_dtype`; operands are then shown to it in that type.
            Without it, outputs of half types get a further tile, in which the body works on a converted copy.
    """
    out = step.out
    if dtype is None:
        dtype = compute_dtype(out.dtype)
        tiles += dtype is not out.dtype
    if not tiles and not stats:
        return {}
    size, row, itemsize = out.size, out.shape[-1] if by_rows else 1, dtype.itemsize
    if size * itemsize <= TILE.value:
        rows, workers = size // row, 1
    else:
        rows, workers = tile_rows(size, row, itemsize), most_workers(size * itemsize)
    arrays: dict[str, tuple[DType, Sequence[int]]] = {}
    if tiles:
        arrays["tiles"] = dtype, (workers, tiles, aligned(rows * row, dtype))
    if stats:
        arrays["stats"] = dtype, (workers, stats, aligned(rows, dtype))
    return arrays


def tile_rows(size: int, row: int, itemsize: int) -> int:
    """Rows of the largest tile of ``size`` elements in rows of ``row``: as many as fit, at least one."""
    tile = SHARED_TILE.value if size * itemsize >= SPREAD.value else TILE.value
    return min(size // row, max(1, tile // (itemsize * row)))


def most_workers(nbytes: int) -> int:
    """Threads that may share several passes over an operand of ``nbytes`` bytes in the type to compute in."""
    return MOST.value if nbytes >= SPREAD.value else 1


def bind_tiled(
    stream: Stream,
    body: Body,
    out: Array,
    srcs: Sequence[Array],
    tiles: Arg | None = None,
    stats: Arg | None = None,
    *,
    by_rows: bool = False,
    in_output: bool = False,
) -> Call:
    """The call that applies ``body`` to operands of one shape (axes may be repeated by stride 0).

    Args:
        tiles, stats: the arrays that `tile_scratch` asked for. If ``out`` has another type than ``tiles``, ``body``
            works on a converted copy in the first one. The others are what ``body`` gets behind its sources: those of
            the tile's shape, then the stats, of the tile's shape but for a last axis of 1.
        by_rows: a tile holds whole rows (of the last axis), because ``body`` reduces over them.
        in_output: the first scratch array may be ``out`` itself where that is apart from all sources: ``body`` is done
            with it before, or when, it writes its output. Less memory passes through the cache.
    """
    size, itemsize = out.size, out.itemsize if tiles is None else tiles.dtype.itemsize
    convert = tiles is not None and tiles.dtype.numpy != out.dtype
    in_output = in_output and not convert and _lies_apart(out, srcs)
    if size * itemsize <= TILE.value:
        call = _tile_call(body, tiles, stats, convert, in_output, 0, out, srcs)
        return for_rows(call, out.shape[-1]) if size >= UNBUFFERED.value and out.ndim else call
    row = out.shape[-1] if by_rows else 1
    if out.ndim > 1 and _all_dense(out, *srcs):
        shape = (-1, row) if by_rows else (-1,)
        out, srcs = out.reshape(shape), [s.reshape(shape) for s in srcs]
    cuts = tile_cuts(out.shape, tile_rows(size, row, itemsize), keep_last=by_rows)
    count = min(workers_of(stream), most_workers(size * itemsize), len(cuts))
    jobs = []
    for worker, mine in enumerate(shares(len(cuts), count)):
        tile_call = partial(_tile_call, body, tiles, stats, convert, in_output, worker)
        job = bound(partial(_tile_calls, tile_call, out, srcs, cuts[mine]))
        jobs.append(for_rows(job, out.shape[-1]))
    return at_once(jobs)


UNBUFFERED_ROWS: Final = range(384, 4096)
"""Lengths of rows for which NumPy uses no buffers if these are short: then a pass that takes one number for each row is
2.5 times as fast, and one over rows with gaps up to twice. Passes over other rows become slower."""

UNBUFFERED: Final = limit("unbuffered_elements", 1 << 14, 1, 1 << 20)
"""Elements of output from which on a kernel's calls run with short buffers: below, entering the context takes longer
than is saved."""


def for_rows(call: Call, row: int) -> Call:
    """``call``, which makes passes over rows of ``row`` elements, with NumPy's buffers so short that it uses none."""
    return partial(_short_buffers().copy().run, call) if row in UNBUFFERED_ROWS else call


@cache
def _short_buffers() -> Context:
    """A context that is copied for each use: no two threads may enter the same one."""
    context = Context()
    context.run(set_up_numpy, 512)
    return context


def _lies_apart(out: Array, srcs: Sequence[Array]) -> bool:
    return not any(src is out or np.may_share_memory(out, src) for src in srcs)


def _tile_calls(
    tile_call: Callable[[Array, list[Array]], Call], out: Array, srcs: Sequence[Array], cuts: Sequence[Cut]
) -> Iterator[Call]:
    for cut in cuts:
        yield tile_call(out[cut], [s[cut] for s in srcs])


def _tile_call(
    body: Body,
    tiles: Arg | None,
    stats: Arg | None,
    convert: bool,
    in_output: bool,
    worker: int,
    out: Array,
    srcs: Sequence[Array],
) -> Call:
    """The call of ``body`` on one tile."""
    shape = out.shape
    arrays = [] if tiles is None else _arrays_of(tiles, worker, shape, in_output)
    if stats is not None:
        arrays += _arrays_of(stats, worker, (*shape[:-1], 1))
    if convert:
        return partial(_convert_and_run, body, out, *srcs, *arrays[1:], work=arrays[0])
    if in_output:
        return partial(body, out, *srcs, out, *arrays)
    return partial(body, out, *srcs, *arrays)


def _arrays_of(scratch: Arg, worker: int, shape: tuple[int, ...], first: int = 0) -> list[Array]:
    """The arrays of one worker, from the ``first`` on, each of its first elements in that shape."""
    assert scratch.buffer is not None
    handle, dtype, strides = scratch.buffer.handle, scratch.dtype.numpy, scratch.strides
    offset = scratch.offset + worker * strides[0]
    return [np.ndarray(shape, dtype, handle, offset + i * strides[1]) for i in range(first, scratch.shape[1])]


def _convert_and_run(body: Body, out: Array, x: Array, *rest: Array, work: Array) -> None:
    work[...] = x
    body(work, work, *rest)
    out[...] = work


def tile_cuts(shape: Sequence[int], rows: int, *, keep_last: bool) -> list[Cut]:
    """Windows of at most ``rows`` rows that cover ``shape``. A row is a last axis that is kept, else an element."""
    axis = len(shape) - keep_last
    if prod(shape[:axis]) <= rows:
        return [(...,)]  # not (): that would make a scalar of an array without axes
    # Axes that fit as a whole are kept; the one before them is cut, and those before that are walked one by one.
    inner = 1
    while inner * shape[axis - 1] <= rows:
        axis -= 1
        inner *= shape[axis]
    length = shape[axis - 1]
    step = -(-length // -(-length // max(1, rows // inner)))  # windows of nearly one length
    return list(product(*[stretches(n, 1) for n in shape[: axis - 1]], stretches(length, step)))
