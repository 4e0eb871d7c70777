"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels.table import HALVES, KERNELS, NUMBERS, PLAIN
from opweave_cpu.tiles import (
    LONGEST_ROW,
    Array,
    at_once,
    compute_dtype,
    in_turn,
    most_workers,
    row_sums,
    shares,
    show,
    tile_cuts,
    tile_rows,
    window,
    worker_scratch,
    workers_of,
)
from opweave_cpu.tunables import BLAS_ROWS, SPREAD_PASS, TILE, limit

RUN: Final = limit("summed_run", 128, 2, 128, bounds=(2, 128))
"""The longest running sum in f32, whose rounding errors grow with its length. (NumPy adds pairwise, from blocks of this
length, but along the innermost axis only.)"""

NARROW: Final = limit("narrow_bytes", 1 << 12, 1, 1 << 20)
"""Bytes: rows shorter than this are added many at a time, since a pass over one takes little longer than calling it."""

FEW_BYTES: Final = limit("partial_results_bytes", 1 << 18, 1, 1 << 24)
"""Partial results up to this size are kept beside a call, one for each thread."""

WIDE_ROW: Final = limit("wide_row", 16, 1, 1 << 10)
"""Columns from which on BLAS, as a product with ones from the left, adds up rows faster than NumPy."""

FEW_PARTIALS: Final = limit("few_partials", 64, 1, 1 << 10)
"""Up to so many partial sums of f32 are added up in f32, more of them in f64."""

_F32: Final = as_dtype("f32")
_F64: Final = as_dtype("f64")


# --- how operands lie -----------------------------------------------------------------------------------------------


class _Dim(NamedTuple):
    """An axis, or several that are one in memory; ``target`` is the output's stride, ``None`` where it is reduced."""

    n: int
    stride: int
    target: int | None

    def joins(self, inner: _Dim) -> bool:
        if self.stride != inner.n * inner.stride:
            return False
        if self.target is None or inner.target is None:
            return self.target is inner.target
        return self.target == inner.n * inner.target


def _dims(x: Arg, out: Arg, axes: Sequence[int]) -> list[_Dim]:
    """The axes of ``x`` longer than 1, merged where they are one; those that are kept in the order of the output."""
    targets = iter(out.strides)
    dims: list[_Dim] = []
    for axis, (n, stride) in enumerate(zip(x.shape, x.strides, strict=True)):
        dim = _Dim(n, stride, None if axis in axes else next(targets))
        if n == 1:
            continue
        if dims and dims[-1].joins(dim):
            dims[-1] = _Dim(dims[-1].n * n, stride, dim.target)
        else:
            dims.append(dim)
    return dims


def _views(x: Arg, out: Arg, dims: Sequence[_Dim]) -> tuple[Array, Array, tuple[int, ...]]:
    """``x`` and ``out`` with merged axes, and which of them are reduced."""
    kept = [(d.n, d.target) for d in dims if d.target is not None]
    source = show(x, [d.n for d in dims], [d.stride for d in dims])
    target = show(out, [n for n, _ in kept], [stride for _, stride in kept])
    return source, target, tuple([i for i, d in enumerate(dims) if d.target is None])


def _at(axis: int, some: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, some)


