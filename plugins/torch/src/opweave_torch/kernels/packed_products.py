"""Products with weights in the special memory of ``torch:cpu`` (`opweave_torch.packed`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

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
from opweave_torch.native import packed_product
from opweave_torch.packed import Int4Type, PackedType, RoundedType, multiply_int4

__all__ = ["Product", "computed_in", "product_of_int4"]


def _is_in(step: Step, kind: type) -> str | None:
    return None if isinstance(step.srcs[1].buffer_type, kind) else "the weights are not packed"


def computed_in(w: Arg) -> DType:
    """The type to multiply in with a packed weight."""
    kind = w.buffer_type
    assert isinstance(kind, PackedType)
    return kind.computes_in(w.dtype)


def _why_not(step: Step) -> str | None:
    w = step.srcs[1]
    if w.dtype.is_quantized and isinstance(w.buffer_type, RoundedType):
        return "the weights are rounded to bf16"
    return _is_in(step, PackedType) or (None if w.dtype.is_quantized else of_other_type(step, 1, 2))


def _why_not_in_bf16(step: Step) -> str | None:
    if step.srcs[1].dtype is not bf16 or step.srcs[0].dtype is not f32:
        return "rows in f32 are multiplied by weights in bf16"
    return _is_in(step, PackedType)


def _rounded_why_not(step: Step) -> str | None:
    return _is_in(step, RoundedType) or (None if step.srcs[1].dtype.is_quantized else "the weights are not quantized")


def _arrays(step: Step, dtype: DType) -> Arrays:
    x, _, *bias = step.srcs
    rows = {name: array for name, array in matrix_arrays(dtype, x, step.out).items() if name == "rows"}
    return {**rows, **conversion_arrays(dtype, bias)}


def _arrays_of(step: Step) -> Arrays:
    return _arrays(step, computed_in(step.srcs[1]))


def _arrays_in_bf16(step: Step) -> Arrays:
    return _arrays(step, bf16)


_TYPES: Final = [*map(as_dtype, f"f32 {HALVES}".split()), *QUANTIZED]


@CPU_WITH_BF16(
    "linear", dtypes="f32 bf16", precision="bf16", accepts=PackedType, when=_why_not_in_bf16,
    workspace=_arrays_in_bf16,
)  # fmt: skip
@CPU_WITH_BF16(
    "linear", dtypes=_TYPES, precision="bf16", accepts=RoundedType, when=_rounded_why_not, workspace=_arrays_in_bf16
)
@KERNELS("linear", dtypes=_TYPES, accepts=PackedType, when=_why_not, workspace=_arrays_of)
def linear_of_packed(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: object = None, **arrays: Arg
) -> Call:
    return _stored(out, _product_of_packed(x, w, b, arrays))


def _blocks_in_bf16(step: Step) -> str | None:
    return _is_in(step, Int4Type) or (None if step.srcs[0].dtype is not f32 or step.out.dtype is f32 else "types mixed")


@CPU_WITH_BF16(
    "linear", dtypes=_TYPES, precision="bf16", accepts=Int4Type, when=_blocks_in_bf16, workspace=_arrays_in_bf16
)
def linear_of_int4(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: object = None, **arrays: Arg
) -> Call:
    return _stored(out, product_of_int4(x, w, b, arrays))


# --- what these kernels, and groups of steps around a product, have in common -----------------------------------------


class Product(NamedTuple):
    """A product that makes a new tensor of its result, a matrix.

    Attributes:
        before: calls to make before.
        result: computes it.
    """

    before: Sequence[Call]
    result: Callable[[], Tensor]


def _operands(
    dtype: DType, x: Arg, b: Arg | None, arrays: Mapping[str, Arg]
) -> tuple[Tensor, Tensor | None, list[Call]]:
    """Rows as one matrix and the bias, both in ``dtype``, and the calls that convert them."""
    source, before = as_source(x, arrays)
    biases, loads = converted(dtype, [] if b is None else [b], arrays)
    return source, biases[0] if biases else None, [*before, *loads]


def _product_of_packed(x: Arg, w: Arg, b: Arg | None, arrays: Mapping[str, Arg]) -> Product:
    """With a weight packed by oneDNN."""
    source, bias, before = _operands(computed_in(w), x, b, arrays)
    weight = w.handle
    return Product(before, lambda: packed_product(source, weight.value.packed, bias))


def product_of_int4(x: Arg, w: Arg, b: Arg | None, arrays: Mapping[str, Arg]) -> Product:
    """With a weight of integers of 4 bits."""
    source, bias, before = _operands(bf16, x, b, arrays)
    weight = w.handle
    if bias is None:
        return Product(before, lambda: multiply_int4(source, weight.value))
    return Product(before, lambda: multiply_int4(source, weight.value).add_(bias))


def _stored(out: Arg, product: Product) -> Call:
    """The product, copied from the tensor that torch makes of it."""
    target = tensor(out)
    whole: Any = target.view(-1, target.shape[-1]) if target.is_contiguous() else None
    result = product.result

    def store() -> None:
        if whole is not None:
            whole.copy_(result())
        else:
            target.copy_(result().view(target.shape))

    return in_order([*product.before, store])
