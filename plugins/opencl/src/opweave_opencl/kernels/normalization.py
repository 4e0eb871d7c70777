"""Softmax and normalizations: each row is normalised by one group of work-items."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from opweave.contract import Arg, Call, Step
from opweave_opencl.kernels.reduction import BLOCK
from opweave_opencl.kernels.table import FLOATS, KERNELS
from opweave_opencl.kernels.words import as_word
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded, padded_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("softmax", "log_softmax", dtypes=FLOATS, inplace=True)
def softmax(stream: OpenCLStream, op: str, out: Arg, x: Arg, mask: Arg | None = None, *, scale: float = 1.0) -> Call:
    operands = [out, x] if mask is None else [out, x, mask]
    macros = {"SOFTMAX": 1, "MASKED": 0 if mask is None else 2, "LOGARITHM": int(op == "log_softmax"), "HEADS": 0}
    return _rows(stream, "softmax", macros, operands, [element_strides(arg) for arg in operands], scale)


@KERNELS("head_softmax", dtypes=FLOATS, inplace=True)
def head_softmax(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    sinks: Arg,
    mask: Arg | None = None,
    *,
    scale: float,
    max_bias: float,
) -> Call:
    operands = [out, x, sinks] if mask is None else [out, x, sinks, mask]
    strides = [element_strides(arg) for arg in operands]
    strides[2] = (*(0,) * (len(x.shape) - 3), *strides[2], 0, 1)
    macros = {"SOFTMAX": 1, "MASKED": 0 if mask is None else 3, "LOGARITHM": 0, "HEADS": 1}
    return _rows(stream, "softmax", macros, operands, strides, scale, max_bias, heads=(x.shape[-3], x.shape[-2]))


@KERNELS("layer_norm", "rms_norm", "l2_norm", dtypes=FLOATS, inplace=True)
def norm(
    stream: OpenCLStream, op: str, out: Arg, x: Arg, weight: Arg | None = None, bias: Arg | None = None, *, eps: float
) -> Call:
    operands, strides = [out, x], [element_strides(out), element_strides(x)]
    for extra in (weight, bias):
        if extra is not None:
            operands.append(extra)
            strides.append((*(0,) * (len(x.shape) - 1), *element_strides(extra)))
    return _rows(stream, "norm", _norm_macros(op, weight, bias), operands, strides, eps)


@KERNELS("softmax_backward", "log_softmax_backward", dtypes=FLOATS, inplace=True)
def softmax_backward(stream: OpenCLStream, op: str, out: Arg, grad: Arg, y: Arg, *, scale: float = 1.0) -> Call:
    return _gradient(stream, op, [out, grad, y], scale)


@KERNELS("layer_norm_backward", "rms_norm_backward", dtypes=FLOATS, inplace=True)
def norm_backward(stream: OpenCLStream, op: str, out: Arg, grad: Arg, x: Arg, *weight: Arg, eps: float) -> Call:
    return _gradient(stream, op, [out, grad, x, *weight], eps)


def _gradient(stream: OpenCLStream, op: str, operands: Sequence[Arg], number: float) -> Call:
    strides = [element_strides(arg) for arg in operands]
    strides = [(*(0,) * (len(strides[0]) - len(own)), *own) for own in strides]
    macros = {
        "GRADIENT": 1,
        "SOFT": int(op == "softmax_backward"),
        "LOGARITHM": int(op == "log_softmax_backward"),
        "CENTER": int(op == "layer_norm_backward"),
        "WEIGHT": int(len(operands) > 3),
    }
    return _rows(stream, "gradient", macros, operands, strides, number)


def _needs_lines(step: Step) -> str | None:
    for arg in (step.out, step.srcs[0]):
        if len(_lines(arg)[0]) > 1:
            return "the elements of a channel do not lie in one line"
    return None


def _lines(arg: Arg) -> tuple[Axes, Axes]:
    """Lengths and steps of the axes of a channel."""
    lengths, (steps,) = coalesce(arg.shape[2:], [element_strides(arg)[2:]])
    return lengths, steps


@KERNELS("group_norm", dtypes=FLOATS, inplace=True, when=_needs_lines)
@KERNELS("group_norm", dtypes=FLOATS, layout="dense", inplace=True)
def group_norm(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    weight: Arg | None = None,
    bias: Arg | None = None,
    *,
    groups: int,
    eps: float,
) -> Call:
    """A row is a group, a line of it a channel."""
    depth = x.shape[1] // groups
    operands, strides = [out, x], []
    for arg in operands:
        row, channel = element_strides(arg)[:2]
        strides.append((row, depth * channel, channel, _lines(arg)[1][0]))
    for extra in (weight, bias):
        if extra is not None:
            step = element_strides(extra)[0]
            operands.append(extra)
            strides.append((0, depth * step, step, 0))
    shape = (x.shape[0], groups, depth, prod(x.shape[2:]))
    return _rows(stream, "norm", _norm_macros(op, weight, bias), operands, strides, eps, shape=shape)


def _norm_macros(op: str, weight: Arg | None, bias: Arg | None) -> dict[str, int]:
    return {
        "NORM": 1,
        "CENTER": int(op in ("layer_norm", "group_norm")),
        "EUCLIDEAN": int(op == "l2_norm"),
        "WEIGHT": int(weight is not None),
        "BIAS": int(bias is not None),
    }


def _rows(
    stream: OpenCLStream,
    kernel: str,
    macros: dict[str, int],
    operands: Sequence[Arg],
    strides: Sequence[Axes],
    a: float,
    b: float = 0.0,
    *,
    heads: tuple[int, int] = (1, 1),
    shape: Axes | None = None,
) -> Call:
    """The call of a kernel that gives each row to one group.

    Args:
        strides: of each operand, in elements, along ``shape``.
        a, b: the kernel's numbers.
        heads: how many there are, and the rows of each.
        shape: axes of rows, then lines of a row and their elements; default: the operands' shape, whose last axis is
            the only line of a row.
    """
    if shape is None:
        shape = (*operands[0].shape[:-1], 1, operands[0].shape[-1])
        strides = [(*own[:-1], 0, own[-1]) for own in strides]
    *_, lines, n = shape
    lengths, lead = coalesce(shape[:-2], [own[:-2] for own in strides])
    rows, dtype = prod(lengths), operands[0].dtype
    words = [rows, len(lengths), *padded(lengths, 1), lines, n, *map(element_offset, operands)]
    words += [own[-2] for own in strides] + [own[-1] for own in strides]
    words += padded_strides(lead)
    words += [*heads, as_word(a, dtype), as_word(b, dtype)]
    tuning = stream.target.tuning
    group = tuning.row_group
    groups = min(rows, tuning.most_groups)
    whole = n % tuning.vector == 0 and all(own[-1] == 1 for own in strides)
    values = macros | {"OPERANDS": len(operands), "VEC": tuning.vector, "BLOCK": BLOCK.value}
    values |= {"WIDE": int(not dtype.is_half), "WHOLE": int(whole)}
    texts = {"T": dtype.name, **{name: str(value) for name, value in values.items()}}
    program = stream.target.programs.get("normalization", texts | stream.target.sharing())
    return stream.launch(program, kernel, (groups * group,), (group,), operands, words)
