"""Convolutions, windows as columns, pooling."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.contract import Step
from opweave.contract.kernels import of_other_type
from opweave.graph.dtypes import bool_, f32
from opweave.graph.layout import Shape
from opweave_ort.kernels.table import F32, PLAIN, emits
from opweave_ort.model import Model, Operand


def _same(step: Step) -> str | None:
    return of_other_type(step, *range(1, len(step.srcs)))


@emits("conv1d", "conv2d", "conv3d", dtypes=F32, when=_same)
def conv(
    m: Model,
    op: str,
    out: Operand,
    *sources: Operand,
    stride: Shape,
    padding: tuple[tuple[int, int], ...],
    dilation: Shape,
    groups: int,
) -> str:
    pads = [*[before for before, _ in padding], *[after for _, after in padding]]
    names = [m.expanded(s) for s in sources]
    return m("Conv", *names, strides=list(stride), pads=pads, dilations=list(dilation), group=groups)


@emits("conv_transpose1d", "conv_transpose2d", dtypes=F32, when=_same)
def conv_transpose(
    m: Model,
    op: str,
    out: Operand,
    *sources: Operand,
    stride: Shape,
    padding: Shape,
    output_padding: Shape,
    groups: int,
    dilation: Shape,
) -> str:
    return m(
        "ConvTranspose",
        *[m.expanded(s) for s in sources],
        strides=list(stride),
        pads=[*padding, *padding],
        output_padding=list(output_padding),
        dilations=list(dilation),
        group=groups,
    )


@emits("im2col", dtypes=PLAIN)
def im2col(
    m: Model,
    op: str,
    out: Operand,
    x: Operand,
    *,
    kernel_size: Shape,
    dilation: Shape,
    padding: Shape,
    stride: Shape,
) -> str:
    rank = len(kernel_size)
    value = m.expanded(x)
    if any(padding):
        pads = [0, 0, *padding, 0, 0, *padding]
        value = m("Pad", value, m.integers(*pads), m.constant(0, x.dtype), mode="constant")
    for i, (k, step, apart) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        count = (x.shape[2 + i] + 2 * padding[i] - apart * (k - 1) - 1) // step + 1
        at = np.arange(k)[:, None] * apart + np.arange(count) * step
        value = m("Gather", value, m.constant(at), axis=2 + 2 * i)  # (..., k, count, ...)
    order = [0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)]
    return m.reshape(m("Transpose", value, perm=order), out.shape)


def _col2im_why_not(step: Step) -> str | None:
    three = len(step.attrs["size"]) == 3 and max(step.attrs["dilation"]) > 1
    return "ONNX Runtime adds dilated windows of three axes up at wrong places" if three else None


@emits("col2im", dtypes=F32, when=_col2im_why_not)
def col2im(
    m: Model,
    op: str,
    out: Operand,
    x: Operand,
    *,
    size: Shape,
    kernel_size: Shape,
    dilation: Shape,
    padding: Shape,
    stride: Shape,
) -> str:
    if len(size) == 1:  # ONNX Runtime adds dilated windows of one axis up at wrong places
        size, kernel_size, dilation, stride = ((1, *each) for each in (size, kernel_size, dilation, stride))
        padding = (0, *padding)
    lengths: dict[str, Any] = {
        "dilations": list(dilation),
        "pads": [*padding, *padding],
        "strides": list(stride),
    }
    made = m("Col2Im", m.expanded(x), m.integers(*size), m.integers(*kernel_size), **lengths)
    return made if len(size) == len(out.shape) - 2 else m.reshape(made, out.shape)


def _pool_why_not(step: Step) -> str | None:
    if step.attrs.get("divisor"):
        return "AveragePool has no divisor of its own"
    return "places that run over the end are counted in another way" if step.attrs["ceil_mode"] else None


@emits("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", dtypes=F32, when=_pool_why_not)
def pool(
    m: Model,
    op: str,
    out: Operand,
    x: Operand,
    *,
    kernel_size: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    ceil_mode: bool,
    count_include_pad: bool = False,
    divisor: int = 0,
) -> str:
    attributes: dict[str, Any] = {
        "kernel_shape": list(kernel_size),
        "strides": list(stride),
        "pads": [*padding, *padding],
    }
    if op.startswith("max"):
        # MaxPool's comparisons drop NaN, and begin with the least finite number. So what a window has at most is found
        # separately: -inf (0), a number (1) or NaN (2).
        value, least = m.expanded(x), m.constant(-np.inf, f32)
        attributes["dilations"] = list(dilation)
        wrong, one = m("IsNaN", value), m.constant(1, f32)
        kinds = m("Where", wrong, m.constant(2, f32), m.cast(m("Greater", value, least), bool_, f32))
        kinds = m("MaxPool", kinds, **attributes)
        largest = m("MaxPool", m("Where", wrong, least, value), **attributes)
        largest = m("Where", m("Less", kinds, one), least, largest)
        return m("Where", m("Greater", kinds, one), m.constant(np.nan, f32), largest)
    return m("AveragePool", m.expanded(x), count_include_pad=int(count_include_pad), **attributes)
