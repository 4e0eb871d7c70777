"""Elements in another order, in a frame, or only those of a triangle or diagonal: copies of a few windows each."""

from __future__ import annotations

from functools import partial

import numpy as np

from opweave.contract import Arg, Call, Stream
from opweave.ops.arrangement import frame_windows, roll_windows
from opweave_cpu.kernels.table import KERNELS, PLAIN
from opweave_cpu.tiles import Array, constant, copy_call, in_turn, spread_pass


@KERNELS("flip", dtypes=PLAIN)
def flip(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    return copy_call(stream, out.view, np.flip(x.view, axes))


@KERNELS("roll", dtypes=PLAIN)
def roll(stream: Stream, op: str, out: Arg, x: Arg, *, shifts: tuple[int, ...]) -> Call:
    target, source = out.view, x.view
    return in_turn([copy_call(stream, target[to], source[of]) for to, of in roll_windows(out.shape, shifts)])


@KERNELS("pad", dtypes=PLAIN)
def pad(
    stream: Stream, op: str, out: Arg, x: Arg, *, widths: tuple[tuple[int, int], ...], mode: str, value: float
) -> Call:
    target, fill = out.view, constant(value, out.dtype)
    inside = tuple([slice(before, before + n) for n, (before, _) in zip(x.shape, widths, strict=True)])
    calls = [copy_call(stream, target[inside], x.view)]
    for axis, side, origin in frame_windows(x.shape, widths, mode):
        frame, source = target[side], fill if mode == "constant" else target[origin]
        source = np.flip(source, axis) if mode == "reflect" else np.broadcast_to(source, frame.shape)
        calls.append(copy_call(stream, frame, source))
    return in_turn(calls)


@KERNELS("tril", "triu", dtypes=PLAIN, inplace=True)
def triangle(stream: Stream, op: str, out: Arg, x: Arg, *, k: int) -> Call:
    target = out.view
    rows, columns = out.shape[-2:]
    # The mask depends on j - i alone: its rows are windows of one line, each of which begins an element earlier.
    line = np.arange(1 - rows, columns)
    gone = line > k if op == "tril" else line < k
    mask = np.ndarray((rows, columns), np.bool_, gone, rows - 1, (-1, 1))
    zero = constant(0, out.dtype)
    return spread_pass(stream, partial(_cut, zero), target, x.view, np.broadcast_to(mask, out.shape))


def _cut(zero: Array, x: Array, mask: Array, out: Array) -> None:
    np.copyto(out, x)  # NumPy returns at once where both are the same memory
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
