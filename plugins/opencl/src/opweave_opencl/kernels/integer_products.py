"""Products with quantized weights at ``int8`` on processors: rows are rounded to bytes, and multiplied as integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.kernels import KernelTable
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType
from opweave_opencl.kernels.blocks import block_macros, not_of_blocks
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.lane_products import linear_words, rows_of
from opweave_opencl.kernels.products import AMPLE, BLOCK_ROWS, DEPTH

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["INTEGERS", "add_integer_products"]

INTEGERS: Final = "q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k"
"""Types of blocks whose integers kernels multiply."""

_GROUP: Final = 32
"""Elements of a row that share a scale."""


def add_integer_products(table: KernelTable, when: Callable[[Step], str | None]) -> None:
    """Register the products in the table of one device.

    Args:
        when: why the device should compute a step exactly instead, or ``None``.
    """

    def why_not(step: Step) -> str | None:
        return _why_not(step) or when(step)

    types = f"f32 f16 bf16 {INTEGERS}"
    table("linear", dtypes=types, layout="dense", precision="int8", when=why_not, workspace=_rounded)(linear_in_int8)


def _why_not(step: Step) -> str | None:
    if step.srcs[1].dtype.name == "q8_0" and rows_of(step) > 1:
        return "of several rows, sums of products with integers of 8 bits do not fit into 16"
    return not_of_blocks(step)


def _rounded(step: Step) -> Arrays:
    size = step.srcs[0].size
    return {"levels": ("i16", (size,)), "about": ("f32", (size // _GROUP, 4))}


def linear_in_int8(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    w: Arg,
    b: Arg | None = None,
    *,
    blocks: DType,
    levels: Arg,
    about: Arg,
) -> Call:
    tuning, (n, k) = stream.target.tuning, w.shape
    m = x.size // k
    words = linear_words(out, x, w, b, levels, about)
    macros = {"T": out.dtype.name, "BIAS": (b or out).dtype.name}
    share = max(1, min(32, 2 * (m * k // _GROUP) // tuning.wanted))
    rounding = stream.launch(
        stream.target.programs.get("integer_products", {**macros, "ROUNDING": "1", "PAIRED": str(int(m > 1))}),
        "round_rows",
        (-(-m * k // _GROUP // share), 1, 1),
        (1, 1, 1),
        (x, levels, about),
        [*words, share],
    )
    macros |= block_macros(blocks)
    if m == 1:
        macros |= {"ALONG": "1"}
        share = max(1, min(32, n // (2 * tuning.wanted)))
        kernel, size = "along", (-(-n // share), 1, 1)
    else:
        most, depth = (128, 4 * DEPTH.largest) if tuning.local >= AMPLE.value else (16, DEPTH.largest)
        macros |= {"ACROSS": "1", "ROWS": "4", "BLOCK": str(most), "DEPTH": str(depth)}
        share, columns = most, -(-n // 16)
        while share > BLOCK_ROWS.value and columns * -(-m // share) < tuning.wanted:
            share //= 2
        kernel, size = "across", (columns, -(-m // share), 1)
    program = stream.target.programs.get("integer_products", macros)
    operands = (out, w, b or out, levels, about)
    return in_order([rounding, stream.launch(program, kernel, size, (1, 1, 1), operands, [*words, share])])
