"""Values to quantized blocks, and back."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.graph.dtypes import DType
from opweave.ops.encoding import ENCODED, OF_ENTRIES
from opweave_opencl.kernels.blocks import QUANTIZED, block_macros, not_in_rows
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded, padded_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream


_ENCODED: Final = [name for name in ENCODED if name not in OF_ENTRIES]
"""The types that ``quantization.cl`` encodes: the tables of nearest entries stay on the CPU."""


@KERNELS("quantize", dtypes=f"f32 {' '.join(_ENCODED)}", layout="rows")
def quantize(stream: OpenCLStream, op: str, out: Arg, x: Arg, importance: Arg | None = None, *, dtype: DType) -> Call:
    weights = x if importance is None else importance
    macros = {**block_macros(dtype), "ENCODE": "1", "WEIGHTED": str(int(importance is not None))}
    program = stream.target.programs.get("quantization", macros)
    lead, words = _words(out, x, weights)
    return stream.launch(program, "encode_blocks", (x.shape[-1] // dtype.block, lead, 1), (1, 1, 1), (out, x, weights),
                         words)  # fmt: skip


def _why_not(step: Step) -> str | None:
    return not_in_rows("the output", step.out)


@KERNELS("dequantize", dtypes=f"f32 {QUANTIZED}", when=_why_not)
def dequantize(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, blocks: DType) -> Call:
    program = stream.target.programs.get("quantization", dict(block_macros(blocks)))
    lead, words = _words(x, out)
    return stream.launch(program, "decode_blocks", (x.shape[-1] // 16, lead, 1), (1, 1, 1), (out, x), words)


def _words(blocks: Arg, *values: Arg) -> tuple[int, list[int]]:
    """The number of rows, and the parameters of a kernel: blocks by bytes, values by elements."""
    shape, strides = coalesce(blocks.shape[:-1], [blocks.strides[:-1], *[element_strides(v)[:-1] for v in values]])
    offsets = [blocks.offset, *map(element_offset, values)]
    missing = 3 - len(strides)
    words = [len(shape), *padded(shape, 1), *padded_strides([*strides, *[()] * missing]), *offsets, *[0] * missing]
    return prod(shape), words
