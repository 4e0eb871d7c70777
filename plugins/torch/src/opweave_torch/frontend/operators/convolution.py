"""Convolution, pooling and resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.operators.table import operator

__all__ = ["avg_pool", "convolution", "max_pool"]

CONV: Final = {1: ow.conv1d, 2: ow.conv2d, 3: ow.conv3d}
TRANSPOSED: Final = {1: ow.conv_transpose1d, 2: ow.conv_transpose2d}


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """One number for each axis, of one for all or of one for each."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


def _batched(function: Callable[[Tensor], Tensor], x: Tensor, rank: int) -> Tensor:
    """``function`` of a batch, or of one element without the axis for the batch."""
    return function(x) if x.ndim == rank + 2 else ow.squeeze(function(ow.expand_dims(x, 0)), 0)


def convolution(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int,
    transposed: bool = False, output_padding: Any = 0,
) -> Tensor:  # fmt: skip
    """A convolution, or a transposed one, of a batch or of one element."""
    rank = weight.ndim - 2
    strides, dilations = _each(stride, rank), _each(dilation, rank)
    if padding == "valid":
        padding = 0
    if padding == "same":
        room = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        padding = [r // 2 for r in room]
        if any(r % 2 for r in room):
            x = ow.pad(x, [*[(0, 0)] * (x.ndim - rank), *[(0, r % 2) for r in room]])
    pads = _each(padding, rank)
    if transposed:
        more = _each(output_padding, rank)
        return _batched(lambda x: TRANSPOSED[rank](x, weight, bias, strides, pads, more, groups, dilations), x, rank)
    return _batched(lambda x: CONV[rank](x, weight, bias, strides, pads, dilations, groups), x, rank)


@operator("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def _conv(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    return convolution(x, weight, bias, stride, padding, dilation, groups)


@operator("convolution")
def _convolution(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    if transposed and weight.ndim - 2 not in TRANSPOSED:
        return call.fallback(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return convolution(x, weight, bias, stride, padding, dilation, groups, transposed, output_padding)


@operator("conv_transpose1d", "conv_transpose2d.input")
def _conv_transpose(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    return convolution(x, weight, bias, stride, padding, dilation, groups, True, output_padding)


# --- pooling --------------------------------------------------------------------------------------------------------

MAX: Final = {1: ow.max_pool1d, 2: ow.max_pool2d}
MEAN: Final = {1: ow.avg_pool1d, 2: ow.avg_pool2d}


def max_pool(rank: int, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Tensor:
    """The largest element of each window; without strides windows lie side by side."""
    sizes = _each(kernel, rank)
    steps = _each(stride, rank) if stride else sizes
    pads, dilations = _each(padding, rank), _each(dilation, rank)
    return _batched(lambda x: MAX[rank](x, sizes, steps, pads, dilations, ceil_mode), x, rank)


@operator("max_pool1d", "max_pool2d", "max_pool2d_with_indices")
def _max_pool(
    call: Call, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    name = str(call.node.target)
    result = max_pool(1 if "1d" in name else 2, x, kernel, stride, padding, dilation, ceil_mode)
    if "with_indices" not in name:
        return result
    wanted = call.wants(1)
    return result, call.fallback(x, kernel, stride, padding, dilation, ceil_mode)[1] if wanted else None


def avg_pool(
    rank: int, x: Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:  # fmt: skip
    """The mean of each window; without strides windows lie side by side."""
    sizes = _each(kernel, rank)
    steps = _each(stride, rank) if stride else sizes
    more = {"divisor_override": divisor_override} if divisor_override else {}
    pads = _each(padding, rank)
    return _batched(lambda x: MEAN[rank](x, sizes, steps, pads, ceil_mode, count_include_pad, **more), x, rank)


@operator("avg_pool1d", "avg_pool2d")
def _avg_pool(
    call: Call, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    rank = 1 if "1d" in str(call.node.target) else 2
    return avg_pool(rank, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)


@operator("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def _adaptive_avg_pool(call: Call, x: Tensor, size: Sequence[int]) -> Any:
    rank = len(_each(size, 1))
    lengths = x.shape[x.ndim - rank :]
    if all(n == 1 for n in size):
        return ow.mean(x, tuple(range(x.ndim - rank, x.ndim)), True)
    if rank > 2 or any(n % m for n, m in zip(lengths, size, strict=True)):
        return call.fallback(x, size)
    sizes = [n // m for n, m in zip(lengths, size, strict=True)]
    return _batched(lambda x: MEAN[rank](x, sizes), x, rank)


# --- resampling -----------------------------------------------------------------------------------------------------

MODES: Final = {
    "nearest1d": "nearest", "nearest2d": "nearest", "nearest3d": "nearest", "linear1d": "linear",
    "bilinear2d": "bilinear", "bicubic2d": "bicubic", "trilinear3d": "trilinear", "_bilinear2d_aa": "bilinear",
    "_bicubic2d_aa": "bicubic",
}  # fmt: skip


def _resampling(name: str) -> Callable[..., Any]:
    mode: Any = MODES[name]

    def build(call: Call, x: Tensor, size: Any, *rest: Any, **named: Any) -> Any:
        given = list(rest)
        align = None if mode == "nearest" else named.get("align_corners", given.pop(0) if given else False)
        scales = named.get("scale_factors")
        if str(call.node.target).endswith(".vec"):
            scales = scales if scales is not None or not given else given[0]
        elif any(v is not None for v in [*given, *named.values()] if not isinstance(v, bool)):
            # Where samples are taken follows from the scales, which need not be those of the sizes.
            lengths = x.shape[2:]
            found = [v for v in [*given, *named.values()] if not isinstance(v, bool)]
            if any(v is not None and v * n != m for v, n, m in zip(found, lengths, size, strict=True)):
                return call.fallback(x, size, *rest, **named)
        if scales is not None:
            return ow.interpolate(x, None, tuple(scales), mode, align, name.endswith("aa"))
        return ow.interpolate(x, tuple(size), None, mode, align, name.endswith("aa"))

    return build


for _name in MODES:
    _packet = f"_upsample{_name}" if _name.startswith("_") else f"upsample_{_name}"
    operator(f"{_packet}.vec")(_resampling(_name))
    if _name not in ("bilinear2d", "bicubic2d"):  # of these, torch decomposes the other overloads before it exports
        operator(_packet)(_resampling(_name))
