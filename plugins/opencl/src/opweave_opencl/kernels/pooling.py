"""The largest element or the mean of windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opweave.contract import Arg, Call
from opweave.ops.pooling import shared_count
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
    words = _words(out, x, (out, x), kernel_size, stride, padding, dilation)
    words += [element_offset(out), element_offset(x), 0, int(count_include_pad), divisor]
    lines = out.shape[2] if len(kernel_size) == 2 else 1
    size, group = spread((out.shape[-1], lines, out.shape[0] * out.shape[1]), stream.target.tuning.group)
    macros = {"T": x.dtype.name, "LARGEST": str(int(op.startswith("max"))), "FLOATS": str(int(x.dtype.is_float))}
    program = stream.target.programs.get("pooling", macros)
    return stream.launch(program, "pool", size, group, (out, x), words)


@KERNELS("max_pool_backward", dtypes="f32 f16 bf16")
def max_pool_backward(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    grad: Arg,
    x: Arg,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> Call:
    """Each element gathers from the windows that it is the first largest one of."""
    words = _words(grad, x, (grad, x, out), kernel_size, stride, padding, dilation)
    words += [element_offset(grad), element_offset(x), element_offset(out), 0, 0]
    lines = x.shape[2] if len(kernel_size) == 2 else 1
    size, group = spread((x.shape[-1], lines, x.shape[0] * x.shape[1]), stream.target.tuning.group)
    program = stream.target.programs.get("pooling", {"T": x.dtype.name, "BACKWARD": "1"})
    return stream.launch(program, "max_pool_backward", size, group, (grad, x, out), words)


@KERNELS("avg_pool_backward", dtypes="f32 f16 bf16")
def avg_pool_backward(
    stream: OpenCLStream, op: str, out: Arg, grad: Arg, *, size: tuple[int, ...], **attrs: Any
) -> Call:
    """Each element gathers from the windows in which it lies."""
    windows = [attrs[name] for name in ("kernel_size", "stride", "padding", "dilation")]
    words = _words(grad, out, (grad, out), *windows)
    words += [element_offset(grad), element_offset(out), 0, int(attrs["count_include_pad"]), shared_count(**attrs)]
    lines = size[0] if len(size) == 2 else 1
    range_, group = spread((size[-1], lines, out.shape[0] * out.shape[1]), stream.target.tuning.group)
    program = stream.target.programs.get("pooling", {"T": out.dtype.name, "MEAN_BACKWARD": "1"})
    return stream.launch(program, "avg_pool_backward", range_, group, (grad, out), words)


def _words(
    pooled: Arg,
    x: Arg,
    steps_of: tuple[Arg, ...],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> list[int]:
    """The struct ``Params`` but for offsets and flags; three operands have steps."""
    fill = 2 - len(kernel_size)
    words: list[int] = [pooled.shape[1], *(1,) * fill, *pooled.shape[2:], *(1,) * fill, *x.shape[2:]]
    for values, none in ((kernel_size, 1), (stride, 1), (padding, 0), (dilation, 1)):
        words += [*(none,) * fill, *values]
    for arg in (*steps_of, *steps_of[:1])[:3]:
        steps = element_strides(arg)
        words += [*steps[:2], *(0,) * fill, *steps[2:]]
    return words
