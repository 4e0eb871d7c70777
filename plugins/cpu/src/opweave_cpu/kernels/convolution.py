"""Convolutions: columns and BLAS, element by element for depthwise ones, as they lie for 1x1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave.graph.layout import is_dense
from opweave_cpu.kernels.table import FLOATS, KERNELS, PLAIN, needs_dense_output
from opweave_cpu.tiles import TILE, Array, aligned, compute_dtype, copy_call, for_rows, in_turn, stretches, window
from opweave_cpu.workers import Cut, at, bind_workers, full_cuts, is_blas_matrix, overlap, worker_count

COLUMNS: Final = 1 << 23
"""Bytes of columns at a time: a product so big that it keeps all threads of BLAS at work."""

COLUMN_TILE: Final = 1 << 20
"""Bytes of columns at a time: what a product reads while it is in the second-level cache."""

FEWEST_COLUMNS: Final = 64
"""With fewer of them BLAS slows down more than the cache helps."""

SHIFT_LOSS: Final = 4
"""So many times the results that a row has may be computed in vain beyond its end: less than columns would take."""


def _places_in(
    cut: Sequence[slice], place: Sequence[int], lengths: Sequence[int], steps: Sequence[int], shifts: Sequence[int]
) -> tuple[Cut, Cut, bool]:
    """Of a window ``cut`` of the output, for one element of the kernel: the part that meets the input, the input's part
    that it meets, and whether that is all of the window."""
    targets, sources, whole = [], [], True
    for c, k, n, step, shift in zip(cut, place, lengths, steps, shifts, strict=True):
        count = c.stop - c.start
        target, source = overlap(count, n, step, c.start * step + k - shift)
        targets.append(target)
        sources.append(source)
        whole = whole and target.stop - target.start == count
    return tuple(targets), tuple(sources), whole


def _offsets(kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, ...]]:
    """How far into its window each element of a kernel lies."""
    places = product(*map(range, kernel))
    return [tuple([k * d for k, d in zip(place, dilation, strict=True)]) for place in places]


def _grouped(x: Array, groups: int) -> Array:
    """Channels by groups: (batch, groups, channels of a group, *spatial)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _packs(w: Arg, dtype: DType) -> bool:
    return w.dtype is not dtype or not is_dense(w.shape, w.strides, w.dtype)


def _weights(w: Arg, packed: Arg | None) -> tuple[Array, list[Call]]:
    """The weights in the type of the computation, and the call that converts them where they have another one."""
    if packed is None:
        return w.view, []
    return packed.view, [partial(np.copyto, packed.view, w.view)]


# --- convolution ----------------------------------------------------------------------------------------------------


def _is_depthwise(step: Step) -> bool:
    w = step.srcs[1]
    return w.shape[1] == 1 and step.attrs["groups"] > 1


def _needs_columns(step: Step) -> str | None:
    return "each channel has filters of its own" if _is_depthwise(step) else needs_dense_output(step)


def _needs_depthwise(step: Step) -> str | None:
    return needs_dense_output(step) if _is_depthwise(step) else "a filter reads several channels"


