"""Elements in another order, padded, or only those of a triangle or diagonal: copies of a few windows each."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from opweave.contract import Arg, Call, Stream
from opweave_torch.kernels.binding import in_order, rounded
from opweave_torch.kernels.table import KERNELS, PLAIN
from opweave_torch.memory import tensor


def _copy_flipped(out: torch.Tensor, x: torch.Tensor, axes: tuple[int, ...]) -> None:
    # torch has neither negative strides nor an out= form.
    out.copy_(torch.flip(x, axes))


@KERNELS("flip", dtypes=PLAIN)
def flip(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    return partial(_copy_flipped, tensor(out), tensor(x), axes)


@KERNELS("roll", dtypes=PLAIN)
def roll(stream: Stream, op: str, out: Arg, x: Arg, *, shifts: tuple[int, ...]) -> Call:
    target, source = tensor(out), tensor(x)
    # Along a shifted axis two parts are exchanged; each combination of parts of all axes is one copy.
    sides: list[list[tuple[slice, slice]]] = []
    for n, by in zip(out.shape, shifts, strict=True):
        whole = slice(None)
        sides.append([(slice(by, n), slice(0, n - by)), (slice(0, by), slice(n - by, n))] if by else [(whole, whole)])
    calls: list[Call] = []
    for pairs in product(*sides):
        to, of = zip(*pairs, strict=True)
        calls.append(partial(target[to].copy_, source[of]))
    return in_order(calls)


@KERNELS("pad", dtypes=PLAIN)
def pad(
    stream: Stream, op: str, out: Arg, x: Arg, *, widths: tuple[tuple[int, int], ...], mode: str, value: float
) -> Call:
    target = tensor(out)
    box = [slice(before, before + n) for n, (before, _) in zip(x.shape, widths, strict=True)]
    copy = partial(target[tuple(box)].copy_, tensor(x))
    if mode == "constant":
        return in_order([partial(target.fill_, rounded(value, out.dtype)), copy])
    calls: list[Call] = [copy]
    # Axis by axis the box grows over its frame, which is made of what the box holds already.
    for axis, (n, (before, after)) in enumerate(zip(x.shape, widths, strict=True)):
        end = before + n
        for side, width in ((slice(0, before), before), (slice(end, end + after), after)):
            if width:
                frame = target[(*box[:axis], side, *box[axis + 1 :])]
                origin = target[(*box[:axis], _origin(mode, before, end, side), *box[axis + 1 :])]
                if mode == "reflect":
                    calls.append(partial(_copy_flipped, frame, origin, (axis,)))
                else:
                    calls.append(partial(frame.copy_, origin))
        box[axis] = slice(0, end + after)
    return in_order(calls)


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
    return partial(torch.tril if op == "tril" else torch.triu, tensor(x), k, out=tensor(out))


@KERNELS("diag_embed", dtypes=PLAIN)
def diag_embed(stream: Stream, op: str, out: Arg, x: Arg, *, offset: int) -> Call:
    target = tensor(out)
    return in_order([target.zero_, partial(torch.diagonal(target, offset, -2, -1).copy_, tensor(x))])