def _reduce(stream: Stream, ufunc: Any, x: Array, axes: tuple[int, ...], out: Array) -> Call:
    """The call that reduces ``x``, computing in the type of ``out``; in threads where it is big."""
    dtype = None if x.dtype == out.dtype else out.dtype
    if ufunc is np.add and dtype is None and x.dtype.kind == "f":
        if axes == (x.ndim - 1,):
            return _sum_rows(stream, x, out)
        if axes == (x.ndim - 2,) and _are_wide_rows(x) and out.strides[-1] == out.itemsize:
            return _sum_columns(stream, x, out)
    count = workers_of(stream) if x.nbytes >= 2 * SPREAD_PASS.value else 1
    whole = partial(ufunc.reduce, x, axes, dtype, out)
    if count == 1 or not axes:  # none: those that are reduced have one element
        return whole
    kept = [i for i in range(x.ndim) if i not in axes]
    if not kept:
        ranges = shares(len(x), count)
        partials = np.empty(len(ranges), out.dtype)
        jobs = [partial(ufunc.reduce, x[p], axes, dtype, partials[i : i + 1].reshape(())) for i, p in enumerate(ranges)]
        return in_turn([at_once(jobs), partial(ufunc.reduce, partials, 0, None, out)])
    # The outermost axis that is long enough, so that what the threads read and write lies far apart.
    axis = next((i for i in kept if x.shape[i] >= count), None)
    far = max(axes, key=lambda i: x.strides[i])
    if axis is None or x.strides[axis] < x.strides[far]:
        # Columns: cutting their rows would make short passes. The reduced axis is cut instead, and the partial results
        # reduced once more. NumPy's one pass over rows is so fast that this pays only beyond what caches hold.
        if x.shape[far] < count or count * out.nbytes > FEW_BYTES.value or x.nbytes < 4 * SPREAD_PASS.value:
            return whole
        ranges = shares(x.shape[far], count)
        halves = np.empty((len(ranges), *out.shape), out.dtype)
        jobs = [partial(ufunc.reduce, x[_at(far, p)], axes, dtype, halves[i, ...]) for i, p in enumerate(ranges)]
        return in_turn([at_once(jobs), partial(ufunc.reduce, halves, 0, None, out)])
    kept_axis, ranges = kept.index(axis), shares(x.shape[axis], count)
    return at_once([partial(ufunc.reduce, x[_at(axis, p)], axes, dtype, out[_at(kept_axis, p)]) for p in ranges])


def _sum_rows(stream: Stream, x: Array, out: Array) -> Call:
    """The call that adds up along the last axis."""
    n = x.shape[-1]
    packed = x.ndim == 2 and x.strides[1] == x.itemsize and x.strides[0] >= n * x.itemsize
    if packed and n <= LONGEST_ROW.value and x.size <= BLAS_ROWS.value:
        return partial(np.matmul, x, np.ones(n, x.dtype), out)
    add = row_sums(n, x.dtype)
    count = workers_of(stream) if x.nbytes >= 2 * SPREAD_PASS.value and x.ndim > 1 else 1
    ends = out[..., None]
    return at_once([partial(add, x[p], ends[p]) for p in (shares(len(x), count) if count > 1 else [...])])


def _are_wide_rows(x: Array) -> bool:
    return x.shape[-1] >= WIDE_ROW.value and x.strides[-1] == x.itemsize and x.strides[-2] >= x.shape[-1] * x.itemsize


def _sum_columns(stream: Stream, x: Array, out: Array) -> Call:
    """The call that adds up along the last but one axis: a product with ones, which adds up several rows in a pass."""
    add = partial(np.matmul, np.ones(x.shape[-2], x.dtype))
    count = workers_of(stream) if x.nbytes >= 4 * SPREAD_PASS.value and x.ndim > 2 else 1
    return at_once([partial(add, x[p], out[p]) for p in (shares(len(x), count) if count > 1 else [...])])


# --- rows, compiled -------------------------------------------------------------------------------------------------


def _why_not_by_rows(step: Step) -> str | None:
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.rows import fits_reduction

    return None if fits_reduction(step) else "it reduces the last axes of dense operands"


