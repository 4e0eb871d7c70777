"""Products of matrices. Weights of quantized blocks are decoded some rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype, f32
from opweave.graph.layout import reshape_strides
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, widened
from opweave_torch.kernels.blocks import Decoding, decoding_arrays
from opweave_torch.kernels.table import FLOATS, KERNELS, NUMBERS, QUANTIZED
from opweave_torch.memory import reshaped, tensor
from opweave_torch.tunables import limit

__all__ = [
    "DecodedRows", "as_source", "as_target", "blocks_arrays", "blocks_why_not", "decoded_rows_arrays", "matrix_arrays",
    "product", "product_with_blocks",
]  # fmt: skip


CPU_TILE: Final = limit("weights_tile", 1 << 18, 1, 1 << 22)
"""Decoded elements at a time on a CPU, where they stay in the second-level cache."""

TILE: Final = limit("weights_tile_of_cards", 1 << 21, 1, 1 << 26)
"""The same on other devices: so many that starting a kernel takes less time than running it."""


# --- matmul ---------------------------------------------------------------------------------------------------------


def product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Call:
    """The call ``out = a @ b + bias``: two axes, or three without a bias. Half types compute in f32."""
    if not out.dtype.is_floating_point and out.device.type != "cpu":
        return partial(_whole_product, out, a, b, bias)
    if bias is not None:
        return partial(torch.addmm, bias, a, b, out=out)
    return partial(torch.mm if out.ndim == 2 else torch.bmm, a, b, out=out)


def _whole_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """A product of integers, for which accelerators have no library: the sum of the products of each column of ``a``
    and row of ``b``."""
    out.zero_() if bias is None else out.copy_(bias)
    for k in range(a.shape[-1]):
        out.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])


@KERNELS("matmul", dtypes=NUMBERS)
def matmul(stream: Stream, op: str, out: Arg, a: Arg, b: Arg) -> Call:
    x, y, o = tensor(a), tensor(b), tensor(out)
    if o.ndim == 2:
        return product(o, x, y)
    batch = prod(out.shape[:-2])
    if not any(b.strides[:-2]) and (rows := reshaped(a, (batch * a.shape[-2], a.shape[-1]))) is not None:
        # One matrix for all: one large product instead of many small ones.
        target = reshaped(out, (len(rows), out.shape[-1]))
        if target is not None:
            return product(target, rows, y[(0,) * (y.ndim - 2)])
    merged = [reshaped(arg, (batch, *arg.shape[-2:])) for arg in (out, a, b)]
    if merged[0] is not None and merged[1] is not None and merged[2] is not None:
        return product(merged[0], merged[1], merged[2])
    if o.dtype.is_floating_point or o.device.type == "cpu":
        return partial(torch.matmul, x, y, out=o)
    return partial(_whole_product, o, x, y, None)


# --- linear ---------------------------------------------------------------------------------------------------------


def matrix_arrays(dtype: DType, x: Arg, out: Arg) -> Arrays:
    """Workspace of `as_source` and `as_target`: copies of operands that are of another type than ``dtype``, or cannot
    be viewed as one matrix."""
    args = {"rows": x, "results": out}
    return {name: (dtype, arg.shape) for name, arg in args.items() if arg.dtype is not dtype or not _is_matrix(arg)}


def _is_matrix(arg: Arg) -> bool:
    return reshape_strides(arg.shape, arg.strides, (prod(arg.shape[:-1]), arg.shape[-1]), arg.dtype) is not None


def _as_matrix(arg: Arg) -> Tensor:
    matrix = reshaped(arg, (prod(arg.shape[:-1]), arg.shape[-1]))
    assert matrix is not None, f"{arg} has no array of matrix_arrays"
    return matrix


def as_source(x: Arg, arrays: Mapping[str, Arg]) -> tuple[Tensor, list[Call]]:
    """The operand as one matrix, and the calls that copy it into its array, if it has one."""
    rows = arrays.get("rows", x)
    return _as_matrix(rows), [] if rows is x else [partial(tensor(rows).copy_, tensor(x))]


def as_target(out: Arg, arrays: Mapping[str, Arg]) -> tuple[Tensor, list[Call]]:
    """A matrix for the result, and the calls that copy it from its array to ``out``, if it has one."""
    results = arrays.get("results", out)
    return _as_matrix(results), [] if results is out else [partial(tensor(out).copy_, tensor(results))]


def _linear_arrays(step: Step) -> Arrays:
    return matrix_arrays(step.out.dtype, step.srcs[0], step.out)


@KERNELS("linear", dtypes=NUMBERS, when=lambda step: of_other_type(step, 1, 2), workspace=_linear_arrays)
def linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, **arrays: Arg) -> Call:
    source, before = as_source(x, arrays)
    target, after = as_target(out, arrays)
    return in_order([*before, product(target, source, tensor(w).t(), None if b is None else tensor(b)), *after])


# --- linear with blocks ---------------------------------------------------------------------------------------------


def _tile_rows(w: Arg, tile: int) -> int:
    """Rows of the weights that are decoded at a time; not so few that the product becomes one of vectors."""
    outputs, inputs = w.shape[-2:]
    count = -(-outputs // max(16, tile // inputs))
    return -(-outputs // count)


def decoded_rows_arrays(w: Arg, dtype: DType) -> Arrays:
    """Workspace of `DecodedRows`."""
    rows, inputs = _tile_rows(w, max(TILE.value, CPU_TILE.value)), w.shape[-1]
    arrays = decoding_arrays(w.dtype, rows * (inputs // w.dtype.block))
    return arrays if dtype is f32 else {**arrays, "decoded": (dtype, (rows, inputs))}


class DecodedRows:
    """Some rows of quantized weights, decoded and in the type to compute in.

    Args:
        w: the weights.
        dtype: to compute in.
        arrays: the workspace of `decoded_rows_arrays`.
        device: of the tensors.

    Attributes:
        rows: how many at a time.
        values: shape (rows, inputs).
        calls: what decodes the blocks that were loaded.
    """

    def __init__(self, w: Arg, dtype: DType, arrays: Mapping[str, Arg], device: torch.device) -> None:
        self.rows = _tile_rows(w, CPU_TILE.value if device.type == "cpu" else TILE.value)
        inputs = w.shape[-1]
        decoding = Decoding(w.dtype, self.rows * (inputs // w.dtype.block), arrays, device)
        self.load, self.calls = decoding.load, decoding.calls
        self.values = decoding.values.view(self.rows, inputs)
        if dtype is not f32:
            wide = tensor(arrays["decoded"])[: self.rows]
            self.calls = [*self.calls, partial(wide.copy_, self.values)]
            self.values = wide


def blocks_arrays(step: Step, dtype: DType | None = None) -> Arrays:
    """Workspace of `product_with_blocks`."""
    x, w, *bias = step.srcs
    dtype = dtype or widened(x.dtype)
    return {**decoded_rows_arrays(w, dtype), **matrix_arrays(dtype, x, step.out), **conversion_arrays(dtype, bias)}


def blocks_why_not(step: Step) -> str | None:
    """Why a kernel whose weights are quantized does not take ``step``, or ``None``."""
    return None if step.srcs[1].dtype.is_quantized else "the weights are not quantized"


@KERNELS("linear", dtypes=[*map(as_dtype, FLOATS.split()), *QUANTIZED], when=blocks_why_not, workspace=blocks_arrays)
def linear_of_blocks(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, **arrays: Arg
) -> Call:
    return product_with_blocks(widened(x.dtype), out, x, w, b, arrays)


def product_with_blocks(dtype: DType, out: Arg, x: Arg, w: Arg, b: Arg | None, arrays: Mapping[str, Arg]) -> Call:
    """The call of a product with quantized weights, computed in ``dtype``."""
    stored = tensor(w)
    decoded = DecodedRows(w, dtype, arrays, stored.device)
    source, before = as_source(x, arrays)
    target, after = as_target(out, arrays)
    biases, calls = converted(dtype, [] if b is None else [b], arrays)
    for first in range(0, w.shape[0], decoded.rows):
        some = slice(first, min(first + decoded.rows, w.shape[0]))
        weights = decoded.values[: some.stop - some.start].t()
        shift = biases[0][some] if biases else None
        calls += [*decoded.load(stored[some]), *decoded.calls, product(target[:, some], source, weights, shift)]
    return in_order([*before, *calls, *after])
