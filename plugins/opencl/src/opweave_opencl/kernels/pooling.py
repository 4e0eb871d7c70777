"""The largest element or the mean of windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opweave.contract import Arg, Call
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_offset, element_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("max_pool1d", "max_pool2d", dtypes="f32 f16 bf16 i64 i32 i16 i8 u8")
def max_pool(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, ceil_mode: bool, **sizes: Any) -> Call:
    return _pool(stream, out, x, {"LARGEST": "1"}, **sizes)


@KERNELS("avg_pool1d", "avg_pool2d", dtypes="f32 f16 bf16")
def avg_pool(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    **sizes: Any,
) -> Call:
    return _pool(stream, out, x, {"LARGEST": "0"}, (int(count_include_pad), divisor), **sizes)


def _pool(
    stream: OpenCLStream,
    out: Arg,
    x: Arg,
    macros: dict[str, str],
    counting: tuple[int, int] = (0, 0),
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Call:
    fill = 2 - len(kernel_size)
    words: list[int] = [out.shape[1], *(1,) * fill, *out.shape[2:], *(1,) * fill, *x.shape[2:]]
    for values, none in ((kernel_size, 1), (stride, 1), (padding, 0), (dilation, 1)):
        words += [*(none,) * fill, *values]
    for arg in (out, x):
        steps = element_strides(arg)
        words += [*steps[:2], *(0,) * fill, *steps[2:]]
    words += [element_offset(out), element_offset(x), *counting]
    lines = out.shape[2] if not fill else 1
    size, group = spread((out.shape[-1], lines, out.shape[0] * out.shape[1]), stream.target.tuning.group)
    program = stream.target.programs.get("pooling", {"T": x.dtype.name, **macros, "FLOATS": str(int(x.dtype.is_float))})
    return stream.launch(program, "pool", size, group, (out, x), words)
