"""Products with weights in the special memory of ``torch:cpu`` (`opweave_torch.packed`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import of_other_type
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype, bf16, f32
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order
from opweave_torch.kernels.half_products import CPU_WITH_BF16
from opweave_torch.kernels.matmul import as_source, matrix_arrays
from opweave_torch.kernels.table import HALVES, KERNELS, QUANTIZED
from opweave_torch.memory import tensor
from opweave_torch.packed import Int4Type, PackedType, multiply_int4, multiply_packed


def _is_in(step: Step, kind: type) -> str | None:
    return None if isinstance(step.srcs[1].buffer_type, kind) else "the weights are not packed"


def _dtype(step: Step) -> DType:
    """The type to multiply in: that of packed plain weights, f32 for blocks."""
    w = step.srcs[1].dtype
    return f32 if w.is_quantized else w


def _why_not(step: Step) -> str | None:
    return _is_in(step, PackedType) or (None if step.srcs[1].dtype.is_quantized else of_other_type(step, 1, 2))


def _why_not_in_bf16(step: Step) -> str | None:
    if step.srcs[1].dtype is not bf16 or step.srcs[0].dtype is not f32:
        return "rows in f32 are multiplied by weights in bf16"
    return _is_in(step, PackedType)


def _arrays(step: Step, dtype: DType) -> Arrays:
    x, _, *bias = step.srcs
    rows = {name: array for name, array in matrix_arrays(dtype, x, step.out).items() if name == "rows"}
    return {**rows, **conversion_arrays(dtype, bias)}


def _arrays_of(step: Step) -> Arrays:
    return _arrays(step, _dtype(step))


def _arrays_in_bf16(step: Step) -> Arrays:
    return _arrays(step, bf16)


_TYPES: Final = [*map(as_dtype, f"f32 {HALVES}".split()), *QUANTIZED]


@CPU_WITH_BF16(
    "linear", dtypes="f32 bf16", precision="bf16", accepts=PackedType, when=_why_not_in_bf16,
    workspace=_arrays_in_bf16,
)  # fmt: skip
@KERNELS("linear", dtypes=_TYPES, accepts=PackedType, when=_why_not, workspace=_arrays_of)
def linear_of_packed(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: object = None, **arrays: Arg
) -> Call:
    dtype = f32 if w.dtype.is_quantized else w.dtype
    source, before = as_source(x, arrays)
    biases, loads = converted(dtype, [] if b is None else [b], arrays)
    weight, bias = w.handle, biases[0] if biases else None
    return _stored(out, [*before, *loads], lambda: multiply_packed(source, weight.value, bias))


def _blocks_in_bf16(step: Step) -> str | None:
    return _is_in(step, Int4Type) or (None if step.srcs[0].dtype is not f32 or step.out.dtype is f32 else "types mixed")


@CPU_WITH_BF16(
    "linear", dtypes=_TYPES, precision="bf16", accepts=Int4Type, when=_blocks_in_bf16, workspace=_arrays_in_bf16
)
def linear_of_int4(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: object = None, **arrays: Arg
) -> Call:
    source, before = as_source(x, arrays)
    biases, loads = converted(bf16, [] if b is None else [b], arrays)
    weight = w.handle
    if not biases:
        return _stored(out, before, lambda: multiply_int4(source, weight.value))
    return _stored(out, [*before, *loads], lambda: multiply_int4(source, weight.value).add_(biases[0]))


def _stored(out: Arg, before: Sequence[Call], product: Callable[[], Tensor]) -> Call:
    """The calls before, and then the product, copied from the tensor that torch makes of it."""
    target = tensor(out)
    rows = (prod(out.shape[:-1]), out.shape[-1])
    whole: Any = target.view(rows) if target.is_contiguous() else None

    def store() -> None:
        result = product()
        if whole is not None:
            whole.copy_(result)
        else:
            target.copy_(result.view(target.shape))

    return in_order([*before, store])
