"""Softmax and norms along the last axis."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("softmax", inplace=True)
def softmax(stream: OpenCLStream, op: str, out: Arg, x: Arg, mask: Arg | None = None, *, scale: float) -> Call:
    operands = [out, x] if mask is None else [out, x, mask]
    macros = {"SOFTMAX": "1", "MASK": str(int(mask is not None))}
    return _rows(stream, "softmax", macros, operands, [element_strides(arg) for arg in operands], scale)


@KERNELS("layer_norm", "rms_norm", inplace=True)
def norm(
    stream: OpenCLStream, op: str, out: Arg, x: Arg, weight: Arg | None = None, bias: Arg | None = None, *, eps: float
) -> Call:
    operands, strides = [out, x], [element_strides(out), element_strides(x)]
    for extra in (weight, bias):
        if extra is not None:
            operands.append(extra)
            strides.append((*(0,) * (len(x.shape) - 1), *element_strides(extra)))
    macros = {
        "NORM": "1",
        "MASK": "0",
        "CENTER": str(int(op == "layer_norm")),
        "WEIGHT": str(int(weight is not None)),
        "BIAS": str(int(bias is not None)),
    }
    return _rows(stream, "norm", macros, operands, strides, eps)


def _rows(
    stream: OpenCLStream,
    kernel: str,
    macros: dict[str, str],
    operands: list[Arg],
    strides: list[Axes],
    parameter: float,
) -> Call:
    """The call of a kernel that gives each row (the last axis) to one group."""
    shape = operands[1].shape
    steps = [own[-1] for own in strides]
    lengths, lead = coalesce(shape[:-1], [own[:-1] for own in strides[:3]])
    tuning = stream.target.tuning
    group = tuning.row_group
    macros = macros | {"VEC": str(tuning.row_vector if set(steps) == {1} else 1), "GROUP": str(group)}
    words = [shape[-1], len(lengths), *padded(lengths, 1)]
    words += [*padded([element_offset(arg) for arg in operands], 0, 4), *padded(steps, 0, 4)]
    for own in (*lead, *[()] * (3 - len(lead))):
        words += padded(own, 0)
    program = stream.target.programs.get("normalization", macros)
    return stream.launch(program, kernel, (prod(lengths) * group,), (group,), operands, words, (parameter,))
