"""Elements in another order, padded, or only those of a triangle or diagonal: copies of a few windows each."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Stream
from opweave.ops.arrangement import frame_windows, roll_windows
from opweave_torch.kernels.binding import in_order, rounded
from opweave_torch.kernels.table import KERNELS, PLAIN
from opweave_torch.memory import tensor


def _copy_flipped(out: Tensor, x: Tensor, axes: tuple[int, ...]) -> None:
    # torch has neither negative strides nor an out= form.
    out.copy_(torch.flip(x, axes))


@KERNELS("flip", dtypes=PLAIN)
def flip(stream: Stream, op: str, out: Arg, x: Arg, *, axes: tuple[int, ...]) -> Call:
    return partial(_copy_flipped, tensor(out), tensor(x), axes)


@KERNELS("roll", dtypes=PLAIN)
def roll(stream: Stream, op: str, out: Arg, x: Arg, *, shifts: tuple[int, ...]) -> Call:
    target, source = tensor(out), tensor(x)
    return in_order([partial(target[to].copy_, source[of]) for to, of in roll_windows(out.shape, shifts)])


@KERNELS("pad", dtypes=PLAIN)
def pad(
    stream: Stream, op: str, out: Arg, x: Arg, *, widths: tuple[tuple[int, int], ...], mode: str, value: float
) -> Call:
    target = tensor(out)
    inside = tuple([slice(before, before + n) for n, (before, _) in zip(x.shape, widths, strict=True)])
    calls: list[Call] = [partial(target[inside].copy_, tensor(x))]
    if mode == "constant":
        return in_order([partial(target.fill_, rounded(value, out.dtype)), *calls])
    for axis, side, origin in frame_windows(x.shape, widths, mode):
        if mode == "reflect":
            calls.append(partial(_copy_flipped, target[side], target[origin], (axis,)))
        else:
            calls.append(partial(target[side].copy_, target[origin]))
    return in_order(calls)


@KERNELS("tril", "triu", dtypes=PLAIN, inplace=True)
def triangle(stream: Stream, op: str, out: Arg, x: Arg, *, k: int) -> Call:
    return partial(torch.tril if op == "tril" else torch.triu, tensor(x), k, out=tensor(out))


@KERNELS("diag_embed", dtypes=PLAIN)
def diag_embed(stream: Stream, op: str, out: Arg, x: Arg, *, offset: int) -> Call:
    target = tensor(out)
    return in_order([target.zero_, partial(torch.diagonal(target, offset, -2, -1).copy_, tensor(x))])
