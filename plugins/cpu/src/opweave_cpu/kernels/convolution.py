"""Convolutions: columns in tiles and BLAS, element by element for depthwise ones, as they lie for 1x1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.dtypes import DType
from opweave.layout import is_dense
from opweave_cpu.kernels.table import FLOATS, KERNELS, PLAIN
from opweave_cpu.lanes import Cut, Rooms, at, bind_lanes, cuts_of, full_cuts, is_blas_matrix, lane_count, overlap
from opweave_cpu.tiles import TILE, Array, compute_dtype

COLUMN_TILE: Final = 1 << 20
"""Bytes of columns at a time: what a product reads while it is in the second-level cache."""

FEWEST_COLUMNS: Final = 64
"""With fewer of them BLAS slows down more than the cache helps."""


def _needs_packed_output(step: Step) -> str | None:
    return None if step.out.is_dense else "the output is not dense"


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


def _offsets(kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each element of a kernel, and how far into its window it lies."""
    places = product(*map(range, kernel))
    return [(place, tuple([k * d for k, d in zip(place, dilation, strict=True)])) for place in places]


def _grouped(x: Array, groups: int) -> Array:
    """Channels by groups: (batch, groups, channels of a group, *spatial)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _packs(w: Arg, dtype: DType) -> bool:
    return w.dtype is not dtype or not is_dense(w.shape, w.strides, w.dtype)


def _weights(w: Arg, rooms: Rooms, workspace: Arg | None) -> tuple[Array, Call | None]:
    """The weights in the type of the computation, and the call that converts them where they have another one."""
    packed = rooms.shared(workspace)
    if not packed:
        return w.view, None
    room = packed[0].reshape(w.shape)
    return room, partial(np.copyto, room, w.view)


def _after(first: Call | None, second: Call) -> Call:
    return second if first is None else partial(_both, first, second)


def _both(first: Call, second: Call) -> None:
    first()
    second()


# --- convolution ----------------------------------------------------------------------------------------------------


class _Conv:
    """How a convolution is cut, from its operands (bound or not) and attributes."""

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: dict[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.groups: int = attrs["groups"]
        self.kernel, self.places = w.shape[2:], out.shape[2:]
        self.outputs, self.inputs = w.shape[0] // self.groups, w.shape[1]
        self.depthwise = self.inputs == 1 and self.groups > 1
        self.converts = out.dtype is not self.dtype
        item = self.dtype.itemsize
        shared = [(w.size, self.dtype)] if _packs(w, self.dtype) else []
        work = out.size * prod(w.shape[1:])
        if self.depthwise:
            self.jobs: list[Any] = cuts_of(x.shape[0], (x.shape[1], self.outputs, *self.places), TILE // item)
            tile = min(TILE // item, prod(out.shape[1:]))
            lanes = lane_count(len(self.jobs), work)
            self.rooms = Rooms(lanes, [(tile, self.dtype)] * (1 + self.converts), shared)
            self.direct = False
            return
        height = self.inputs * prod(self.kernel)
        self.direct = self._is_product(x, attrs)
        if self.direct and not self.converts:
            columns = prod(self.places)
        else:
            columns = max(FEWEST_COLUMNS, COLUMN_TILE // (item * height))
        columns = min(columns, prod(self.places))
        cuts = full_cuts(self.places, columns)
        self.jobs = list(product(range(x.shape[0]), range(self.groups), cuts))
        own = [(self.outputs * columns, self.dtype)] if self.converts else []
        if not self.direct:
            own.append((height * columns, self.dtype))
        self.rooms = Rooms(lane_count(len(self.jobs), work), own, shared)

    def _is_product(self, x: Arg, attrs: dict[str, Any]) -> bool:
        """Whether the input is the columns already: a kernel of one element that meets every element."""
        if max(*self.kernel, *attrs["stride"]) > 1 or any(map(any, attrs["padding"])) or x.dtype is not self.dtype:
            return False
        channels, length = x.shape[1], prod(x.shape[2:])
        if not is_dense(x.shape[2:], x.strides[2:], x.dtype):
            return False
        strides = (x.strides[1], x.dtype.itemsize)
        return is_blas_matrix((channels, length), strides, x.dtype.itemsize)


def _conv_workspace(step: Step) -> int:
    return _Conv(step.out, step.srcs[0], step.srcs[1], step.attrs).rooms.nbytes  # type: ignore[arg-type]


@KERNELS("conv1d", "conv2d", "conv3d", dtypes=FLOATS, when=_needs_packed_output, workspace=_conv_workspace)
def conv(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, workspace: Arg | None, **attrs: Any
) -> Call:
    plan = _Conv(out, x, w, attrs)
    weights, convert = _weights(w, plan.rooms, workspace)
    bias = None if b is None else b.view
    lengths, stride = x.shape[2:], attrs["stride"]
    shifts = [before for before, _ in attrs["padding"]]
    offsets = _offsets(w.shape[2:], attrs["dilation"])

    if plan.depthwise:
        every, pair = slice(None), (x.shape[1], plan.outputs)
        stored, inputs = out.view.reshape(x.shape[0], *pair, *plan.places), x.view
        filters = weights.reshape(*pair, *w.shape[2:])
        biases_of = None if bias is None else bias.reshape(*pair, *[1] * len(lengths))

        def depthwise(jobs: Sequence[tuple[int, Cut]], rooms: list[Array]) -> None:
            for n, (channels, copies, *cut) in jobs:
                target = stored[at(n, channels, copies, *cut)]
                products = rooms[0][: target.size].reshape(target.shape)
                total = rooms[1][: target.size].reshape(target.shape) if plan.converts else target
                total[...] = 0 if biases_of is None else biases_of[channels, copies]
                for place, offset in offsets:
                    to, of, _ = _places_in(cut, offset, lengths, stride, shifts)
                    factors = filters[at(channels, copies, *place)].reshape(*target.shape[:2], *[1] * len(lengths))
                    part, sum_ = products[at(every, every, *to)], total[at(every, every, *to)]
                    np.multiply(inputs[at(n, channels, None, *of)], factors, part)
                    np.add(sum_, part, sum_)
                if total is not target:
                    np.copyto(target, total, "unsafe")

        return _after(convert, bind_lanes(stream, plan.jobs, plan.rooms, workspace, depthwise))

    groups = plan.groups
    grouped = _grouped(x.view, groups)
    matrices = weights.reshape(groups, plan.outputs, -1)
    targets = out.view.reshape(x.shape[0], groups, plan.outputs, -1)
    biases = None if bias is None else bias.reshape(groups, -1, 1)

    def columns(jobs: Sequence[tuple[int, int, Cut]], rooms: list[Array]) -> None:
        for n, g, cut in jobs:
            start = int(np.ravel_multi_index([c.start for c in cut], plan.places))
            count = prod([c.stop - c.start for c in cut])
            target = targets[n, g][:, start : start + count]
            if plan.direct:
                right = grouped[n, g].reshape(plan.inputs, -1)[:, start : start + count]
            else:
                right = rooms[-1][: plan.inputs * len(offsets) * count].reshape(-1, count)
                _fill_columns(right, grouped[n, g], cut, offsets, lengths, stride, shifts)
            result = rooms[0][: target.size].reshape(target.shape) if plan.converts else target
            np.matmul(matrices[g], right, result)
            if biases is not None:
                np.add(result, biases[g], result)
            if result is not target:
                np.copyto(target, result, "unsafe")

    return _after(convert, bind_lanes(stream, plan.jobs, plan.rooms, workspace, columns))


def _fill_columns(
    columns: Array,
    x: Array,
    cut: Cut,
    offsets: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    lengths: Sequence[int],
    stride: Sequence[int],
    shifts: Sequence[int],
) -> None:
    """Columns (channels · elements of the kernel, places of the window) of the input (channels, *spatial)."""
    windows = columns.reshape(x.shape[0], len(offsets), *[c.stop - c.start for c in cut])
    for i, (_, offset) in enumerate(offsets):
        to, of, whole = _places_in(cut, offset, lengths, stride, shifts)
        target = windows[:, i]
        if not whole:
            target.fill(0)
        np.copyto(target[at(slice(None), *to)], x[at(slice(None), *of)])


# --- transposed convolution -----------------------------------------------------------------------------------------


class _Transposed:
    """How a transposed convolution is cut: some channels of the output at a time, for which the input passes by."""

    def __init__(self, out: Arg, x: Arg, w: Arg, attrs: dict[str, Any]) -> None:
        self.dtype = compute_dtype(out.dtype)
        self.groups: int = attrs["groups"]
        self.inputs, self.outputs = w.shape[0] // self.groups, w.shape[1]
        self.converts = out.dtype is not self.dtype
        item, length = self.dtype.itemsize, prod(x.shape[2:])
        elements, places = prod(w.shape[2:]), prod(out.shape[2:])
        some = min(self.outputs, max(16, TILE // (item * places)))
        columns = min(length, max(FEWEST_COLUMNS, COLUMN_TILE // (item * some * elements)))
        self.cuts = full_cuts(x.shape[2:], columns)
        pieces = [slice(i, min(i + some, self.outputs)) for i in range(0, self.outputs, some)]
        self.jobs = list(product(range(x.shape[0]), range(self.groups), pieces))
        own = [(some * elements * columns, self.dtype), (self.inputs * columns, self.dtype)]
        if self.converts:
            own.append((some * places, self.dtype))
        lanes = lane_count(len(self.jobs), x.size * prod(w.shape[1:]))
        self.rooms = Rooms(lanes, own, [(w.size, self.dtype)] if _packs(w, self.dtype) else [])


def _transposed_workspace(step: Step) -> int:
    return _Transposed(step.out, step.srcs[0], step.srcs[1], step.attrs).rooms.nbytes  # type: ignore[arg-type]


@KERNELS(
    "conv_transpose1d", "conv_transpose2d", dtypes=FLOATS, when=_needs_packed_output, workspace=_transposed_workspace
)
def conv_transpose(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, workspace: Arg | None, **attrs: Any
) -> Call:
    plan = _Transposed(out, x, w, attrs)
    weights, convert = _weights(w, plan.rooms, workspace)
    groups, kernel, lengths = plan.groups, w.shape[2:], out.shape[2:]
    offsets = _offsets(kernel, attrs["dilation"])
    sources, targets = _grouped(x.view, groups), _grouped(out.view, groups)
    filters = weights.reshape(groups, plan.inputs, plan.outputs, -1)
    biases = None if b is None else b.view.reshape(groups, plan.outputs, *[1] * len(lengths))
    stride, padding = attrs["stride"], attrs["padding"]

    def scatter(jobs: Sequence[tuple[int, int, slice]], rooms: list[Array]) -> None:
        for n, g, channels in jobs:
            target = targets[n, g, channels]
            total = rooms[2][: target.size].reshape(target.shape) if plan.converts else target
            total[...] = 0 if biases is None else biases[g, channels]
            left = filters[g][:, channels].reshape(plan.inputs, -1).T
            for cut in plan.cuts:
                shape = [c.stop - c.start for c in cut]
                count = prod(shape)
                right = rooms[1][: plan.inputs * count].reshape(plan.inputs, count)
                np.copyto(right.reshape(-1, *shape), sources[at(n, g, slice(None), *cut)])
                products = rooms[0][: left.shape[0] * count].reshape(-1, count)
                np.matmul(left, right, products)
                parts = products.reshape(len(target), len(offsets), *shape)
                for i, (_, offset) in enumerate(offsets):
                    # Element i of the input adds to i · stride + offset - padding of the output.
                    of, to, _ = _places_in(cut, offset, lengths, stride, padding)
                    sum_ = total[at(slice(None), *to)]
                    np.add(sum_, parts[at(slice(None), i, *of)], sum_)
            if total is not target:
                np.copyto(target, total, "unsafe")

    return _after(convert, bind_lanes(stream, plan.jobs, plan.rooms, workspace, scatter))


# --- columns --------------------------------------------------------------------------------------------------------


@KERNELS("im2col", dtypes=PLAIN, when=_needs_packed_output)
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

    def copy(jobs: Sequence[tuple[int, slice]], rooms: list[Array]) -> None:
        for n, channels in jobs:
            columns = targets[n, channels]
            _fill_columns(columns, source[n, channels], whole, offsets, lengths, stride, attrs["padding"])

    return bind_lanes(stream, jobs, Rooms(lane_count(len(jobs), out.size), []), None, copy)


def _channel_slices(channels: int, size: int) -> Iterator[slice]:
    """Slices of the channels with about a tile of ``size`` elements each."""
    step = max(1, TILE * channels // size)
    return (slice(i, min(i + step, channels)) for i in range(0, channels, step))