class _ColumnTiling:
    """How a convolution becomes products of the weights and columns: the elements that the kernel meets at each place,
    one below the other. So many places at a time as there is room for.

    Where the kernel moves by one element along the last axis, what its next element meets is one place on in the same
    columns, if these go on beyond the ends of rows. Then columns are made for the first element only, and each element
    has a product of its own, all of which are added up. (What is computed between rows is not stored.)

    Attributes:
        shifts: how many places on each element along the last axis finds its columns; ``(0,)``: it has its own.
        kernel, places: those that there are columns for.
    """

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: Mapping[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.groups: int = attrs["groups"]
        self.kernel, self.places = w.shape[2:], out.shape[2:]
        self.outputs, self.inputs = w.shape[0] // self.groups, w.shape[1]
        self.direct = self._is_product(x, attrs)
        self.framed = not self.direct and (x.dtype is not self.dtype or any(map(any, attrs["padding"])))
        self.lengths = tuple([n + sum(pads) for n, pads in zip(x.shape[2:], attrs["padding"], strict=True)])
        self.shifts = (0,)
        if not self.direct and attrs["stride"][-1] == 1 and self._shifting_pays():
            self.shifts = tuple([i * attrs["dilation"][-1] for i in range(self.kernel[-1])])
            self.kernel, self.places = (*self.kernel[:-1], 1), (*self.places[:-1], self.lengths[-1])
        item, height, several = self.dtype.itemsize, self.inputs * prod(self.kernel), len(self.shifts) > 1
        columns = prod(self.places)
        if not self.direct:
            fewest = self.lengths[-1] if several else FEWEST_COLUMNS
            columns = min(columns, max(fewest, COLUMNS // (item * height)))
        self.cuts = full_cuts(self.places, columns)
        results = self.outputs * columns
        sizes = {
            "weights": w.size if several or _packs(w, self.dtype) else 0,
            "frame": self.inputs * prod(self.lengths) if self.framed else 0,
            "columns": 0 if self.direct else height * columns,
            "results": results if several or out.dtype is not self.dtype else 0,
            "terms": results if several else 0,
        }
        self.scratch = {name: (self.dtype, (size,)) for name, size in sizes.items() if size}

    def _shifting_pays(self) -> bool:
        """Whether there are enough columns for products of their own, more of them are left out than sums are added,
        and little of what is computed lies between rows."""
        height, between = self.inputs * prod(self.kernel[:-1]), self.lengths[-1] - self.places[-1]
        enough = max(FEWEST_COLUMNS, 2 * self.outputs)
        return self.kernel[-1] > 1 and height >= enough and between * self.outputs <= SHIFT_LOSS * self.places[-1]

    def _is_product(self, x: Arg, attrs: Mapping[str, Any]) -> bool:
        """Whether the input is the columns already: a kernel of one element that meets every element."""
        if max(*self.kernel, *attrs["stride"]) > 1 or any(map(any, attrs["padding"])) or x.dtype is not self.dtype:
            return False
        channels, length = x.shape[1], prod(x.shape[2:])
        if not is_dense(x.shape[2:], x.strides[2:], x.dtype):
            return False
        strides = (x.strides[1], x.dtype.itemsize)
        return is_blas_matrix((channels, length), strides, x.dtype.itemsize)


def _columns_workspace(step: Step) -> Arrays:
    return _ColumnTiling(step.out, step.srcs[0], step.srcs[1], step.attrs).scratch


@KERNELS("conv1d", "conv2d", "conv3d", dtypes=FLOATS, when=_needs_columns, workspace=_columns_workspace)
def conv(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    weights: Arg | None = None,
    frame: Arg | None = None,
    columns: Arg | None = None,
    results: Arg | None = None,
    terms: Arg | None = None,
    **attrs: Any,
) -> Call:
    """One thread makes columns, BLAS uses all: threads that did both would wait for each other between short calls."""
    plan = _ColumnTiling(out, x, w, attrs)
    calls: list[Call] = []
    filters = w.view
    if weights is not None:
        parts = filters[..., None] if len(plan.shifts) > 1 else filters[..., None, :]
        filters = weights.view.reshape(len(plan.shifts), *w.shape[:-1], -1)
        calls.append(partial(np.copyto, np.moveaxis(filters, 0, -2), parts))
    matrices = filters.reshape(len(plan.shifts), plan.groups, plan.outputs, -1)
    sources, targets = _grouped(x.view, plan.groups), _grouped(out.view, plan.groups)
    biases = None if b is None else b.view.reshape(plan.groups, -1, *[1] * len(plan.places))
    if frame is not None:
        framed = frame.view.reshape(plan.inputs, *plan.lengths)
        inside = framed[
            at(slice(None), *[slice(p, p + n) for n, (p, _) in zip(x.shape[2:], attrs["padding"], strict=True)])
        ]
        calls.append(partial(framed.fill, 0))
    for n, g in product(range(x.shape[0]), range(plan.groups)):
        source, target = sources[n, g], targets[n, g]
        if frame is not None:
            calls.append(partial(np.copyto, inside, source))
            source = framed
        windows = None if columns is None else _windows(source, plan, attrs["stride"], attrs["dilation"])
        first = 0
        for cut in plan.cuts:
            shape = [c.stop - c.start for c in cut]
            count = prod(shape)
            if columns is None or windows is None:
                right = source.reshape(plan.inputs, -1)
            else:
                right = window(columns.view, (matrices.shape[-1], count))
                tile = right.reshape(plan.inputs, *plan.kernel, *shape)
                calls.append(copy_call(stream, tile, windows[at(..., *cut)]))
            # Up to the last place that is stored.
            length = count - plan.places[-1] + out.shape[-1]
            stored = target[at(slice(None), *cut)]
            sums = target.reshape(plan.outputs, -1)[:, first : first + count]
            values = stored
            if results is not None:
                sums = window(results.view, (plan.outputs, count))
                values = sums.reshape(-1, *shape)[..., : stored.shape[-1]]
                sums = sums[:, :length]
            for i, shift in enumerate(plan.shifts):
                products = window(terms.view, (plan.outputs, count))[:, :length] if i and terms is not None else sums
                calls.append(partial(np.matmul, matrices[i, g], right[:, shift : shift + length], products))
                if i:
                    calls.append(partial(np.add, sums, products, sums))
            if biases is not None:
                calls.append(partial(np.add, values, biases[g], values))
            if values is not stored:
                calls.append(partial(np.copyto, stored, values, "unsafe"))
            first += count
    return in_turn(calls)


def _windows(x: Array, plan: _ColumnTiling, stride: Sequence[int], dilation: Sequence[int]) -> Array:
    """What each element of the kernel meets at each place of the output: (channels, *kernel, *places)."""
    channel, *steps = x.strides
    within = [step * d for step, d in zip(steps, dilation, strict=True)]
    across = [step * s for step, s in zip(steps, stride, strict=True)]
    shape = (plan.inputs, *plan.kernel, *plan.places)
    return as_strided(x, shape, (channel, *within, *across), writeable=False)


class _DepthwiseTiling:
    """How a convolution of channels apart is cut and laid out: some channels at a time, and some places along the first
    axis.

    Their input is copied into a frame, taken apart by strides: of an axis of stride s, element i of the frame lies at
    i // s of part i % s. There an element of the kernel meets neighbouring elements at neighbouring places, and as rows
    of frame and results are of one length, those of all places of a channel are one stretch. (What is computed between
    rows is not stored.)
    """

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: Mapping[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.outputs, places = w.shape[0] // x.shape[1], out.shape[2:]
        self.stride, dilation = attrs["stride"], attrs["dilation"]
        self.shifts = [before for before, _ in attrs["padding"]]
        offsets = _offsets(w.shape[2:], dilation)
        self.parts = [tuple([o % s for o, s in zip(offset, self.stride, strict=True)]) for offset in offsets]
        ahead = [[o // s for o, s in zip(offset, self.stride, strict=True)] for offset in offsets]
        self.margin = [(k - 1) * d // s for k, d, s in zip(w.shape[2:], dilation, self.stride, strict=True)]
        self.row = [n + more for n, more in zip(places[1:], self.margin[1:], strict=True)]
        pitch = [prod(self.row[i:]) for i in range(len(places))]
        self.starts = [sum([n * p for n, p in zip(counts, pitch, strict=True)]) for counts in ahead]
        self.used = list(dict.fromkeys(self.parts))
        # The frame, sums and products fit the second-level cache.
        most = TILE // (self.dtype.itemsize * pitch[0] * len(self.used))
        rows = max(1, min(places[0], most - self.margin[0]))
        channels = max(1, min(x.shape[1], most // (rows + self.margin[0])))
        cuts = product(stretches(x.shape[1], channels), stretches(places[0], rows))
        self.jobs = [(n, *cut) for n, cut in product(range(x.shape[0]), cuts)]
        self.longest = rows * pitch[0]
        self.workers = worker_count(len(self.jobs), out.size * len(offsets))
        frame = len(self.used) * channels * (rows + self.margin[0]) * pitch[0]
        results = self.dtype, (self.workers, aligned(channels * rows * pitch[0], self.dtype))
        self.scratch: dict[str, tuple[DType, Sequence[int]]] = {
            "frames": (self.dtype, (self.workers, aligned(frame, self.dtype))),
            "sums": results,
            "terms": results,
        }
        if _packs(w, self.dtype):
            self.scratch["weights"] = self.dtype, w.shape


def _depthwise_workspace(step: Step) -> Arrays:
    return _DepthwiseTiling(step.out, step.srcs[0], step.srcs[1], step.attrs).scratch


@KERNELS("conv1d", "conv2d", "conv3d", dtypes=FLOATS, when=_needs_depthwise, workspace=_depthwise_workspace)
def depthwise_conv(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    frames: Arg,
    sums: Arg,
    terms: Arg,
    weights: Arg | None = None,
    **attrs: Any,
) -> Call:
    """Element by element of the kernel: a product and a sum for each."""
    plan = _DepthwiseTiling(out, x, w, attrs)
    packed, convert = _weights(w, weights)
    inputs, places = x.view, out.shape[2:]
    stored = out.view.reshape(x.shape[0], x.shape[1], plan.outputs, *places)
    filters = packed.reshape(x.shape[1], plan.outputs, -1)
    biases = None if b is None else b.view.reshape(x.shape[1], plan.outputs, *[1] * len(places))
    inside = tuple([slice(0, n) for n in places[1:]])

    def tile_calls(job: tuple[int, slice, slice], worker: int) -> Iterator[Call]:
        n, channels, rows = job
        count, height = channels.stop - channels.start, rows.stop - rows.start
        lengths = [height + plan.margin[0], *plan.row]
        frame = window(frames.view[worker], (len(plan.used), count, *lengths))
        yield partial(frame.fill, 0)
        for k, part in enumerate(plan.used):
            to, of = [], []
            for axis, (length, step) in enumerate(zip(lengths, plan.stride, strict=True)):
                first = rows.start * step if axis == 0 else 0
                target, source = overlap(length, x.shape[2 + axis], step, first + part[axis] - plan.shifts[axis])
                to.append(target)
                of.append(source)
            yield partial(np.copyto, frame[at(k, slice(None), *to)], inputs[at(n, channels, *of)])
        flat = frame.reshape(len(plan.used), count, -1)
        pitch = prod(plan.row)
        # Up to the last place that is stored.
        length = height * pitch - sum([more * prod(plan.row[i + 1 :]) for i, more in enumerate(plan.margin[1:])])
        grid, products = (window(arg.view[worker], (count, height * pitch)) for arg in (sums, terms))
        total, term = grid[:, :length], products[:, :length]
        results = grid.reshape(count, height, *plan.row)[at(slice(None), slice(None), *inside)]
        for copy in range(plan.outputs):
            factors = filters[channels, copy]
            for i, (part, start) in enumerate(zip(plan.parts, plan.starts, strict=True)):
                met = flat[plan.used.index(part), :, start : start + length]
                yield partial(np.multiply, met, factors[:, i : i + 1], term if i else total)
                if i:
                    yield partial(np.add, total, term, total)
            if biases is not None:
                yield partial(np.add, results, biases[channels, copy], results)
            yield partial(np.copyto, stored[n, channels, copy, rows], results, "unsafe")

    call = bind_workers(stream, plan.jobs, plan.workers, tile_calls)
    return in_turn([*convert, for_rows(call, plan.longest)])


# --- transposed convolution -----------------------------------------------------------------------------------------


class _TransposedTiling:
    """How a transposed convolution is cut: some channels of the output at a time, for which the input passes by."""

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: Mapping[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.groups: int = attrs["groups"]
        self.inputs, self.outputs = w.shape[0] // self.groups, w.shape[1]
        item, length = self.dtype.itemsize, prod(x.shape[2:])
        elements, places = prod(w.shape[2:]), prod(out.shape[2:])
        some = min(self.outputs, max(16, TILE // (item * places)))
        columns = min(length, max(FEWEST_COLUMNS, COLUMN_TILE // (item * some * elements)))
        self.cuts = full_cuts(x.shape[2:], columns)
        self.jobs = list(product(range(x.shape[0]), range(self.groups), stretches(self.outputs, some)))
        self.workers = worker_count(len(self.jobs), x.size * prod(w.shape[1:]))
        own = {"products": some * elements * columns, "inputs": self.inputs * columns}
        if out.dtype is not self.dtype:
            own["totals"] = some * places
        self.scratch: dict[str, tuple[DType, Sequence[int]]] = {
            name: (self.dtype, (self.workers, aligned(size, self.dtype))) for name, size in own.items()
        }
        if _packs(w, self.dtype):
            self.scratch["weights"] = self.dtype, w.shape


def _transposed_workspace(step: Step) -> Arrays:
    return _TransposedTiling(step.out, step.srcs[0], step.srcs[1], step.attrs).scratch


@KERNELS(
    "conv_transpose1d", "conv_transpose2d", dtypes=FLOATS, when=needs_dense_output, workspace=_transposed_workspace
)
def conv_transpose(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    products: Arg,
    inputs: Arg,
    totals: Arg | None = None,
    weights: Arg | None = None,
    **attrs: Any,
) -> Call:
    plan = _TransposedTiling(out, x, w, attrs)
    packed, convert = _weights(w, weights)
    groups, kernel, lengths = plan.groups, w.shape[2:], out.shape[2:]
    offsets = _offsets(kernel, attrs["dilation"])
    sources, targets = _grouped(x.view, groups), _grouped(out.view, groups)
    filters = packed.reshape(groups, plan.inputs, plan.outputs, -1)
    biases = None if b is None else b.view.reshape(groups, plan.outputs, *[1] * len(lengths))
    stride, padding = attrs["stride"], attrs["padding"]

    def tile_calls(job: tuple[int, int, slice], worker: int) -> Iterator[Call]:
        n, g, channels = job
        target = targets[n, g, channels]
        total = target if totals is None else window(totals.view[worker], target.shape)
        yield partial(np.copyto, total, 0 if biases is None else biases[g, channels])
        left = filters[g][:, channels].reshape(plan.inputs, -1).T
        for cut in plan.cuts:
            shape = [c.stop - c.start for c in cut]
            count = prod(shape)
            right = window(inputs.view[worker], (plan.inputs, count))
            yield partial(np.copyto, right.reshape(-1, *shape), sources[at(n, g, slice(None), *cut)])
            product = window(products.view[worker], (left.shape[0], count))
            yield partial(np.matmul, left, right, product)
            parts = product.reshape(len(target), len(offsets), *shape)
            for i, offset in enumerate(offsets):
                # Element i of the input adds to i · stride + offset - padding of the output.
                of, to, _ = _places_in(cut, offset, lengths, stride, padding)
                sum_ = total[at(slice(None), *to)]
                yield partial(np.add, sum_, parts[at(slice(None), i, *of)], sum_)
        if total is not target:
            yield partial(np.copyto, target, total, "unsafe")

    return in_turn([*convert, bind_workers(stream, plan.jobs, plan.workers, tile_calls)])


# --- columns --------------------------------------------------------------------------------------------------------


@KERNELS("im2col", dtypes=PLAIN, when=needs_dense_output)
def im2col(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    kernel, stride, lengths = attrs["kernel_size"], attrs["stride"], x.shape[2:]
    places = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(lengths, kernel, stride, attrs["padding"], attrs["dilation"], strict=True)
    ]
    offsets = _offsets(kernel, attrs["dilation"])
    targets, source = out.view.reshape(*x.shape[:2], len(offsets), *places), x.view
    whole = tuple([slice(0, n) for n in places])
    jobs = [(n, c) for n in range(x.shape[0]) for c in _channel_slices(x.shape[1], prod(out.shape[1:]))]

    def copies(job: tuple[int, slice], worker: int) -> Iterator[Call]:
        n, channels = job
        columns, inputs = targets[n, channels], source[n, channels]
        for i, offset in enumerate(offsets):
            to, of, within = _places_in(whole, offset, lengths, stride, attrs["padding"])
            target = columns[:, i]
            if not within:
                yield partial(target.fill, 0)
            yield partial(np.copyto, target[at(slice(None), *to)], inputs[at(slice(None), *of)])

    return bind_workers(stream, jobs, worker_count(len(jobs), out.size), copies)


def _channel_slices(channels: int, size: int) -> list[slice]:
    """Slices of the channels with about a tile of ``size`` elements each."""
    step = max(1, TILE * channels // size)
    return stretches(channels, step)
