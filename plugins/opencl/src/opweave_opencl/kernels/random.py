"""Random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call
from opweave.graph.dtypes import DType
from opweave.ops.random import UNIFORM_BITS, block_count
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import FLOATS, KERNELS
from opweave_opencl.layouts import element_offset
from opweave_opencl.tuning import limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

ROW: Final = limit("random_row", 1 << 20, 1, 1 << 20)
"""Blocks along the first axis of a range; the second one counts rows of these."""


@KERNELS("uniform", "normal", dtypes=FLOATS, layout="dense")
def random(
    stream: OpenCLStream, op: str, out: Arg, key: Arg, counter: Arg, *, shape: tuple[int, ...], dtype: DType
) -> Call:
    blocks = block_count(out.size, dtype)
    macros = {
        "T": dtype.name, "WIDE": str(int(dtype.name == "f64")), "NORMAL": str(int(op == "normal")),
        "DIGITS": str(UNIFORM_BITS[dtype.name]),
    }  # fmt: skip
    operands = out, key, counter
    size, group = spread((min(blocks, ROW.value), -(-blocks // ROW.value), 1), stream.target.tuning.group)
    program = stream.target.programs.get("random", macros)
    return stream.launch(program, "random", size, group, operands, [blocks, out.size, *map(element_offset, operands)])
