"""Copies and concatenation. Elements are moved as words of the largest size that fits their layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.kernels import of_other_type
from opweave.graph.dtypes import DTYPES, as_dtype
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.pointwise import FORMULAS, Formula, bind_pointwise
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded
from opweave_opencl.tuning import GROUPS, processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["WORDS", "as_words", "copy_call", "window_of"]

FORMULAS.update(copy=Formula(), contiguous=Formula())

WORDS: Final = {8: as_dtype("i64"), 4: as_dtype("i32"), 2: as_dtype("i16"), 1: as_dtype("u8")}
"""Itemsize -> the type as which elements of that size are moved."""

BLOCK: Final = 16
"""Elements on a side of a block that ``transposition.cl`` transposes at once, in registers."""

SIDE: Final = processor_limit("transposed_side", 64, 16, 64, bounds=(16, 64))
"""Elements on a side of a work-item's part, of which whole blocks count: as many as the first cache holds."""


@KERNELS("copy", dtypes=DTYPES.values(), index=DTYPES.values(), inplace=True, moves=True)
@KERNELS("contiguous", dtypes=DTYPES.values(), index=DTYPES.values(), moves=True)
@KERNELS("assign", dtypes=DTYPES.values(), index=DTYPES.values(), moves=True)
def copy(stream: OpenCLStream, op: str, out: Arg, x: Arg) -> Call:
    return copy_call(stream, out, x)


@KERNELS("concat", dtypes=DTYPES.values(), moves=True, when=lambda step: of_other_type(step, *range(1, len(step.srcs))))
def concat(stream: OpenCLStream, op: str, out: Arg, *srcs: Arg, axis: int) -> Call:
    calls = []
    start = [0] * len(out.shape)
    out, *pieces = as_words(out, *srcs)
    for src in pieces:
        if src.size:
            calls.append(copy_call(stream, window_of(out, start, src.shape), src))
        start[axis] += src.shape[axis]
    return in_order(calls)


def copy_call(stream: OpenCLStream, out: Arg, x: Arg) -> Call:
    """The call that copies the elements of ``x`` to ``out``, of one shape and dtype; both may lie in any way."""
    target, sources = _as_words(out, x)
    return _transposition(stream, target, *sources) or bind_pointwise(stream, [Step("copy", target, sources, {})])


def _transposition(stream: OpenCLStream, out: Arg, x: Arg) -> Call | None:
    """The copy by transposed blocks, for processors and operands that are contiguous along different axes."""
    tuning = stream.target.tuning
    if tuning.row_group > 1:
        return None
    strides = [element_strides(arg) for arg in (out, x)]
    order = sorted(range(len(out.shape)), key=lambda axis: -abs(strides[0][axis]))
    lengths, (to, source) = coalesce([out.shape[a] for a in order], [[own[a] for a in order] for own in strides])
    if to[0] != 1 or 1 not in source[1:]:
        return None
    turned = source.index(1, 1)
    n, m = lengths[0], lengths[turned]
    if min(n, m) < BLOCK:
        return None
    rest = [axis for axis in range(1, len(lengths)) if axis != turned]
    shape = [lengths[axis] for axis in rest]
    words = [n, m, source[0], to[turned], prod(shape), len(shape), *padded(shape, 1)]
    for own in (source, to):
        words += padded([own[axis] for axis in rest], 0)
    words += [element_offset(x), element_offset(out)]
    side = SIDE.value // BLOCK * BLOCK
    program = stream.target.programs.get("transposition", {"VEC": str(BLOCK), "SIDE": str(side), "T": out.dtype.name})
    size = -(-n // side), -(-m // side), min(prod(shape), GROUPS.value)
    return stream.launch(program, "transpose", size, (1, 1, 1), (x, out), words)


def window_of(arg: Arg, start: list[int] | tuple[int, ...], shape: tuple[int, ...]) -> Arg:
    """The part of an operand of plain dtype that begins at ``start``."""
    offset = arg.offset + sum(at * stride for at, stride in zip(start, arg.strides, strict=True))
    return Arg(arg.buffer, offset, arg.dtype, shape, arg.strides)


def as_words(*args: Arg) -> Sequence[Arg]:
    """Quantized operands as words, the widest that all of their rows are made of; others as they are."""
    if args[0].dtype.block == 1:
        return args
    rows = [arg.dtype.row_bytes(arg.shape[-1]) for arg in args]
    steps = [*rows, *[arg.offset for arg in args]]
    for arg in args:
        steps += [stride for stride, length in zip(arg.strides[:-1], arg.shape[:-1], strict=True) if length > 1]
    width = next(w for w in (8, 4, 2, 1) if not any(step % w for step in steps))
    return [
        Arg(arg.buffer, arg.offset, WORDS[width], (*arg.shape[:-1], row // width), (*arg.strides[:-1], width))
        for arg, row in zip(args, rows, strict=True)
    ]


def _as_words(out: Arg, x: Arg) -> tuple[Arg, tuple[Arg]]:
    """The operands as words, the widest that their rows are made of."""
    both = (out, x)
    unit = out.dtype.itemsize if out.dtype.block == 1 else 1
    shape: Axes
    strides: list[Axes]
    if out.is_dense and x.is_dense:
        shape, strides = (out.nbytes // unit,), [(unit,), (unit,)]
    elif out.dtype.block == 1:
        shape, strides = out.shape, [out.strides, x.strides]
    else:
        shape = (*out.shape[:-1], out.dtype.row_bytes(out.shape[-1]))
        strides = [(*arg.strides[:-1], 1) for arg in both]
    width = unit
    if shape and all(own[-1] == unit for own in strides):
        steps = [shape[-1] * unit, *[arg.offset for arg in both]]
        for own in strides:
            steps += [stride for stride, length in zip(own[:-1], shape[:-1], strict=True) if length > 1]
        width = next((w for w in (8, 4, 2, 1) if w >= unit and not any(step % w for step in steps)), unit)
        shape = (*shape[:-1], shape[-1] * unit // width)
        strides = [(*own[:-1], width) for own in strides]
    words = [Arg(arg.buffer, arg.offset, WORDS[width], shape, own) for arg, own in zip(both, strides, strict=True)]
    return words[0], (words[1],)
