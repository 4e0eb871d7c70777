"""Products of matrices."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

FEW_ROWS: Final = 4
"""Up to so many rows, one dot product at a time is faster than packing a panel."""

PANEL_COLUMNS: Final = 16
TILE: Final = 64


@KERNELS("matmul")
def matmul(stream: OpenCLStream, op: str, out: Arg, a: Arg, b: Arg) -> Call:
    o_strides, a_strides, b_strides = map(element_strides, (out, a, b))
    return _product(
        stream,
        (out, a, b),
        a.shape[:-1],
        (o_strides[:-1], a_strides[:-1], (*b_strides[:-2], 0)),
        n=(b.shape[-1], o_strides[-1], b_strides[-1]),
        k=(a.shape[-1], a_strides[-1], b_strides[-2]),
    )


@KERNELS("linear")
def linear(stream: OpenCLStream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None) -> Call:
    o_strides, x_strides, w_strides = map(element_strides, (out, x, w))
    return _product(
        stream,
        (out, x, w) if b is None else (out, x, w, b),
        x.shape[:-1],
        (o_strides[:-1], x_strides[:-1], (0,) * (len(x.shape) - 1)),
        n=(w.shape[0], o_strides[-1], w_strides[0]),
        k=(w.shape[1], x_strides[-1], w_strides[1]),
    )


def _product(
    stream: OpenCLStream,
    operands: tuple[Arg, ...],
    rows: Axes,
    strides: tuple[Axes, Axes, Axes],
    *,
    n: tuple[int, int, int],
    k: tuple[int, int, int],
) -> Call:
    """The call for ``out[..., n] = sum over k of a[..., k] * b[..., k, n] (+ bias[n])``.

    Args:
        operands: out, a, b and possibly bias.
        rows: the axes of the output but the last, outermost first; ``strides`` are those of out, a and b along them.
        n: length of the last axis, step of out and of b along it.
        k: length of the summed axis, step of a and of b along it.
    """
    lengths, (o_rows, a_rows, b_rows) = coalesce(rows, strides)
    if b_rows[0] == 0:  # the innermost rows share one b: they are the rows of a product, the others batches
        m, o_step, a_step = lengths[0], o_rows[0], a_rows[0]
        lengths, o_rows, a_rows, b_rows = lengths[1:], o_rows[1:], a_rows[1:], b_rows[1:]
    else:
        m, o_step, a_step = 1, 0, 0
    columns, o_n, b_n = n
    depth, a_k, b_k = k
    bias = operands[3:]
    words = [m, columns, depth, len(lengths), *padded(lengths, 1)]
    words += padded([element_offset(arg) for arg in operands], 0, 4)
    for own in (o_rows, a_rows, b_rows):
        words += padded(own, 0)
    words += [o_step, o_n, a_step, a_k, b_k, b_n, element_strides(bias[0])[0] if bias else 0]

    tuning = stream.target.tuning
    batches = prod(lengths)
    macros = {"BIAS": str(len(bias)), "VEC": "1", "GROUP": "1"}
    size: tuple[int, int, int]
    if m <= FEW_ROWS and a_k == b_k == 1:
        kernel, group = "dots", (tuning.row_group, 1, 1)
        size = (columns * tuning.row_group, 1, batches)
        macros |= {"DOTS": "1", "VEC": str(tuning.row_vector), "GROUP": str(tuning.row_group)}
    elif tuning.tiled:
        kernel, group = "tile", (16, 16, 1)
        size = (-(-columns // TILE) * 16, -(-m // TILE) * 16, batches)
        macros |= {"TILE": "1"}
    else:
        block = _block(m, -(-columns // PANEL_COLUMNS) * batches, stream.target.cl_device.max_compute_units)
        kernel, group = "panel", (1, 1, 1)
        size = (-(-columns // PANEL_COLUMNS), -(-m // block), batches)
        macros |= {"PANEL": "1", "BLOCK": str(block)}
    program = stream.target.programs.get("matmul", macros)
    return stream.launch(program, kernel, size, group, operands, words)


def _block(m: int, panels: int, cores: int) -> int:
    """Rows that one work-item computes: many, since it packs a panel for them, but enough pieces for every core."""
    return 128 if panels >= 4 * cores or m > 512 else 32
