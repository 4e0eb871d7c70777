"""Values to quantized blocks, by the reference's own passes, and back."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Final

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import needs_dense_output
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave.ops.blocks import Decoder, fields_of, scratch_bytes
from opweave.ops.encoding import ENCODED, encode_into
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.jit.supported import BLOCKS
from opweave_cpu.kernels.table import KERNELS, QUANTIZED
from opweave_cpu.tiles import Cut, at_once, in_turn, shares, tile_cuts, workers_of
from opweave_cpu.tunables import BLOCK_TILE, limit

_SPREAD: Final = limit("quantization_spread", 1 << 14, 1, 1 << 20)
"""Elements from which on rows are encoded by several threads."""


@KERNELS("quantize", dtypes=f"f32 {' '.join(ENCODED)}")
def quantize(stream: Stream, op: str, out: Arg, x: Arg, importance: Arg | None = None, *, dtype: DType) -> Call:
    values, blocks = x.view, out.view
    weights = None if importance is None else importance.view
    count = min(workers_of(stream), len(values))
    if values.ndim < 2 or count < 2 or values.size < _SPREAD.value:
        return partial(encode_into, values, blocks, dtype, weights)
    return at_once([
        partial(encode_into, values[some], blocks[some], dtype, None if weights is None else weights[some])
        for some in shares(len(values), count)
    ])  # fmt: skip


def _cuts(x: Arg) -> list[Cut]:
    """Parts of the blocks that are decoded at a time."""
    return tile_cuts((*x.shape[:-1], x.shape[-1] // x.dtype.block), BLOCK_TILE.value // x.dtype.block, keep_last=False)


def _workspace(step: Step) -> Arrays:
    x = step.srcs[0]
    blocks = min(x.size, BLOCK_TILE.value) // x.dtype.block
    return {"decoding": ("u8", (scratch_bytes(x.dtype, blocks),))}


def _why_not_compiled(step: Step) -> str | None:
    x = step.srcs[0]
    plain = x.buffer_type is None or x.buffer_type.is_raw
    if x.dtype.name not in BLOCKS or not plain or x.strides[-1] != x.dtype.itemsize:
        return "its blocks are not decoded by compiled functions, or do not lie side by side"
    reason = needs_dense_output(step) or why_not()
    if reason is not None:
        return reason
    from opweave_cpu.jit.compiler import has_fma

    return None if has_fma() else "the processor does not multiply and add at once"


@KERNELS("dequantize", dtypes=[as_dtype("f32"), *QUANTIZED], when=_why_not_compiled)
def dequantize_compiled(stream: Stream, op: str, out: Arg, x: Arg, *, blocks: DType) -> Call:
    from opweave_cpu.jit.products import bind_decoded

    return bind_decoded(stream, out, x)


@KERNELS("dequantize", dtypes=[as_dtype("f32"), *QUANTIZED], when=needs_dense_output, workspace=_workspace)
def dequantize(stream: Stream, op: str, out: Arg, x: Arg, *, blocks: DType, decoding: Arg | None = None) -> Call:
    stored, scratch = fields_of(x.view, blocks), np.empty(0, np.uint8) if decoding is None else decoding.view
    values = out.view.reshape(*stored.shape, blocks.block)
    decoders: dict[tuple[int, ...], Decoder] = {}
    calls: list[Call] = []
    for cut in _cuts(x):
        some = stored[cut]
        if some.shape not in decoders:
            decoders[some.shape] = Decoder(blocks, some.shape, scratch)
        calls.append(partial(decoders[some.shape].into(values[cut].reshape(prod(some.shape), -1)), some))
    return in_turn(calls)
