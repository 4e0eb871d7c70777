"""Products with quantized weights in ``int8``, by compiled functions."""

from __future__ import annotations

from typing import Final

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.jit.supported import BLOCKS
from opweave_cpu.kernels.table import KERNELS

__all__ = ["linear_in_int8", "runs_in_int8"]

MOST_ROWS: Final = 1024
"""Rows up to which all activations are kept as bytes beside them."""

_STRETCH: Final = 256
_TYPES: Final = [as_dtype(name) for name in ("f32", "f16", "bf16", *sorted(BLOCKS))]


def _why_not(step: Step) -> str | None:
    w = step.srcs[1]
    if not w.dtype.is_quantized or len(w.shape) != 2:
        return "the weights are no quantized matrix"
    missing = why_not()
    if missing is not None:
        return missing
    from opweave_cpu.jit.integers import multiplies_bytes

    if not multiplies_bytes():
        return "the processor has no instructions for products of bytes"
    outputs, inputs = w.shape
    rows = step.srcs[0].size // inputs
    if rows > MOST_ROWS or outputs < 16:
        return f"it takes at most {MOST_ROWS} rows, and weights of at least 16"
    return None


def _records(step: Step) -> Arrays:
    from opweave_cpu.jit.integer_products import padded_rows, record_bytes

    x, w = step.srcs[:2]
    inputs = w.shape[1]
    return {"records": ("u8", (-(-inputs // _STRETCH) * padded_rows(x.size // inputs) * record_bytes(w.dtype),))}


@KERNELS("linear", dtypes=_TYPES, layout="dense", precision="int8", when=_why_not, workspace=_records)
def linear_in_int8(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, records: Arg
) -> Call:
    from opweave_cpu.jit.integer_products import bind_integer_product

    return bind_integer_product(stream, out, x, w, b, records)


def runs_in_int8(step: Step) -> bool:
    """Whether a step for which a program allows that is computed so."""
    kernel = KERNELS.find(step)
    return kernel is not None and kernel.precision == "int8"
