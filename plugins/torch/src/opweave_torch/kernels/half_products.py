"""Products of f32 operands in bf16, for programs that allow it: operands are rounded to what the exact kernels take.

The results of these are rounded too, and widened again. Read-only weights arrive in bf16, rounded once for all runs.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, Final

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import KernelTable
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, bf16, f32
from opweave.graph.layout import dense_strides
from opweave_torch.kernels.binding import in_order
from opweave_torch.kernels.matmul import blocks_arrays, product_with_blocks
from opweave_torch.kernels.table import KERNELS, QUANTIZED
from opweave_torch.memory import tensor
from opweave_torch.native import multiplies_bf16, multiplies_tiles_of_bf16
from opweave_torch.tunables import limit

__all__ = ["CPU_WITH_BF16", "WITH_BF16", "kernels_for_cpu"]

WITH_BF16: Final = KernelTable(KERNELS.dtypes, KERNELS.layout, index=KERNELS.index, parent=KERNELS)
"""The kernels of devices that multiply bf16 faster than f32."""

CPU_WITH_BF16: Final = KernelTable(KERNELS.dtypes, KERNELS.layout, index=KERNELS.index, parent=KERNELS)
"""The same of processors, where products of one row take as long in bf16 as in f32."""


def kernels_for_cpu() -> KernelTable:
    """The kernels for this processor: without instructions for bf16, products in it take longer than those in f32."""
    return CPU_WITH_BF16 if multiplies_bf16() else KERNELS


FEW_ROWS: Final = limit("few_rows", 32, 1, 1024)
"""With fewer rows most of the time of a product with quantized weights is that of decoding them."""

PRODUCTS: Final = (
    "matmul", "linear", "expert_linear", "attention", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d",
)  # fmt: skip


def _rounded(step: Step) -> Step:
    """The step of the exact kernel: the same on rounded operands."""
    out, *srcs = [
        Arg(None, 0, bf16, arg.shape, dense_strides(arg.shape, bf16)) if arg.dtype is f32 else arg
        for arg in (step.out, *step.srcs)
    ]
    return step._replace(out=out, srcs=tuple(srcs), precision="exact", choice=None)


def _why_not(step: Step) -> str | None:
    return KERNELS.why_not(_rounded(step)) if step.out.dtype is f32 else f"the output is {step.out.dtype}, not f32"


def _arrays(step: Step) -> Arrays:
    """Workspace: that of the exact kernel, and the rounded operands, ``rounded0`` for the output, then the sources."""
    rounded = _rounded(step)
    kernel = KERNELS.find(rounded)
    own: Any = {} if kernel is None or kernel.workspace is None else kernel.workspace(rounded)
    operands = enumerate((step.out, *step.srcs))
    return {**own, **{f"rounded{i}": (bf16, arg.shape) for i, arg in operands if arg.dtype is f32}}


def _cpu_why_not(step: Step) -> str | None:
    if step.op in ("linear", "matmul") and prod(step.out.shape[:-1]) == 1:
        return "a product of one row is no faster in bf16"
    if step.op == "attention" and not multiplies_tiles_of_bf16():
        # 12 heads of 128 tokens of 32 elements on one core of an AMD EPYC: 452 us in f32, 593 in bf16.
        return "attention is no faster in bf16 on this processor"
    return _why_not(step)


@CPU_WITH_BF16(*PRODUCTS, dtypes="f32 bf16", precision="bf16", when=_cpu_why_not, workspace=_arrays)
@WITH_BF16(*PRODUCTS, dtypes="f32 bf16", precision="bf16", when=_why_not, workspace=_arrays)
def product_in_bf16(stream: Stream, op: str, out: Arg, *srcs: Arg, **given: Any) -> Call:
    operands = out, *srcs
    target, *sources = [given.pop(f"rounded{i}", arg) for i, arg in enumerate(operands)]
    kernel = KERNELS.find(Step(op, target, tuple(sources), {k: v for k, v in given.items() if not isinstance(v, Arg)}))
    assert kernel is not None, f"{op} was accepted"
    before = [partial(tensor(x).copy_, tensor(arg)) for x, arg in zip(sources, srcs, strict=True) if x is not arg]
    call = kernel.factory(stream, op, target, *sources, **given)
    return in_order([*before, call, partial(tensor(out).copy_, tensor(target))])


# --- quantized weights ----------------------------------------------------------------------------------------------


def _blocks_why_not(step: Step) -> str | None:
    if not step.srcs[1].dtype.is_quantized:
        return "the weights are not quantized"
    few = prod(step.out.shape[:-1]) < FEW_ROWS.value
    return "decoding the weights takes longer than a product of few rows" if few else None


def _blocks_in_bf16(step: Step) -> Arrays:
    return blocks_arrays(step, bf16)


@CPU_WITH_BF16("linear", dtypes=[f32, *QUANTIZED], precision="bf16", when=_blocks_why_not, workspace=_blocks_in_bf16)
@WITH_BF16("linear", dtypes=[f32, *QUANTIZED], precision="bf16", when=_blocks_why_not, workspace=_blocks_in_bf16)
def blocks_in_bf16(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, **arrays: Arg
) -> Call:
    return product_with_blocks(bf16, out, x, w, b, arrays)
