"""Products of some rows with weights in f32, by compiled functions."""

from __future__ import annotations

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tunables import COMPILED_ROWS, VECTOR_ROWS

__all__ = ["linear_of_some_rows", "multiplies_rows"]


def _why_not(step: Step) -> str | None:
    w = step.srcs[1]
    if len(w.shape) != 2 or not VECTOR_ROWS.value <= _rows(step) <= COMPILED_ROWS.value:
        return f"it takes {VECTOR_ROWS.value} to {COMPILED_ROWS.value} rows, and a matrix of weights"
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.compiler import has_fma

    return None if has_fma() else "the processor does not multiply and add at once"


def _rows(step: Step) -> int:
    return step.srcs[0].size // step.srcs[1].shape[1]


def _workspace(step: Step) -> Arrays:
    from opweave_cpu.jit.row_products import padded

    return {"turned": ("f32", (step.srcs[1].shape[1], padded(_rows(step))))}


@KERNELS("linear", dtypes="f32", layout="dense", when=_why_not, workspace=_workspace)
def linear_of_some_rows(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, turned: Arg
) -> Call:
    from opweave_cpu.jit.row_products import bind_row_product

    return bind_row_product(stream, out, x, w, b, turned)


def multiplies_rows(step: Step) -> bool:
    """Whether a step runs by the kernel of this module."""
    if step.srcs[1].dtype.name != "f32":
        return False
    kernel = KERNELS.find(step)
    return kernel is not None and kernel.factory is linear_of_some_rows
