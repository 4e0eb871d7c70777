"""Elements in another order, in a frame, or only those of a triangle or diagonal: copies of a few windows each."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave_cpu.kernels.table import KERNELS, PLAIN
from opweave_cpu.tiles import Array, constant, copy_call, in_turn, spread_pass


@KERNELS("flip", dtypes=PLAIN)
def flip(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    return copy_call(stream, out.view, np.flip(x.view, axes))


@KERNELS("roll", dtypes=PLAIN)
def roll(stream: Stream, op: str, out: Arg, x: Arg, *, shifts: tuple[int, ...]) -> Call:
    target, source = out.view, x.view
    # Along a shifted axis two ranges change places; one range of each axis makes a box, which is one copy.
    sides: list[list[tuple[slice, slice]]] = []
    for n, by in zip(out.shape, shifts, strict=True):
        whole = slice(None)
        sides.append([(slice(by, n), slice(0, n - by)), (slice(0, by), slice(n - by, n))] if by else [(whole, whole)])
    calls = []
    for pairs in product(*sides):
        to, of = zip(*pairs, strict=True)
        calls.append(copy_call(stream, target[to], source[of]))
    return in_turn(calls)


@KERNELS("pad", dtypes=PLAIN)
def pad(
    stream: Stream, op: str, out: Arg, x: Arg, *, widths: tuple[tuple[int, int], ...], mode: str, value: float
) -> Call:
    target = out.view
    box = [slice(before, before + n) for n, (before, _) in zip(x.shape, widths, strict=True)]
    calls = [copy_call(stream, target[tuple(box)], x.view)]
    # Axis by axis the box grows over its frame, which is made of what the box holds already.
    for axis, (n, (before, after)) in enumerate(zip(x.shape, widths, strict=True)):
        end = before + n
        for side, width in ((slice(0, before), before), (slice(end, end + after), after)):
            if width:
                frame = target[(*box[:axis], side, *box[axis + 1 :])]
                if mode == "constant":
                    fill = np.broadcast_to(constant(value, out.dtype), frame.shape)
                else:
                    of = _origin(mode, before, end, side)
                    fill = np.broadcast_to(target[(*box[:axis], of, *box[axis + 1 :])], frame.shape)
                    if mode == "reflect":
                        fill = np.flip(fill, axis)
                calls.append(copy_call(stream, frame, fill))
        box[axis] = slice(0, end + after)
    return in_turn(calls)


def _origin(mode: str, start: int, end: int, side: slice) -> slice:
    """Where along an axis the elements come from that fill one side of a box from ``start`` to ``end``."""
    ahead = side.start < start
    width = side.stop - side.start
    if mode == "edge":
        return slice(start, start + 1) if ahead else slice(end - 1, end)
    if mode == "reflect":
        return slice(start + 1, start + 1 + width) if ahead else slice(end - 1 - width, end - 1)
    return slice(end - width, end) if ahead else slice(start, start + width)


@KERNELS("tril", "triu", dtypes=PLAIN, inplace=True)
def triangle(stream: Stream, op: str, out: Arg, x: Arg, *, k: int) -> Call:
    target = out.view
    rows, columns = out.shape[-2:]
    # Whether an element goes depends on j - i alone: the mask of a matrix is one line, seen a step earlier in each row.
    line = np.arange(1 - rows, columns)
    gone = line > k if op == "tril" else line < k
    mask = np.ndarray((rows, columns), np.bool_, gone, rows - 1, (-1, 1))
    zero = constant(0, out.dtype)
    return spread_pass(stream, partial(_cut, zero), target, [x.view, np.broadcast_to(mask, out.shape)])


def _cut(zero: Array, x: Array, mask: Array, out: Array) -> None:
    np.copyto(out, x)  # costs nothing where both are one
    np.copyto(out, zero, where=mask)


@KERNELS("diag_embed", dtypes=PLAIN)
def diag_embed(stream: Stream, op: str, out: Arg, x: Arg, *, offset: int) -> Call:
    target, source = out.view, x.view
    block = target[..., max(-offset, 0) :, max(offset, 0) :]
    line = np.lib.stride_tricks.as_strided(
        block, source.shape, (*block.strides[:-2], block.strides[-2] + block.strides[-1])
    )
    zeros = np.broadcast_to(constant(0, out.dtype), out.shape)
    return in_turn([copy_call(stream, target, zeros), partial(np.copyto, line, source)])
