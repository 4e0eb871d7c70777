"""The largest element or the mean of windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_offset, element_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("max_pool1d", "max_pool2d", dtypes="f32 f16 bf16 i64 i32 i16 i8 u8")
@KERNELS("avg_pool1d", "avg_pool2d", dtypes="f32 f16 bf16")
def pool(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    count_include_pad: bool = False,
    divisor: int = 0,
) -> Call:
    fill = 2 - len(kernel_size)
    words: list[int] = [out.shape[1], *(1,) * fill, *out.shape[2:], *(1,) * fill, *x.shape[2:]]
    for values, none in ((kernel_size, 1), (stride, 1), (padding, 0), (dilation, 1)):
        words += [*(none,) * fill, *values]
    for arg in (out, x):
        steps = element_strides(arg)
        words += [*steps[:2], *(0,) * fill, *steps[2:]]
    words += [element_offset(out), element_offset(x), int(count_include_pad), divisor]
    lines = out.shape[2] if not fill else 1
    size, group = spread((out.shape[-1], lines, out.shape[0] * out.shape[1]), stream.target.tuning.group)
    macros = {"T": x.dtype.name, "LARGEST": str(int(op.startswith("max"))), "FLOATS": str(int(x.dtype.is_float))}
    program = stream.target.programs.get("pooling", macros)
    return stream.launch(program, "pool", size, group, (out, x), words)
