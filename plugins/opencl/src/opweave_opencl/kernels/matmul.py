"""Products of matrices, of any layout; weights also as quantized blocks, which kernels decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Arg, Call, Step
from opweave.contract.kernels import of_other_type
from opweave.graph.dtypes import DType
from opweave_opencl.kernels.blocks import QUANTIZED, not_in_rows, not_of_blocks
from opweave_opencl.kernels.products import TYPES, launch_product, matrix_product
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("matmul", dtypes=TYPES)
def matmul(stream: OpenCLStream, op: str, out: Arg, a: Arg, b: Arg) -> Call:
    o_steps, a_steps, b_steps = map(element_strides, (out, a, b))
    product = matrix_product(
        (out, a, b),
        a.shape[:-1],
        (o_steps[:-1], a_steps[:-1], (*b_steps[:-2], 0)),
        n=(b.shape[-1], o_steps[-1], b_steps[-1]),
        k=(a.shape[-1], a_steps[-1], b_steps[-2]),
    )
    return launch_product(stream, product)


def _blocks_why_not(step: Step) -> str | None:
    x, w = step.srcs[:2]
    return not_of_blocks(step) or not_in_rows("source 0", x) or not_in_rows("the weights", w)


@KERNELS("linear", dtypes=f"f32 f16 bf16 {QUANTIZED}", when=_blocks_why_not)
@KERNELS("linear", dtypes=TYPES, when=lambda step: of_other_type(step, 1))
def linear(
    stream: OpenCLStream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType | None = None
) -> Call:
    o_steps, x_steps = element_strides(out), element_strides(x)
    w_steps = element_strides(w) if blocks is None else (w.strides[0], 1)
    product = matrix_product(
        (out, x, w) if b is None else (out, x, w, b),
        x.shape[:-1],
        (o_steps[:-1], x_steps[:-1], (0,) * (len(x.shape) - 1)),
        n=(w.shape[0], o_steps[-1], w_steps[0]),
        k=(w.shape[1], x_steps[-1], w_steps[1]),
        blocks=blocks,
    )
    return launch_product(stream, product)
