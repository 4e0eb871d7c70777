"""Products, by BLAS. Operands that BLAS cannot read as they lie, and half types, are packed into scratch memory."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.dtypes import DType, as_dtype
from opweave.ops.blocks import fields_of
from opweave_cpu.blocks import RowDecoder, decoder_bytes, longest, row_pieces
from opweave_cpu.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_cpu.tiles import Array, Scratch, compute_dtype, in_turn, padded


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


# --- matmul ---------------------------------------------------------------------------------------------------------


def _packed_shape(arg: Arg) -> tuple[int, ...]:
    """The shape to pack: a matrix that is repeated along leading axes is packed once."""
    repeats = [stride == 0 for stride in arg.strides[:-2]]
    return (*(1 if again else n for n, again in zip(arg.shape[:-2], repeats, strict=True)), *arg.shape[-2:])


def _matmul_workspace(step: Step) -> int:
    dtype = compute_dtype(step.out.dtype)
    sizes = [prod(_packed_shape(arg)) for arg in step.srcs if must_pack(arg, dtype)]
    if step.out.dtype is not dtype:
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
    result = out.view if out.dtype is dtype else scratch.take(out.shape, dtype)
    calls.append(product_call(left, right, result))
    if out.dtype is not dtype:
        calls.append(partial(np.copyto, out.view, result, "unsafe"))
    return in_turn(calls)


SMALL_RESULT: Final = 1 << 14
"""Bytes of a result up to which `ndarray.dot` is faster: it finds the same product in half the time, but fills the result
with zeros first, which for a square matrix of 512 is one part in twenty."""


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
    if _is_plain(x, w, step.out):
        return 0
    dtype = compute_dtype(step.out.dtype)
    rows = x.size // w.shape[1]
    tile = longest(row_pieces(w, rows))
    return sum(padded(size * dtype.itemsize) for size in (x.size, tile * w.shape[1], rows * tile))


@KERNELS("linear", dtypes=NUMBERS, workspace=_linear_workspace)
def linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, workspace: Arg | None) -> Call:
    if workspace is not None:  # nothing plain asks for one
        return _linear_by_tiles(out, x, w, b, workspace)
    rows, target = x.view, out.view
    if rows.ndim != 2:
        rows, target = rows.reshape(-1, w.shape[1]), target.reshape(-1, w.shape[0])
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
    bias = None if b is None else b.view
    calls: list[Call] = [partial(np.copyto, packed, x.view)]
    for piece in pieces:
        n = piece.stop - piece.start
        result = results[: rows * n].reshape(rows, n)
        some = weights[: n * inputs].reshape(n, inputs)
        calls += [partial(np.copyto, some, stored[piece]), product_call(left, some.T, result)]
        if bias is not None:
            calls.append(partial(np.add, result, bias[piece], result))
        columns = target[..., piece]
        calls.append(partial(np.copyto, columns, result.reshape(columns.shape), "unsafe"))
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
    result = 0 if lies_ready(step.out, dtype) else padded(rows * longest(pieces) * dtype.itemsize)
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
    direct = lies_ready(out, dtype)
    results = target.reshape(-1, outputs) if direct else scratch.take((len(left) * longest(pieces),), dtype)
    bias = None if b is None else b.view
    for piece in pieces:
        n = piece.stop - piece.start
        decode, tile = decoder(n)
        result = results[:, piece] if direct else results[: len(left) * n].reshape(-1, n)
        calls += [partial(decode, stored[piece]), product_call(left, tile.T, result)]
        if bias is not None:
            calls.append(partial(np.add, result, bias[piece], result))
        if not direct:
            columns = target[..., piece]
            calls.append(partial(np.copyto, columns, result.reshape(columns.shape), "unsafe"))
    return in_turn(calls)
