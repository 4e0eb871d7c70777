"""Sparse attention: one work-item for each score of the indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Arg, Call
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_offset, element_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []


@KERNELS("indexer_scores", dtypes="f64 f32 f16 bf16")
def indexer_scores(stream: OpenCLStream, op: str, out: Arg, q: Arg, k: Arg, weights: Arg) -> Call:
    operands = [out, q, k, weights]
    batch, heads, tokens, size = q.shape
    words = [heads, tokens, k.shape[1], size]
    for arg in operands:
        words += element_strides(arg)
    words += map(element_offset, operands)
    macros = {"T": out.dtype.name, "K": k.dtype.name, "W": weights.dtype.name}
    program = stream.target.programs.get("sparse_attention", macros)
    global_size, group = spread((k.shape[1], tokens, batch), stream.target.tuning.group)
    return stream.launch(program, "scores", global_size, group, operands, words)
