"""Products with quantized weights whose blocks compiled functions unpack: in ``int8``, and of one row exactly."""

from __future__ import annotations

from typing import Final

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.jit.supported import BLOCKS
from opweave_cpu.kernels.table import KERNELS

__all__ = ["linear_in_int8", "linear_of_one_row", "unpacks_integers"]

MOST_ROWS: Final = 1024
"""Rows up to which all activations are kept as bytes beside them."""

_STRETCH: Final = 256
_TYPES: Final = [as_dtype(name) for name in ("f32", "f16", "bf16", *sorted(BLOCKS))]


def _why_not(step: Step) -> str | None:
    w = step.srcs[1]
    if w.dtype.name not in BLOCKS or len(w.shape) != 2:
        return "the weights are no matrix of a type whose blocks compiled functions read"
    return why_not()


def _why_not_in_int8(step: Step) -> str | None:
    reason = _why_not(step)
    if reason is not None:
        return reason
    from opweave_cpu.jit.integers import multiplies_bytes

    if not multiplies_bytes():
        return "the processor has no instructions for products of bytes"
    outputs = step.srcs[1].shape[0]
    if _rows(step) > MOST_ROWS or outputs < 16:
        return f"it takes at most {MOST_ROWS} rows, and weights of at least 16"
    return None


def _why_not_exactly(step: Step) -> str | None:
    reason = _why_not(step)
    if reason is not None:
        return reason
    from opweave_cpu.jit.float_products import has_registers

    if not has_registers():
        return "the processor has no vectors of 512 bits"
    return None if _rows(step) == 1 else "it takes one row"


def _rows(step: Step) -> int:
    return step.srcs[0].size // step.srcs[1].shape[1]


def _records(step: Step) -> Arrays:
    from opweave_cpu.jit.integer_products import padded_rows, record_bytes

    w = step.srcs[1]
    return {"records": ("u8", (-(-w.shape[1] // _STRETCH) * padded_rows(_rows(step)) * record_bytes(w.dtype),))}


def _ordered(step: Step) -> Arrays:
    return {"records": ("u8", (-(-step.srcs[1].shape[1] // _STRETCH) * _STRETCH * 4,))}


@KERNELS("linear", dtypes=_TYPES, layout="dense", precision="int8", when=_why_not_in_int8, workspace=_records)
def linear_in_int8(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, records: Arg
) -> Call:
    from opweave_cpu.jit.integer_products import bind_integer_product

    return bind_integer_product(stream, out, x, w, b, records)


@KERNELS("linear", dtypes=_TYPES, layout="dense", when=_why_not_exactly, workspace=_ordered)
def linear_of_one_row(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, records: Arg
) -> Call:
    from opweave_cpu.jit.float_products import bind_float_product

    return bind_float_product(stream, out, x, w, b, records)


def unpacks_integers(step: Step) -> bool:
    """Whether a step runs by a kernel of this module."""
    kernel = KERNELS.find(step)
    return kernel is not None and kernel.factory in (linear_in_int8, linear_of_one_row)
