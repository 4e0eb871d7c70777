"""Products, by BLAS. Operands that BLAS cannot read as they lie, and half types, are packed into scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave.ops.blocks import fields_of
from opweave_cpu.blocks import RowDecoder, decoder_scratch, longest, row_tiles
from opweave_cpu.hardware import has_openblas
from opweave_cpu.kernels.half_products import linear_of_pairs  # noqa: F401 - to be tried before those below
from opweave_cpu.kernels.integer_products import exact_linear_of_integers  # noqa: F401 - likewise
from opweave_cpu.kernels.row_products import linear_of_some_rows  # noqa: F401 - likewise
from opweave_cpu.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import Array, at_once, compute_dtype, in_turn, shares, window
from opweave_cpu.tunables import TURNED_ROWS, limit
from opweave_cpu.workers import is_blas_matrix

_F32: Final = as_dtype("f32")


def must_pack(arg: Arg, dtype: DType) -> bool:
    """Whether BLAS cannot read the operand as it lies. (It does not compute with integers.)"""
    if arg.dtype is not dtype or len(arg.shape) < 2 or not dtype.is_float:
        return arg.dtype is not dtype
    return not is_blas_matrix(arg.shape, arg.strides, dtype.itemsize)


# --- products computed as their transpose ---------------------------------------------------------------------------


TURNED_WORK: Final = limit("turned_work", 1 << 18, 1, 1 << 26)
"""Multiplications from which on products are computed as their transpose: binding that takes twice as long."""


def is_turned(rows: int, inputs: int, outputs: int, dtype: DType) -> bool:
    """Whether the product of ``rows`` rows and ``outputs`` rows of weights is faster computed as its transpose.
    (Without it, an encoder of 16 tokens that has no compiled kernels takes 1.47 times as long.)"""
    return (
        2 <= rows <= TURNED_ROWS.value and rows * inputs * outputs > TURNED_WORK.value
        and dtype is _F32 and has_openblas()
    )  # fmt: skip


def tile_product(
    stream: Stream, left: Array, weights: Array, into: Array, lead: Sequence[int], *, turned: bool
) -> tuple[Call, Array]:
    """The call ``left @ weights.T``, ``turned``: as its transpose; and its result (*lead, n), in the flat ``into``."""
    rows, n = len(left), len(weights)
    result = into[: rows * n]
    if turned:
        turned_result = result.reshape(n, rows)
        return product_call(stream, weights, left.T, turned_result), turned_result.T.reshape(*lead, n)
    return product_call(stream, left, weights.T, result.reshape(rows, n)), result.reshape(*lead, n)


def store_calls(result: Array, bias: Array | None, out: Array, ordered: Arg | None = None) -> list[Call]:
    """The calls that store a result, plus a bias, rounded once.

    A result that was computed as its transpose is first put in order, in ``ordered``, which is flat: rounding it where
    it lies takes twice as long.
    """
    if result.dtype == out.dtype:
        return [partial(np.copyto, out, result) if bias is None else partial(np.add, result, bias, out)]
    calls: list[Call] = []
    wide = result if ordered is None else window(ordered.view, result.shape)
    if bias is not None:
        calls.append(partial(np.add, result, bias, wide))
    elif ordered is not None:
        calls.append(partial(np.copyto, wide, result))
    return [*calls, partial(np.copyto, out, wide, "unsafe")]


# --- matmul ---------------------------------------------------------------------------------------------------------


def _packed_shape(arg: Arg) -> tuple[int, ...]:
    """The shape to pack: a matrix that is repeated along leading axes is packed once."""
    repeats = [stride == 0 for stride in arg.strides[:-2]]
    return (*(1 if again else n for n, again in zip(arg.shape[:-2], repeats, strict=True)), *arg.shape[-2:])


def _is_turned(a: Arg, b: Arg, dtype: DType) -> bool:
    """Whether ``b`` is a transposed matrix of weights, and `is_turned` holds for the product."""
    if len(a.shape) != 2 or len(b.shape) != 2 or must_pack(b, dtype) or b.strides[0] != dtype.itemsize:
        return False
    return is_turned(a.shape[0], b.shape[0], b.shape[1], dtype)


def _matmul_workspace(step: Step) -> Arrays:
    out, (a, b), dtype = step.out, step.srcs, compute_dtype(step.out.dtype)
    arrays: dict[str, tuple[DType, Sequence[int]]] = {}
    if must_pack(a, dtype):
        arrays["left"] = dtype, _packed_shape(a)
    if must_pack(b, dtype):
        arrays["right"] = dtype, _packed_shape(b)
    if _is_turned(a, b, dtype):
        arrays["turned"] = dtype, (out.size,)
    elif out.dtype is not dtype:
        arrays["wide"] = dtype, out.shape
    return arrays


@KERNELS("matmul", dtypes=NUMBERS, workspace=_matmul_workspace)
def matmul(stream: Stream, op: str, out: Arg, a: Arg, b: Arg, **scratch: Arg) -> Call:
    calls: list[Call] = []
    left, right, into = scratch.get("left", a), scratch.get("right", b), scratch.get("wide", out)
    for packed, arg in ((left, a), (right, b)):
        if packed is not arg:
            once = tuple([slice(n) for n in packed.shape])
            calls.append(partial(np.copyto, packed.view, arg.view[once]))
    if "turned" in scratch:
        call, result = tile_product(stream, left.view, right.view.T, scratch["turned"].view, out.shape[:1], turned=True)
        return in_turn([*calls, call, *store_calls(result, None, out.view)])
    calls.append(product_call(stream, left.view, right.view, into.view))
    if into is not out:
        calls.append(partial(np.copyto, out.view, into.view, "unsafe"))
    return in_turn(calls)


SMALL_RESULT: Final = limit("small_result_bytes", 1 << 14, 1, 1 << 20)
"""Bytes of a result up to which `ndarray.dot` is faster: it finds the same product in half the time, but first fills
the result with zeros, which for square matrices of 512 takes a twentieth of all."""


SHARED_PRODUCT: Final = limit("shared_product", 1 << 23, 1, 1 << 28)
"""Multiplications from which on a product is shared among the threads of the run."""

UNIT: Final = 16
"""Rows or columns of a result of which the length of a part is a multiple: those that BLAS computes at once."""


def product_call(stream: Stream, a: Array, b: Array, out: Array) -> Call:
    """The call ``out = a @ b``, in threads of the run if it is large."""
    threads, work = getattr(stream, "threads", 1), out.size * a.shape[-1]
    if threads > 1 and work >= SHARED_PRODUCT.value and min(a.ndim, b.ndim) > 1:
        parts = _parts(a, b, out, threads)
        shared = stream.multiply(parts) if isinstance(stream, CpuStream) else None
        return shared or at_once([partial(np.matmul, *part) for part in parts])
    if a.ndim == 2 and out.nbytes <= SMALL_RESULT.value and out.flags.c_contiguous:
        return partial(a.dot, b, out)
    return partial(np.matmul, a, b, out)


def _parts(a: Array, b: Array, out: Array, count: int) -> list[tuple[Array, Array, Array]]:
    """A product in parts: some of the matrices, or some rows or columns of the result, whichever are more."""
    if out.ndim > 2 and a.ndim == b.ndim and len(a) == len(b) >= count:
        return [(a[some], b[some], out[some]) for some in shares(len(out), count)]
    rows, columns = out.shape[-2:]
    units = shares(-(-max(rows, columns) // UNIT), count)
    cuts = [slice(some.start * UNIT, some.stop * UNIT) for some in units]
    if rows >= columns:
        return [(a[..., some, :], b, out[..., some, :]) for some in cuts]
    return [(a, b[..., some], out[..., some]) for some in cuts]


# --- linear ---------------------------------------------------------------------------------------------------------


def _is_plain(w: Arg, out: Arg) -> bool:
    """Whether BLAS reads the weights and writes the result as they lie."""
    return not out.dtype.is_half and out.is_dense and not must_pack(w, out.dtype)


def _linear_workspace(step: Step) -> Arrays:
    out, (x, w, *_), dtype = step.out, step.srcs, compute_dtype(step.out.dtype)
    outputs, inputs = w.shape
    rows = x.size // inputs
    if _is_plain(w, out):
        plain: dict[str, tuple[DType, Sequence[int]]] = {}
        if must_pack(x, dtype) or not (x.is_dense or len(x.shape) == 2):
            plain["packed"] = dtype, (rows, inputs)
        if is_turned(rows, inputs, outputs, dtype):
            plain["turned"] = dtype, (out.size,)
        return plain
    tile = longest(row_tiles(w, rows))
    orders = out.dtype is not dtype and is_turned(rows, inputs, tile, dtype)
    return {
        "packed": (dtype, (rows, inputs)),
        "results": (dtype, (rows * tile,)),
        "weights": (dtype, (tile, inputs)),
        "ordered": (dtype, (rows * tile if orders else 0,)),
    }


@KERNELS("linear", dtypes=NUMBERS, workspace=_linear_workspace)
def linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, **scratch: Arg) -> Call:
    if "results" in scratch:
        return _linear_by_tiles(stream, out, x, w, b, **scratch)
    calls: list[Call] = []
    rows, target = x.view, out.view
    if "packed" in scratch:
        rows = scratch["packed"].view
        calls.append(partial(np.copyto, rows.reshape(x.shape), x.view))
    if target.ndim != 2:
        rows, target = rows.reshape(-1, w.shape[1]), target.reshape(-1, w.shape[0])
    if "turned" in scratch:
        call, result = tile_product(stream, rows, w.view, scratch["turned"].view, rows.shape[:1], turned=True)
        return in_turn([*calls, call, *store_calls(result, None if b is None else b.view, target)])
    calls.append(product_call(stream, rows, w.view.T, target))
    return in_turn(calls if b is None else [*calls, partial(np.add, target, b.view, target)])


def _linear_by_tiles(
    stream: Stream,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None,
    packed: Arg,
    results: Arg,
    weights: Arg,
    ordered: Arg | None = None,
) -> Call:
    """Some rows of the weights at a time: converted, multiplied, rounded into their columns of ``out``."""
    left, target, stored = packed.view, out.view, w.view
    turned = is_turned(len(left), w.shape[1], weights.shape[0], packed.dtype)
    bias = None if b is None else b.view
    calls: list[Call] = [partial(np.copyto, left.reshape(x.shape), x.view)]
    for tile in row_tiles(w, len(left)):
        some = weights.view[: tile.stop - tile.start]
        call, result = tile_product(stream, left, some, results.view, out.shape[:-1], turned=turned)
        convert = stream.decode_rows(w, tile, weights) if isinstance(stream, CpuStream) and w.dtype.is_half else None
        calls += [convert or partial(np.copyto, some, stored[tile]), call]
        calls += store_calls(result, None if bias is None else bias[tile], target[..., tile], ordered)
    return in_turn(calls)


# --- linear with quantized weights ----------------------------------------------------------------------------------


def lies_ready(arg: Arg, dtype: DType) -> bool:
    """Whether an operand can be read, or written, as rows of ``dtype`` where it lies."""
    return arg.dtype is dtype and arg.is_dense


def _blocks_workspace(step: Step) -> Arrays:
    out, (x, w, *_), dtype = step.out, step.srcs, compute_dtype(step.out.dtype)
    inputs = w.shape[1]
    rows = x.size // inputs
    tiles = row_tiles(w, rows)
    size, turned = rows * longest(tiles), is_turned(rows, inputs, longest(tiles), dtype)
    return {
        **decoder_scratch(w, tiles, dtype),
        "packed": (dtype, (0 if lies_ready(x, dtype) else rows, inputs)),
        "results": (dtype, (0 if lies_ready(out, dtype) and not turned else size,)),
        "ordered": (dtype, (size if turned and out.dtype is not dtype else 0,)),
    }


@KERNELS("linear", dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED], workspace=_blocks_workspace)
def linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, **scratch: Arg
) -> Call:
    packed, results, ordered = [scratch.get(name) for name in ("packed", "results", "ordered")]
    outputs, inputs = w.shape
    tiles, stored, target = row_tiles(w, x.size // inputs), fields_of(w.view, blocks), out.view
    decoder = RowDecoder(w, tiles, scratch)
    calls: list[Call] = []
    left = (packed or x).view.reshape(-1, inputs)
    if packed is not None:
        calls.append(partial(np.copyto, left.reshape(x.shape), x.view))
    turned = is_turned(len(left), inputs, longest(tiles), compute_dtype(out.dtype))
    bias = None if b is None else b.view
    for tile in tiles:
        decode, weights = decoder(tile.stop - tile.start)
        compiled = decoder.compiled(stream, tile)
        calls.append(partial(decode, stored[tile]) if compiled is None else compiled)
        some = None if bias is None else bias[tile]
        if results is None:
            result = target.reshape(-1, outputs)[:, tile]
            calls.append(product_call(stream, left, weights.T, result))
            if some is not None:
                calls.append(partial(np.add, result, some, result))
        else:
            call, result = tile_product(stream, left, weights, results.view, out.shape[:-1], turned=turned)
            calls += [call, *store_calls(result, some, target[..., tile], ordered)]
    return in_turn(calls)
