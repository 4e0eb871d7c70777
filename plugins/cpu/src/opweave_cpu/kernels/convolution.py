"""Convolutions: products of weights and columns by BLAS; depthwise ones are sums over the elements of the kernel, small
ones by compiled functions; and those with a kernel of one element are products of weights and the input itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from opweave.ops.convolution import window_places
from opweave.ops.windows import overlap
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels.table import KERNELS, PLAIN, needs_dense_output
from opweave_cpu.kernels.windows import Job, bind_sums, sum_arrays
from opweave_cpu.tiles import (
    Array,
    compute_dtype,
    copy_call,
    for_rows,
    in_turn,
    stretches,
    window,
    worker_scratch,
)
from opweave_cpu.tunables import COLUMN_TILE, TILE, limit
from opweave_cpu.workers import Cut, at, bind_workers, full_cuts, is_blas_matrix, worker_count

COLUMNS: Final = limit("convolution_columns_bytes", 1 << 23, 1, 1 << 26)
"""Bytes of columns at a time in `conv`: a product of that size keeps all threads of BLAS busy."""

FEWEST_COLUMNS: Final = limit("convolution_columns", 64, 1, 1 << 12)
"""Columns of a product at least: with fewer, BLAS loses more speed than is won because the columns are in the cache."""

SHIFT_LOSS: Final = limit("convolution_shift_loss", 4, 1, 64)
"""Results of all channels between rows, which are computed and not stored, for each position of a row: up to so many,
making columns for every element of the kernel takes longer."""


def _overlap_of(
    cut: Sequence[slice], position: Sequence[int], lengths: Sequence[int], steps: Sequence[int], shifts: Sequence[int]
) -> tuple[Cut, Cut, bool]:
    """Where one element of the kernel covers the input, for positions within ``cut``: which of these positions, which
    elements of the input, and whether it is all of the positions."""
    targets, sources, whole = [], [], True
    for c, k, n, step, shift in zip(cut, position, lengths, steps, shifts, strict=True):
        count = c.stop - c.start
        target, source = overlap(count, n, step, c.start * step + k - shift)
        targets.append(target)
        sources.append(source)
        whole = whole and target.stop - target.start == count
    return tuple(targets), tuple(sources), whole


def _offsets(kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, ...]]:
    """The distance of each element of a dilated kernel from its first one, along each axis."""
    positions = product(*map(range, kernel))
    return [tuple([k * d for k, d in zip(position, dilation, strict=True)]) for position in positions]


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


def _by_groups(b: Arg | None, groups: int, rank: int) -> Array | None:
    """The biases by groups, with an axis of 1 for each of ``rank`` axes of positions."""
    return None if b is None else b.view.reshape(groups, -1, *[1] * rank)


def _scratch_of(tiling: Callable[..., Any]) -> Callable[[Step], Arrays]:
    """The workspace that a class of tilings asks for."""

    def workspace(step: Step) -> Arrays:
        x, w, *_ = step.srcs
        scratch: Arrays = tiling(step.out, x, w, step.attrs).scratch
        return scratch

    return workspace


# --- convolution ----------------------------------------------------------------------------------------------------


def _is_depthwise(step: Step) -> bool:
    w = step.srcs[1]
    return w.shape[1] == 1 and step.attrs["groups"] > 1


def _needs_columns(step: Step) -> str | None:
    return "each channel has filters of its own" if _is_depthwise(step) else needs_dense_output(step)


def _needs_depthwise(step: Step) -> str | None:
    return needs_dense_output(step) if _is_depthwise(step) else "a filter reads several channels"


class _ColumnTiling:
    """How a convolution becomes products of weights and columns. A column is what the kernel covers at one position, as
    one axis; `COLUMNS` limits how many are made at a time.

    Where the stride along the last axis is 1, columns are made for the first element of each row of the kernel only, at
    all positions of the padded row: what the next element covers lies one column further. Each element along that axis
    then has a product of its own, and the products are added up. Results at positions between two rows are not stored.

    Attributes:
        shifts: for each element along the last axis of the kernel, how many columns further its own begin; ``(0,)``
            where there are columns for every element.
        kernel, positions: the kernel's elements, and its positions, for which there are columns.
    """

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: Mapping[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.groups: int = attrs["groups"]
        self.kernel, self.positions = w.shape[2:], out.shape[2:]
        self.outputs, self.inputs = w.shape[0] // self.groups, w.shape[1]
        self.direct = self._is_product(x, attrs)
        self.framed = not self.direct and (x.dtype is not self.dtype or any(map(any, attrs["padding"])))
        self.lengths = tuple([n + sum(pads) for n, pads in zip(x.shape[2:], attrs["padding"], strict=True)])
        self.shifts = (0,)
        if not self.direct and attrs["stride"][-1] == 1 and self._shifting_pays():
            self.shifts = tuple([i * attrs["dilation"][-1] for i in range(self.kernel[-1])])
            self.kernel, self.positions = (*self.kernel[:-1], 1), (*self.positions[:-1], self.lengths[-1])
        item, height, several = self.dtype.itemsize, self.inputs * prod(self.kernel), len(self.shifts) > 1
        columns = prod(self.positions)
        if not self.direct:
            fewest = self.lengths[-1] if several else FEWEST_COLUMNS.value
            columns = min(columns, max(fewest, COLUMNS.value // (item * height)))
        self.cuts = full_cuts(self.positions, columns)
        results = self.outputs * columns
        self.scratch: Arrays = {
            "weights": (self.dtype, (w.size if several or _packs(w, self.dtype) else 0,)),
            "frame": (self.dtype, (self.inputs * prod(self.lengths) if self.framed else 0,)),
            "columns": (self.dtype, (0 if self.direct else height * columns,)),
            "results": (self.dtype, (results if several or out.dtype is not self.dtype else 0,)),
            "terms": (self.dtype, (results if several else 0,)),
        }

    def _shifting_pays(self) -> bool:
        """Whether there are enough columns for products of their own, more of them are left out than sums are added,
        and little of what is computed lies between rows."""
        height, between = self.inputs * prod(self.kernel[:-1]), self.lengths[-1] - self.positions[-1]
        enough = max(FEWEST_COLUMNS.value, 2 * self.outputs)
        return (
            self.kernel[-1] > 1 and height >= enough and between * self.outputs <= SHIFT_LOSS.value * self.positions[-1]
        )

    def _is_product(self, x: Arg, attrs: Mapping[str, Any]) -> bool:
        """Whether the input is the columns already: a kernel of one element that meets every element."""
        if max(*self.kernel, *attrs["stride"]) > 1 or any(map(any, attrs["padding"])) or x.dtype is not self.dtype:
            return False
        channels, length = x.shape[1], prod(x.shape[2:])
        if not is_dense(x.shape[2:], x.strides[2:], x.dtype):
            return False
        strides = (x.strides[1], x.dtype.itemsize)
        return is_blas_matrix((channels, length), strides, x.dtype.itemsize)


@KERNELS("conv1d", "conv2d", "conv3d", when=_needs_columns, workspace=_scratch_of(_ColumnTiling))
def conv(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, **given: Any) -> Call:
    """One thread makes columns, BLAS uses all: threads that did both would wait for each other between short calls."""
    plan = _ColumnTiling(out, x, w, given)
    weights, frame, columns, results, terms = [given.get(name) for name in plan.scratch]
    calls: list[Call] = []
    filters = w.view
    if weights is not None:
        parts = filters[..., None] if len(plan.shifts) > 1 else filters[..., None, :]
        filters = weights.view.reshape(len(plan.shifts), *w.shape[:-1], -1)
        calls.append(partial(np.copyto, np.moveaxis(filters, 0, -2), parts))
    matrices = filters.reshape(len(plan.shifts), plan.groups, plan.outputs, -1)
    sources, targets = _grouped(x.view, plan.groups), _grouped(out.view, plan.groups)
    biases = _by_groups(b, plan.groups, len(plan.positions))
    if frame is not None:
        framed = frame.view.reshape(plan.inputs, *plan.lengths)
        inside = framed[at(..., *[slice(p, p + n) for n, (p, _) in zip(x.shape[2:], given["padding"], strict=True)])]
        calls.append(partial(framed.fill, 0))
    for n, g in product(range(x.shape[0]), range(plan.groups)):
        source, target = sources[n, g], targets[n, g]
        if frame is not None:
            calls.append(partial(np.copyto, inside, source))
            source = framed
        windows = None if columns is None else _windows(source, plan, given["stride"], given["dilation"])
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
            # Results behind the last stored position are not computed.
            length = count - plan.positions[-1] + out.shape[-1]
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
    """What each element of the kernel covers at each position: (channels, *kernel, *positions)."""
    channel, *steps = x.strides
    within = [step * d for step, d in zip(steps, dilation, strict=True)]
    across = [step * s for step, s in zip(steps, stride, strict=True)]
    shape = (plan.inputs, *plan.kernel, *plan.positions)
    return as_strided(x, shape, (channel, *within, *across), writeable=False)


class _DepthwiseTiling:
    """How a depthwise convolution is cut: some channels at a time, and some positions along the first axis.

    The input is copied into a padded frame, in which elements that are a stride apart lie side by side: along an axis
    of stride s, element i of the input lies at i // s of part i % s. What an element of the kernel covers at all
    positions of a channel is then one contiguous range of a part, because rows of the frame and of the results are of
    one length. Results at positions between two rows are not stored.
    """

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: Mapping[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.outputs, positions = w.shape[0] // x.shape[1], out.shape[2:]
        self.stride, dilation = attrs["stride"], attrs["dilation"]
        self.shifts = [before for before, _ in attrs["padding"]]
        offsets = _offsets(w.shape[2:], dilation)
        self.parts = [tuple([o % s for o, s in zip(offset, self.stride, strict=True)]) for offset in offsets]
        ahead = [[o // s for o, s in zip(offset, self.stride, strict=True)] for offset in offsets]
        self.margin = [(k - 1) * d // s for k, d, s in zip(w.shape[2:], dilation, self.stride, strict=True)]
        self.row = [n + more for n, more in zip(positions[1:], self.margin[1:], strict=True)]
        pitch = [prod(self.row[i:]) for i in range(len(positions))]
        self.starts = [sum([n * p for n, p in zip(counts, pitch, strict=True)]) for counts in ahead]
        self.used = list(dict.fromkeys(self.parts))
        # The frame, sums and products fit the second-level cache.
        most = TILE.value // (self.dtype.itemsize * pitch[0] * len(self.used))
        rows = max(1, min(positions[0], most - self.margin[0]))
        channels = max(1, min(x.shape[1], most // (rows + self.margin[0])))
        cuts = product(stretches(x.shape[1], channels), stretches(positions[0], rows))
        self.jobs = [(n, *cut) for n, cut in product(range(x.shape[0]), cuts)]
        self.longest = rows * pitch[0]
        self.workers = worker_count(len(self.jobs), out.size * len(offsets))
        frame = len(self.used) * channels * (rows + self.margin[0]) * pitch[0]
        results = channels * rows * pitch[0]
        self.scratch = worker_scratch(self.workers, self.dtype, frames=frame, sums=results, terms=results)
        if _packs(w, self.dtype):
            self.scratch["weights"] = self.dtype, w.shape


def _why_not_compiled(step: Step) -> str | None:
    reason = _needs_depthwise(step) or why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.compiler import has_fma
    from opweave_cpu.jit.depthwise import fits

    return None if fits(step) and has_fma() else "it takes dense operands and small kernels of one or two axes"


@KERNELS("conv1d", "conv2d", layout="dense", when=_why_not_compiled)
def compiled_depthwise_conv(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, groups: int, **given: Any
) -> Call:
    from opweave_cpu.jit.depthwise import bind_depthwise

    return bind_depthwise(stream, out, x, w, b, **given)


@KERNELS("conv1d", "conv2d", "conv3d", when=_needs_depthwise, workspace=_scratch_of(_DepthwiseTiling))
def depthwise_conv(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, **given: Any) -> Call:
    """A product and a sum for each element of the kernel."""
    plan = _DepthwiseTiling(out, x, w, given)
    packed, convert = _weights(w, given.get("weights"))
    frames, sums, terms = [given[name].view for name in ("frames", "sums", "terms")]
    inputs, positions = x.view, out.shape[2:]
    stored = out.view.reshape(x.shape[0], x.shape[1], plan.outputs, *positions)
    filters = packed.reshape(x.shape[1], plan.outputs, -1)
    biases = _by_groups(b, x.shape[1], len(positions))
    inside = tuple([slice(0, n) for n in positions[1:]])

    def tile_calls(job: tuple[int, slice, slice], worker: int) -> Iterator[Call]:
        n, channels, rows = job
        count, height = channels.stop - channels.start, rows.stop - rows.start
        lengths = [height + plan.margin[0], *plan.row]
        frame = window(frames[worker], (len(plan.used), count, *lengths))
        yield partial(frame.fill, 0)
        for k, part in enumerate(plan.used):
            to, of = [], []
            for axis, (length, step) in enumerate(zip(lengths, plan.stride, strict=True)):
                first = rows.start * step if axis == 0 else 0
                target, source = overlap(length, x.shape[2 + axis], step, first + part[axis] - plan.shifts[axis])
                to.append(target)
                of.append(source)
            yield partial(np.copyto, frame[at(k, slice(None), *to)], inputs[at(n, channels, *of)])
        parts = frame.reshape(len(plan.used), count, -1)
        pitch = prod(plan.row)
        # Results behind the last stored position are not computed.
        length = height * pitch - sum([more * prod(plan.row[i + 1 :]) for i, more in enumerate(plan.margin[1:])])
        grid, products = (window(flat[worker], (count, height * pitch)) for flat in (sums, terms))
        total, term = grid[:, :length], products[:, :length]
        results = grid.reshape(count, height, *plan.row)[at(slice(None), slice(None), *inside)]
        for copy in range(plan.outputs):
            factors = filters[channels, copy]
            for i, (part, start) in enumerate(zip(plan.parts, plan.starts, strict=True)):
                met = parts[plan.used.index(part), :, start : start + length]
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
    """How a transposed convolution is cut: some channels of the output at a time, each time from the whole input."""

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: Mapping[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.groups: int = attrs["groups"]
        self.inputs, self.outputs = w.shape[0] // self.groups, w.shape[1]
        item, length = self.dtype.itemsize, prod(x.shape[2:])
        elements, positions = prod(w.shape[2:]), prod(out.shape[2:])
        some = min(self.outputs, max(16, TILE.value // (item * positions)))
        columns = min(length, max(FEWEST_COLUMNS.value, COLUMN_TILE.value // (item * some * elements)))
        self.cuts = full_cuts(x.shape[2:], columns)
        self.jobs = list(product(range(x.shape[0]), range(self.groups), stretches(self.outputs, some)))
        self.workers = worker_count(len(self.jobs), x.size * prod(w.shape[1:]))
        self.scratch = worker_scratch(
            self.workers,
            self.dtype,
            products=some * elements * columns,
            inputs=self.inputs * columns,
            totals=some * positions * (out.dtype is not self.dtype),
        )
        if _packs(w, self.dtype):
            self.scratch["weights"] = self.dtype, w.shape


@KERNELS("conv_transpose1d", "conv_transpose2d", when=needs_dense_output, workspace=_scratch_of(_TransposedTiling))
def conv_transpose(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, **given: Any) -> Call:
    plan = _TransposedTiling(out, x, w, given)
    packed, convert = _weights(w, given.get("weights"))
    inputs, products, totals = given["inputs"].view, given["products"].view, given.get("totals")
    groups, lengths = plan.groups, out.shape[2:]
    offsets = _offsets(w.shape[2:], given["dilation"])
    sources, targets = _grouped(x.view, groups), _grouped(out.view, groups)
    filters = packed.reshape(groups, plan.inputs, plan.outputs, -1)
    biases = _by_groups(b, groups, len(lengths))

    def tile_calls(job: tuple[int, int, slice], worker: int) -> Iterator[Call]:
        n, g, channels = job
        target = targets[n, g, channels]
        total = target if totals is None else window(totals.view[worker], target.shape)
        yield partial(np.copyto, total, 0 if biases is None else biases[g, channels])
        left = filters[g][:, channels].reshape(plan.inputs, -1).T
        for cut in plan.cuts:
            shape = [c.stop - c.start for c in cut]
            count = prod(shape)
            right = window(inputs[worker], (plan.inputs, count))
            yield partial(np.copyto, right.reshape(-1, *shape), sources[at(n, g, slice(None), *cut)])
            product = window(products[worker], (left.shape[0], count))
            yield partial(np.matmul, left, right, product)
            parts = product.reshape(len(target), len(offsets), *shape)
            for i, offset in enumerate(offsets):
                # Element i of the input adds to i · stride + offset - padding of the output.
                of, to, _ = _overlap_of(cut, offset, lengths, given["stride"], given["padding"])
                sum_ = total[at(slice(None), *to)]
                yield partial(np.add, sum_, parts[at(slice(None), i, *of)], sum_)
        if total is not target:
            yield partial(np.copyto, target, total, "unsafe")

    return in_turn([*convert, bind_workers(stream, plan.jobs, plan.workers, tile_calls)])


# --- columns --------------------------------------------------------------------------------------------------------


@KERNELS("im2col", dtypes=PLAIN, when=needs_dense_output)
def im2col(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    stride, lengths = attrs["stride"], x.shape[2:]
    positions = window_places(lengths, **attrs)
    offsets = _offsets(attrs["kernel_size"], attrs["dilation"])
    targets, source = out.view.reshape(*x.shape[:2], len(offsets), *positions), x.view
    whole = tuple([slice(0, n) for n in positions])
    some = max(1, TILE.value * x.shape[1] // prod(out.shape[1:]))  # channels with about a tile of elements
    jobs = list(product(range(x.shape[0]), stretches(x.shape[1], some)))

    def copies(job: tuple[int, slice], worker: int) -> Iterator[Call]:
        n, channels = job
        columns, inputs = targets[n, channels], source[n, channels]
        for i, offset in enumerate(offsets):
            to, of, within = _overlap_of(whole, offset, lengths, stride, attrs["padding"])
            target = columns[:, i]
            if not within:
                yield partial(target.fill, 0)
            yield partial(np.copyto, target[at(slice(None), *to)], inputs[at(slice(None), *of)])

    return bind_workers(stream, jobs, worker_count(len(jobs), out.size), copies)


@KERNELS("col2im", workspace=sum_arrays)
def col2im(stream: Stream, op: str, out: Arg, x: Arg, *, sums: Arg | None = None, **attrs: Any) -> Call:
    places = window_places(attrs.pop("size"), **attrs)
    columns = x.view.reshape(*out.shape[:2], prod(attrs["kernel_size"]), *places)

    def parts(job: Job, worker: int) -> tuple[Sequence[Call], Sequence[Array]]:
        return (), [columns[job][:, :, i] for i in range(columns.shape[2])]

    return bind_sums(stream, out, places, attrs, sums, parts)
