"""Products of several rows with weights on processors, where each row is a lane of the vectors that are multiplied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.kernels import KernelTable, of_other_type
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave_opencl.kernels.blocks import QUANTIZED, block_macros, not_of_blocks
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.products import DEPTH
from opweave_opencl.layouts import element_offset, padded
from opweave_opencl.tuning import processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["add_lane_products", "linear_words", "rows_of"]

LANES: Final = 16
"""Rows of a panel."""

BUSY: Final = processor_limit("busy_lanes", 12, 1, 16)
"""Lanes of each panel that must have a row, on average: with fewer, adding up lanes of vectors along k takes no longer.
Measured on Intel's driver and PoCL: with 16, 128 and 1,024 rows of floats this takes 0.6 to 1.0 of that time."""

DECODED: Final = processor_limit("decoded_rows", 32, 1, 1 << 10)
"""Rows from which on it is faster with quantized weights, which are decoded to local memory: 0.7 to 1.0 of the time."""

PANELS: Final = processor_limit("lane_panels", 8, 2, 8, bounds=(2, 8))
"""The most panels of a work-item: a power of two."""

DEEP: Final = processor_limit("transposed_depth", 64, 1, 1 << 12)
"""Elements along k that a work-item transposes at once."""


def add_lane_products(table: KernelTable) -> None:
    """Register the products in the table of a processor."""
    types = f"f32 f16 bf16 {QUANTIZED}"
    table("linear", dtypes=types, layout="dense", when=_why_not, workspace=_panels)(linear_in_lanes)


def rows_of(step: Step) -> int:
    """How many rows a ``linear`` multiplies."""
    return step.srcs[0].size // step.srcs[1].shape[1]


def linear_words(out: Arg, x: Arg, w: Arg, b: Arg | None, *scratch: Arg) -> list[int]:
    """The parameters of ``linear.cl`` but for the last one, the share of a work-item; ``scratch``: up to two arrays."""
    n, k = w.shape
    quantized = w.dtype.is_quantized
    words = [x.size // k, n, k, *map(element_offset, (out, x)), w.offset if quantized else element_offset(w)]
    words += [element_offset(b) if b else 0, *padded([element_offset(arg) for arg in scratch], 0, 2)]
    return [*words, w.strides[0] if quantized else k, int(b is not None)]


def _why_not(step: Step) -> str | None:
    if not step.out.dtype.is_float or step.out.dtype.name == "f64":
        return f"the output is {step.out.dtype}"
    m, quantized = rows_of(step), step.srcs[1].dtype.is_quantized
    if m < BUSY.value * _count(m) or (quantized and m < DECODED.value):
        return f"vectors of {LANES} lanes do not suit {m} rows"
    return not_of_blocks(step) if quantized else of_other_type(step, 1)


def _panels(step: Step) -> Arrays:
    m, k = rows_of(step), step.srcs[1].shape[1]
    return {"panels": ("f32", (_count(m), k, LANES))}


def _count(m: int) -> int:
    """Panels of so many rows."""
    return -(-m // LANES)


def _depth(w: Arg) -> int:
    """Elements along k that are multiplied at once, by columns as they lie or converted."""
    if w.dtype.is_quantized:
        return DEPTH.largest  # whole blocks
    return DEPTH.value if w.dtype.is_half else 2 * DEPTH.value


def linear_in_lanes(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    panels: Arg,
    blocks: DType | None = None,
) -> Call:
    (n, k), wanted = w.shape, stream.target.tuning.wanted
    m, columns = x.size // k, -(-n // LANES)
    head = linear_words(out, x, w, b, panels)
    macros = {"T": out.dtype.name, "DIRECT": str(int(not out.dtype.is_half))}
    get = stream.target.programs.get
    count = _count(m)
    transposing = stream.launch(
        get("lane_products", {**macros, "TRANSPOSING": "1"}),
        "transpose_rows",
        (count, -(-k // DEEP.value)),
        (1, 1),
        (x, panels),
        [*head, DEEP.value],
    )
    if blocks is not None:
        macros |= block_macros(blocks)
    macros |= {"BIAS": (b or out).dtype.name, "PAIRED": str(1 - count % 2), "PANELS": str(PANELS.largest)}
    macros["DEPTH"] = str(_depth(w))
    share = PANELS.value
    while share > 2 and columns * -(-count // share) < wanted:
        share //= 2
    size = columns, -(-count // share)
    lanes = stream.launch(
        get("lane_products", macros), "lanes", size, (1, 1), (out, panels, w, b or out), [*head, share]
    )
    return in_order([transposing, lanes])
