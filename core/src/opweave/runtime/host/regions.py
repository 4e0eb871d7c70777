"""Operands as rows at equal distances, which is what devices transfer at once (`Buffer.upload_2d`), and transfers of
them on a stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from opweave.contract.step import Arg
from opweave.errors import LayoutError

if TYPE_CHECKING:
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.stream import Stream

__all__ = ["Rectangles", "download", "rectangles", "upload"]

Array = np.ndarray[Any, Any]


class Rectangles(NamedTuple):
    """An operand as equal groups of rows.

    Attributes:
        offsets: bytes from the beginning of the buffer to that of each group, in the order of the elements.
        pitch: bytes from one row to the next.
        number, width: rows of a group, and bytes of a row.
    """

    offsets: list[int]
    pitch: int
    number: int
    width: int

    def of(self, array: Array) -> Iterator[tuple[int, Array]]:
        """The offset of each group and its rows in a dense array with the elements of the operand."""
        rows = array.reshape(-1).view(np.uint8).reshape(len(self.offsets), self.number, self.width)
        return zip(self.offsets, rows, strict=True)


def rectangles(arg: Arg) -> Rectangles:
    """The fewest groups of rows that an operand consists of. It has elements, and none of them twice.

    Raises:
        LayoutError: an operand that repeats elements, or whose rows have blocks apart from each other.
    """
    dtype, axes = arg.dtype, [(n, s) for n, s in zip(arg.shape, arg.strides, strict=True)]
    width = dtype.itemsize
    if dtype.block > 1:
        n, stride = axes.pop()
        width = dtype.row_bytes(n)
        if stride != dtype.itemsize and n > dtype.block:
            raise LayoutError(f"{arg!r} shows columns of blocks, which are not transferred by themselves")
    axes = [(n, s) for n, s in axes if n != 1]
    if any(not stride for _, stride in axes):
        raise LayoutError(f"{arg!r} shows elements repeatedly")
    while axes and axes[-1][1] == width:
        width *= axes.pop()[0]
    count, pitch = axes.pop() if axes else (1, width)
    while axes and axes[-1][1] == count * pitch:
        count *= axes.pop()[0]
    steps = [range(0, n * stride, stride) for n, stride in axes]
    return Rectangles([arg.offset + sum(at) for at in product(*steps)], pitch, count, width)


def upload(stream: Stream, arg: Arg, array: Array) -> None:
    """Queue writing a dense array of the operand's dtype and shape to it. The array must not be changed before
    `Stream.synchronize`."""
    found = rectangles(arg)
    for offset, rows in found.of(array):
        stream.upload_2d(_buffer(arg), offset, found.pitch, rows)


def download(stream: Stream, arg: Arg, shape: tuple[int, ...]) -> Array:
    """Queue reading an operand; returns an array of ``shape``, which has the values after `Stream.synchronize`."""
    # Repeated axes are read once and repeated in the result.
    once, have = (
        tuple([n if stride else 1 for n, stride in zip(lengths, arg.strides, strict=True)])
        for lengths in (arg.shape, shape)
    )
    out = np.empty(have, arg.dtype.numpy)
    found = rectangles(Arg(arg.buffer, arg.offset, arg.dtype, once, arg.strides))
    for offset, rows in found.of(out):
        stream.download_2d(_buffer(arg), offset, found.pitch, rows)
    return out if have == shape else np.broadcast_to(out, shape)


def _buffer(arg: Arg) -> Buffer:
    assert arg.buffer is not None
    return arg.buffer
