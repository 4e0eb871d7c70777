"""Products with quantized weights whose blocks compiled functions unpack to integers: in ``int8``, and exactly."""

from __future__ import annotations

from functools import partial
from typing import Final

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.precision import Precision
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.jit.supported import BLOCKS
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, in_turn
from opweave_cpu.tunables import INTEGER_ROWS, limit

__all__ = ["TYPES", "exact_linear_of_integers", "linear_in_int8", "unpacks_integers", "why_no_integers"]

MOST_ROWS: Final = limit("integer_product_rows", 1024, 1, 1 << 14)
"""Rows up to which the activations are kept as integers, all at once, in the workspace."""

_STRETCH: Final = 256
TYPES: Final = [as_dtype(name) for name in ("f32", "f16", "bf16", *sorted(BLOCKS))]


def why_no_integers(w: Arg) -> str | None:
    """Why no compiled function multiplies by the integers of such weights, in matrices of at least 16 rows."""
    if w.dtype.name not in BLOCKS:
        return "the weights are not of a type whose blocks compiled functions read"
    reason = why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.integers import multiplies_bytes

    if not multiplies_bytes():
        return "the processor has no instructions for products of bytes"
    return "the weights have fewer than 16 rows" if w.shape[-2] < 16 else None


def _why_not(step: Step) -> str | None:
    w = step.srcs[1]
    if len(w.shape) != 2 or _rows(step) > MOST_ROWS.value:
        return f"it takes at most {MOST_ROWS.value} rows, and a matrix of weights"
    return why_no_integers(w)


def _why_not_exactly(step: Step) -> str | None:
    reason = _why_not(step)
    if reason is not None:
        return reason
    from opweave_cpu.jit.integers import has_dot

    if _rows(step) > INTEGER_ROWS.value and not has_dot():
        return "without instructions for dot products of bytes, f32 is faster for more than a few rows"
    return None


def _rows(step: Step) -> int:
    return step.srcs[0].size // step.srcs[1].shape[1]


def _records(step: Step, precision: Precision) -> Arrays:
    from opweave_cpu.jit.integer_products import padded_rows, record_bytes

    w, rows = step.srcs[1], _rows(step)
    record = record_bytes(w.dtype, precision)
    return {"records": ("u8", (-(-w.shape[1] // _STRETCH) * padded_rows(rows) * record,))}


def _exact_workspace(step: Step) -> Arrays:
    return {**_records(step, "exact"), "marks": ("u8", (_rows(step),))}


@KERNELS(
    "linear", dtypes=TYPES, layout="dense", precision="int8", when=_why_not,
    workspace=partial(_records, precision="int8"),
)  # fmt: skip
def linear_in_int8(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, records: Arg
) -> Call:
    from opweave_cpu.jit.integer_products import bind_integer_product

    return bind_integer_product(stream, out, x, w, b, records)


@KERNELS("linear", dtypes=TYPES, layout="dense", when=_why_not_exactly, workspace=_exact_workspace)
def exact_linear_of_integers(
    stream: Stream, op: str, out: Arg, x: Arg, w: Arg, b: Arg | None = None, *, blocks: DType, records: Arg, marks: Arg
) -> Call:
    from opweave_cpu.jit.integer_products import bind_integer_product

    product = bind_integer_product(stream, out, x, w, b, records, marks)
    rows: dict[int, Call] = {}

    def multiply_marked_rows() -> None:
        """Multiplies again, in f32, the rows of activations that integers cannot represent."""
        if b"\x01" in marked.tobytes():  # a tenth of the time of NumPy's own search
            for r in marked.nonzero()[0].tolist():
                if r not in rows:
                    rows[r] = _bind_one_row(stream, r, out, x, w, b)
                rows[r]()

    marked: Array = marks.view
    return in_turn([product, multiply_marked_rows])


def _bind_one_row(stream: Stream, r: int, out: Arg, x: Arg, w: Arg, b: Arg | None) -> Call:
    """The call of one row of a product in f32."""
    from opweave_cpu.jit.products import prepare_product

    srcs = (_row(x, r), w, *([] if b is None else [b]))
    step = Step("linear", _row(out, r), srcs, {})
    return prepare_product(stream, step).bind(stream, (*srcs, step.out))


def _row(arg: Arg, r: int) -> Arg:
    """A row of a dense operand."""
    n, size = arg.shape[-1], arg.dtype.itemsize
    return Arg(arg.buffer, arg.offset + r * n * size, arg.dtype, (1, n), (n * size, size))


def unpacks_integers(step: Step) -> bool:
    """Whether a step runs by a kernel of this module."""
    kernel = KERNELS.find(step)
    return kernel is not None and kernel.factory in (linear_in_int8, exact_linear_of_integers)
