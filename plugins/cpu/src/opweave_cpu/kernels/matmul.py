"""Products, by BLAS. Operands that BLAS cannot read as they lie, and half types, are packed into scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.graph.dtypes import DType, as_dtype
from opweave.ops.blocks import fields_of
from opweave_cpu.blocks import RowDecoder, decoder_bytes, longest, row_pieces
from opweave_cpu.hardware import has_openblas
from opweave_cpu.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_cpu.tiles import Array, Scratch, compute_dtype, in_turn, padded, scratch_array

_F32: Final = as_dtype("f32")


def _is_matrix(arg: Arg) -> bool:
    """Whether the last two axes lie as BLAS reads a matrix or a transposed one."""
    if len(arg.shape) < 2 or not arg.dtype.is_float:
        return True  # one row; or integers, for which there is no BLAS
    m, n = arg.shape[-2:]
    down, across = arg.strides[-2:]
    item = arg.dtype.itemsize
    rows = across == item and down % item == 0 and down >= n * item
    columns = down == item and across % item == 0 and across >= m * item
    return rows or columns


def must_pack(arg: Arg, dtype: DType) -> bool:
    """Whether BLAS cannot read the operand as it lies."""
    return arg.dtype is not dtype or not _is_matrix(arg)


# --- the other way round --------------------------------------------------------------------------------------------

FEW_ROWS: Final = range(2, 49)
"""Rows of ``x`` with which OpenBLAS takes up to twice as long for ``x @ weights.T`` in f32 as for its transpose,
``weights @ x.T``; storing that transposed takes less than is won."""

VERY_FEW_ROWS: Final = 4
"""Fewer have a kernel of their own, up to a million multiplications."""


def is_turned(rows: int, inputs: int, outputs: int, dtype: DType) -> bool:
    """Whether ``rows`` rows are multiplied by weights, ``outputs`` rows, faster the other way round."""
    if rows not in FEW_ROWS or inputs < 128 or dtype is not _F32 or not has_openblas():
        return False
    return rows * inputs * outputs > (1 << 18 if rows >= VERY_FEW_ROWS else 1 << 20)


def tile_product(left: Array, weights: Array, room: Array, lead: Sequence[int], *, turned: bool) -> tuple[Call, Array]:
    """The call ``left @ weights.T``, and its result in ``room``, which is flat; ``lead`` is the shape of the rows."""
    rows, n = len(left), len(weights)
    room = room[: rows * n]
    if turned:
        return partial(np.matmul, weights, left.T, room.reshape(n, rows)), np.moveaxis(room.reshape(n, *lead), 0, -1)
    return product_call(left, weights.T, room.reshape(rows, n)), room.reshape(*lead, n)


def store_calls(result: Array, bias: Array | None, out: Array, room: Array | None = None) -> list[Call]:
    """The calls that store a result, plus a bias, rounded once.

    A result that was computed the other way round is first put in order, in ``room``, which is flat: rounding across
    the rows takes twice as long.
    """
    if result.dtype == out.dtype:
        return [partial(np.copyto, out, result) if bias is None else partial(np.add, result, bias, out)]
    calls: list[Call] = []
    wide = result if room is None else room[: result.size].reshape(result.shape)
    if bias is not None:
        calls.append(partial(np.add, result, bias, wide))
    elif room is not None:
        calls.append(partial(np.copyto, wide, result))
    return [*calls, partial(np.copyto, out, wide, "unsafe")]


# --- matmul ---------------------------------------------------------------------------------------------------------


def _packed_shape(arg: Arg) -> tuple[int, ...]:
    """The shape to pack: a matrix that is repeated along leading axes is packed once."""
    repeats = [stride == 0 for stride in arg.strides[:-2]]
    return (*(1 if again else n for n, again in zip(arg.shape[:-2], repeats, strict=True)), *arg.shape[-2:])


def _is_turned(a: Arg, b: Arg, dtype: DType) -> bool:
    """Whether ``b`` is a transposed matrix of weights, for which `is_turned`."""
    if len(a.shape) != 2 or len(b.shape) != 2 or must_pack(b, dtype) or b.strides[0] != dtype.itemsize:
        return False
    return is_turned(a.shape[0], b.shape[0], b.shape[1], dtype)


def _matmul_workspace(step: Step) -> int:
    dtype = compute_dtype(step.out.dtype)
    sizes = [prod(_packed_shape(arg)) for arg in step.srcs if must_pack(arg, dtype)]
    if step.out.dtype is not dtype or _is_turned(step.srcs[0], step.srcs[1], dtype):
        sizes.append(step.out.size)
    return sum(padded(size * dtype.itemsize) for size in sizes)


@KERNELS("matmul", dtypes=NUMBERS, workspace=_matmul_workspace)
def matmul(stream: Stream, op: str, out: Arg, a: Arg, b: Arg, *, workspace: Arg | None) -> Call:
    if workspace is None:
        return product_call(a.view, b.view, out.view)
    dtype = compute_dtype(out.dtype)
    scratch = Scratch(workspace)
    calls: list[Call] = []

    def operand(arg: Arg) -> Array:
        if not must_pack(arg, dtype):
            return arg.view
        packed = scratch.take(_packed_shape(arg), dtype)
        once = tuple(slice(n) for n in packed.shape)
        calls.append(partial(np.copyto, packed, arg.view[once]))
        return packed

    left, right = operand(a), operand(b)
    if _is_turned(a, b, dtype):
        call, result = tile_product(left, right.T, scratch.take((out.size,), dtype), out.shape[:1], turned=True)
        return in_turn([*calls, call, *store_calls(result, None, out.view)])
    result = out.view if out.dtype is dtype else scratch.take(out.shape, dtype)
    calls.append(product_call(left, right, result))
    if out.dtype is not dtype:
        calls.append(partial(np.copyto, out.view, result, "unsafe"))
    return in_turn(calls)


SMALL_RESULT: Final = 1 << 14
"""Bytes of a result up to which `ndarray.dot` is faster: it finds the same product in half the time, but first fills
the result with zeros, which for square matrices of 512 takes a twentieth of all."""


def product_call(a: Array, b: Array, out: Array) -> Call:
    """The call ``out = a @ b``."""
    if a.ndim == 2 and out.nbytes <= SMALL_RESULT and out.flags.c_contiguous:
        return partial(a.dot, b, out)
    return partial(np.matmul, a, b, out)


# --- linear ---------------------------------------------------------------------------------------------------------


def _is_plain(x: Arg, w: Arg, out: Arg) -> bool:
    dtype = out.dtype
    return not dtype.is_half and x.is_dense and out.is_dense and not must_pack(x, dtype) and not must_pack(w, dtype)


def _linear_workspace(step: Step) -> int:
    x, w, *_ = step.srcs
    dtype = compute_dtype(step.out.dtype)
    rows = x.size // w.shape[1]
    if _is_plain(x, w, step.out):
        return step.out.nbytes if is_turned(rows, w.shape[1], w.shape[0], dtype) else 0
    tile = longest(row_pieces(w, rows))
    sizes = [x.size, tile * w.shape[1], rows * tile]
    if step.out.dtype is not dtype and is_turned(rows, w.shape[1], tile, dtype):
        sizes.append(rows * tile)
    return sum(padded(size * dtype.itemsize) for size in sizes)


@KERNELS("linear", dtypes=NUMBERS, workspace=_linear_workspace)
def linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, workspace: Arg | None) -> Call:
    if not _is_plain(x, w, out):
        return _linear_by_tiles(out, x, w, b, workspace)
    rows, target = x.view, out.view
    if rows.ndim != 2:
        rows, target = rows.reshape(-1, w.shape[1]), target.reshape(-1, w.shape[0])
    if workspace is not None:
        room = scratch_array(workspace, out.size, out.dtype)
        call, result = tile_product(rows, w.view, room, rows.shape[:1], turned=True)
        return in_turn([call, *store_calls(result, None if b is None else b.view, target)])
    call = product_call(rows, w.view.T, target)
    return call if b is None else in_turn([call, partial(np.add, target, b.view, target)])


def _linear_by_tiles(out: Arg, x: Arg, w: Arg, b: Arg | None, workspace: Arg | None) -> Call:
    """Some rows of the weights at a time: converted, multiplied, rounded into their columns of ``out``."""
    dtype = compute_dtype(out.dtype)
    scratch = Scratch(workspace)
    inputs = w.shape[1]
    rows = x.size // inputs
    pieces = row_pieces(w, rows)
    tile = longest(pieces)
    packed = scratch.take(x.shape, dtype)
    results = scratch.take((rows * tile,), dtype)
    weights = scratch.take((tile * inputs,), dtype)
    left, target, stored = packed.reshape(-1, inputs), out.view, w.view
    turned = is_turned(rows, inputs, tile, dtype)
    room = scratch.take((rows * tile,), dtype) if turned and out.dtype is not dtype else None
    bias = None if b is None else b.view
    calls: list[Call] = [partial(np.copyto, packed, x.view)]
    for piece in pieces:
        some = weights[: (piece.stop - piece.start) * inputs].reshape(-1, inputs)
        call, result = tile_product(left, some, results, out.shape[:-1], turned=turned)
        calls += [partial(np.copyto, some, stored[piece]), call]
        calls += store_calls(result, None if bias is None else bias[piece], target[..., piece], room)
    return in_turn(calls)


# --- linear with quantized weights ----------------------------------------------------------------------------------


def lies_ready(arg: Arg, dtype: DType) -> bool:
    """Whether an operand can be read, or written, as rows of ``dtype`` where it lies."""
    return arg.dtype is dtype and arg.is_dense


def _blocks_workspace(step: Step) -> int:
    x, w, *_ = step.srcs
    dtype = compute_dtype(step.out.dtype)
    rows = x.size // w.shape[1]
    pieces = row_pieces(w, rows)
    packed = 0 if lies_ready(x, dtype) else padded(x.size * dtype.itemsize)
    turned = is_turned(rows, w.shape[1], longest(pieces), dtype)
    result = 0 if lies_ready(step.out, dtype) and not turned else padded(rows * longest(pieces) * dtype.itemsize)
    if turned and step.out.dtype is not dtype:
        result *= 2
    return packed + result + decoder_bytes(w, pieces, dtype)


@KERNELS("linear", dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED], workspace=_blocks_workspace)
def linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, workspace: Arg | None
) -> Call:
    dtype = compute_dtype(out.dtype)
    scratch = Scratch(workspace)
    outputs, inputs = w.shape
    pieces, stored, target = row_pieces(w, x.size // inputs), fields_of(w.view, blocks), out.view
    decoder = RowDecoder(w, pieces, dtype, scratch)
    calls: list[Call] = []
    left = x.view
    if not lies_ready(x, dtype):
        left = scratch.take(x.shape, dtype)
        calls.append(partial(np.copyto, left, x.view))
    left = left.reshape(-1, inputs)
    turned = is_turned(len(left), inputs, longest(pieces), dtype)
    direct = lies_ready(out, dtype) and not turned
    size = len(left) * longest(pieces)
    results = target.reshape(-1, outputs) if direct else scratch.take((size,), dtype)
    room = scratch.take((size,), dtype) if turned and out.dtype is not dtype else None
    bias = None if b is None else b.view
    for piece in pieces:
        decode, tile = decoder(piece.stop - piece.start)
        some = None if bias is None else bias[piece]
        if direct:
            result = results[:, piece]
            calls += [partial(decode, stored[piece]), product_call(left, tile.T, result)]
            if some is not None:
                calls.append(partial(np.add, result, some, result))
        else:
            call, result = tile_product(left, tile, results, out.shape[:-1], turned=turned)
            calls += [partial(decode, stored[piece]), call, *store_calls(result, some, target[..., piece], room)]
    return in_turn(calls)