@KERNELS("max", "min", "sum", "mean", dtypes=f"f32 f64 {HALVES}", when=_why_not_by_rows)
def reduction_of_rows(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    from opweave_cpu.jit.rows import bind_reduction

    return bind_reduction(stream, op, out, x)


# --- sums -----------------------------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """A sum in two stages, so that no running sum becomes long.

    Attributes:
        axis: the reduced one that is split.
        run: how many of its elements are added up in the first stage.
        blocks: how many partial sums that makes, without the last one of the ``rest``.
        rest: elements left over.
        far: elements added up in the first stage lie ``blocks`` apart, so that passes are long; else side by side.
    """

    axis: int
    run: int
    blocks: int
    rest: int
    far: bool

    @property
    def partials(self) -> int:
        return self.blocks + (self.rest > 0)


def _split(dims: Sequence[_Dim]) -> _Split | None:
    """How to split a sum in f32, ``None`` where NumPy's own is accurate."""
    if not dims:
        return None
    inner = min(range(len(dims)), key=lambda i: abs(dims[i].stride))
    loose = [i for i, d in enumerate(dims) if d.target is None and i != inner]
    length = prod([dims[i].n for i in loose])
    if length <= RUN.value:
        return None
    axis = max(loose, key=lambda i: dims[i].n)
    n = dims[axis].n
    run = min(n, max(2, RUN.value * n // length))
    passed = prod([d.n for d in dims[axis + 1 :]])
    columns = axis == len(dims) - 2 and dims[-1].stride == _F32.itemsize and dims[-1].n >= WIDE_ROW.value
    return _Split(axis, run, n // run, n % run, 4 * passed < NARROW.value and not columns)


def _sum_scratch(step: Step) -> dict[str, tuple[DType, Sequence[int]]]:
    """The workspace of `_sum_calls`."""
    out, dtype = step.out, compute_dtype(step.out.dtype)
    arrays: dict[str, tuple[DType, Sequence[int]]] = {}
    if dtype is not out.dtype:
        arrays["sums"] = dtype, (out.size,)
    split = _split(_dims(step.srcs[0], out, step.attrs["axes"])) if dtype is _F32 else None
    if split is not None:
        arrays["partials"] = _F32, (out.size * split.partials,)
        if split.partials > FEW_PARTIALS.value:
            arrays["wide"] = _F64, (out.size,)
    return arrays


def _sum_calls(
    stream: Stream, x: Arg, out: Arg, axes: tuple[int, ...], scratch: Mapping[str, Arg]
) -> tuple[list[Call], Array]:
    """The calls that add up ``x``, and the array that then holds the sums, in the type to compute in: ``out`` itself if
    it has that, else a part of the scratch memory."""
    dims = _dims(x, out, axes)
    source, target, reduced = _views(x, out, dims)
    into = scratch["sums"].view.reshape(target.shape) if "sums" in scratch else target
    split = _split(dims) if "partials" in scratch else None
    if split is None:
        return [_reduce(stream, np.add, source, reduced, into)], into
    axis, shape, strides = split.axis, list(source.shape), list(source.strides)
    step = strides[axis]
    if split.far:
        shape[axis : axis + 1], strides[axis : axis + 1] = [split.run, split.blocks], [split.blocks * step, step]
    else:
        shape[axis : axis + 1], strides[axis : axis + 1] = [split.blocks, split.run], [split.run * step, step]
    first = axis if split.far else axis + 1
    inner = tuple([first if i == axis else i + (i > axis) for i in reduced])
    kept_axis = axis - sum(i < axis for i in reduced)
    parts = scratch["partials"].view.reshape(*into.shape[:kept_axis], split.partials, *into.shape[kept_axis:])
    whole = _at(kept_axis, slice(0, split.blocks))
    calls = [_reduce(stream, np.add, show(x, shape, strides), inner, parts[whole])]
    if split.rest:
        left = source[_at(axis, slice(source.shape[axis] - split.rest, None))]
        # A slice of one, not an index: where no axis is left, an index would give a scalar.
        last = parts[_at(kept_axis, slice(-1, None))].reshape(into.shape)
        calls.append(_reduce(stream, np.add, left, reduced, last))
    if "wide" not in scratch:
        calls.append(partial(np.add.reduce, parts, kept_axis, None, into))
    else:
        exact = scratch["wide"].view.reshape(into.shape)
        calls += [
            partial(np.add.reduce, parts, kept_axis, exact.dtype, exact),
            partial(np.copyto, into, exact, "unsafe"),
        ]
    return calls, into


@KERNELS("sum", "mean", dtypes=NUMBERS, workspace=_sum_scratch)
def total(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...], **scratch: Arg) -> Call:
    calls, sums = _sum_calls(stream, x, out, axes, scratch)
    if op == "mean":
        calls.append(partial(np.divide, sums, np.array(x.size // out.size, sums.dtype), sums))
    if compute_dtype(out.dtype) is not out.dtype:
        calls.append(_store(out, sums))
    return in_turn(calls)


def _store(out: Arg, values: Array) -> Call:
    """The call that rounds values of the output's size into it."""
    return partial(np.copyto, out.view, values.reshape(out.shape), "unsafe")


# --- variances ------------------------------------------------------------------------------------------------------


def _var_workspace(step: Step) -> Arrays:
    """The workspace of the means; and for each worker a tile of squares, the sums of a tile, and all sums."""
    x, size, dtype = step.srcs[0], step.out.size, compute_dtype(step.out.dtype)
    workers = most_workers(x.size * dtype.itemsize)
    tile = worker_scratch(workers, dtype, squares=tile_rows(x.size, 1, dtype.itemsize))
    return {**_sum_scratch(step), **tile, **worker_scratch(workers, _F64, tile_sums=size, square_sums=size)}


@KERNELS("var", workspace=_var_workspace)
def variance(
    stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...], correction: float, **scratch: Arg
) -> Call:
    """Computes the means, then adds up the squared differences from them, a tile at a time."""
    calls, means = _sum_calls(stream, x, out, axes, scratch)
    squares, tile_sums, square_sums = [scratch[name].view for name in ("squares", "tile_sums", "square_sums")]
    n = x.size // out.size
    calls.append(partial(np.divide, means, np.array(n, means.dtype), means))
    source, _, reduced = _views(x, out, _dims(x, out, axes))
    kept = [1 if i in reduced else length for i, length in enumerate(source.shape)]
    centers = means.reshape(kept)
    elements = tile_rows(x.size, 1, squares.itemsize)
    cuts = tile_cuts(source.shape, elements, keep_last=False) if source.ndim else [(...,)]
    jobs, sums = [], []
    for worker, mine in enumerate(shares(len(cuts), min(workers_of(stream), squares.shape[0]))):
        sums.append(window(square_sums[worker], kept))
        own = tile_sums[worker], squares[worker]
        jobs.append(partial(_add_squares, source, centers, reduced, sums[-1], *own, cuts[mine]))
    calls.append(at_once(jobs))
    calls += [partial(np.add, sums[0], other, sums[0]) for other in sums[1:]]
    calls.append(partial(np.divide, sums[0], np.array(max(n - correction, 0.0)), sums[0]))
    calls.append(_store(out, sums[0]))
    return in_turn(calls)


def _add_squares(
    x: Array, centers: Array, axes: tuple[int, ...], sums: Array, part: Array, tile: Array, cuts: Sequence[Any]
) -> None:
    sums[...] = 0
    for cut in cuts:
        some = x[cut]
        window = cut if cut == (...,) else tuple([slice(None) if i in axes else s for i, s in enumerate(cut)])
        into = sums[window]
        squares = tile[: some.size].reshape(some.shape)
        np.subtract(some, centers[window], squares)
        np.multiply(squares, squares, squares)
        # Along the last axis NumPy adds pairwise.
        dtype = squares.dtype if x.ndim - 1 in axes or some.size <= RUN.value * into.size else sums.dtype
        result = part.view(dtype)[: into.size].reshape(into.shape)
        np.add.reduce(squares, axes, dtype, result, keepdims=True)
        np.add(into, result, into)


# --- extrema, products and counts -----------------------------------------------------------------------------------


@KERNELS("max", "min", dtypes=PLAIN)
def extremum(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    source, target, reduced = _views(x, out, _dims(x, out, axes))
    return _reduce(stream, np.maximum if op == "max" else np.minimum, source, reduced, target)


def _prod_workspace(step: Step) -> Arrays:
    return {"products": (_F32, (step.out.size if step.out.dtype.is_half else 0,))}


@KERNELS("prod", dtypes=NUMBERS, workspace=_prod_workspace)
def product(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...], products: Arg | None = None) -> Call:
    source, target, reduced = _views(x, out, _dims(x, out, axes))
    if products is None:
        return _reduce(stream, np.multiply, source, reduced, target)
    wide = products.view.reshape(target.shape)
    return in_turn([_reduce(stream, np.multiply, source, reduced, wide), _store(out, wide)])


def _why_not_compiled(step: Step) -> str | None:
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.argmax import fits

    return None if fits(step) else "it takes dense operands with columns"


@KERNELS("argmax", dtypes=f"f32 f64 {HALVES}", layout="dense", when=_why_not_compiled)
def argmax_of_columns(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    from opweave_cpu.jit.argmax import bind_argmax

    return bind_argmax(stream, out, x, axis)


@KERNELS("argmax", dtypes=PLAIN)
def argmax(stream: Stream, op: str, out: Arg, x: Arg, *, axis: int) -> Call:
    values, indices = x.view.swapaxes(axis, -1), np.expand_dims(out.view, axis).swapaxes(axis, -1)[..., 0]
    # NumPy copies what does not lie in rows: it is cut, so that the copy is no larger than a tile.
    rows = tile_rows(x.size, x.shape[axis], x.dtype.itemsize)
    cuts = [(...,)] if values.flags.c_contiguous else tile_cuts(values.shape, rows, keep_last=True)
    return partial(_argmax, [(values[cut], indices[cut]) for cut in cuts])


def _argmax(tiles: list[tuple[Array, Array]]) -> None:
    for values, indices in tiles:
        if indices.dtype == np.intp:
            values.argmax(-1, indices)
        else:
            indices[...] = values.argmax(-1)


def _count_workspace(step: Step) -> Arrays:
    """Whether each element of a tile is equal."""
    x = step.srcs[0]
    return {"equal": ("bool", (most_workers(x.nbytes), min(x.size, TILE.value)))}


@KERNELS("count_equal", dtypes=PLAIN, workspace=_count_workspace)
def count_equal(stream: Stream, op: str, out: Arg, a: Arg, b: Arg, *, equal: Arg) -> Call:
    left, right = a.view, b.view
    if left.flags.c_contiguous and right.flags.c_contiguous:
        left, right = left.reshape(-1), right.reshape(-1)
    cuts = tile_cuts(left.shape, TILE.value, keep_last=False) if left.ndim else [(...,)]
    if len(cuts) == 1:
        return partial(_count_at_once, left, right, window(equal.view[0], left.shape), out.view)
    tiles = [(left[cut], right[cut]) for cut in cuts]
    spans = shares(len(tiles), min(workers_of(stream), equal.shape[0]))
    counts = [0] * len(spans)
    jobs = [partial(_count, tiles[span], equal.view[i], counts, i) for i, span in enumerate(spans)]
    return partial(_count_all, at_once(jobs), counts, out.view)


def _count_at_once(a: Array, b: Array, same: Array, out: Array) -> None:
    np.equal(a, b, same)
    out[...] = np.count_nonzero(same)


def _count(tiles: Sequence[tuple[Array, Array]], equal: Array, counts: list[int], worker: int) -> None:
    total = 0
    for a, b in tiles:
        same = window(equal, a.shape)
        np.equal(a, b, same)
        total += int(np.count_nonzero(same))
    counts[worker] = total


def _count_all(count: Call, counts: list[int], out: Array) -> None:
    count()
    out[...] = sum(counts)
