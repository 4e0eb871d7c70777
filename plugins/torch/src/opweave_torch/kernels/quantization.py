"""Quantized blocks decoded some at a time, and values encoded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Final

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import needs_dense_output
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, f32
from opweave_torch.kernels.binding import in_order
from opweave_torch.kernels.blocks import Decoding, decoding_arrays
from opweave_torch.kernels.encoding import ENCODED, encoder
from opweave_torch.kernels.table import KERNELS, QUANTIZED
from opweave_torch.memory import tensor
from opweave_torch.tunables import limit

_AT_ONCE: Final = limit("decoded_blocks", 1 << 13, 1, 1 << 18)
"""Blocks that are decoded at a time."""


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[slice | int, ...]]:
    """Indices of parts of at most `_AT_ONCE` blocks."""
    inner = prod(shape[1:])
    if prod(shape) <= _AT_ONCE.value:
        yield ()
    elif inner > _AT_ONCE.value:
        yield from ((i, *rest) for i in range(shape[0]) for rest in _parts(shape[1:]))
    else:
        step = _AT_ONCE.value // inner
        yield from ((slice(first, first + step),) for first in range(0, shape[0], step))


def _workspace(step: Step) -> Arrays:
    dtype = step.srcs[0].dtype
    return decoding_arrays(dtype, min(_AT_ONCE.value, step.out.size // dtype.block))


@KERNELS("dequantize", dtypes=[f32, *QUANTIZED], when=needs_dense_output, workspace=_workspace)
def dequantize(stream: Stream, op: str, out: Arg, x: Arg, *, blocks: DType, **arrays: Arg) -> Call:
    stored = tensor(x)  # (..., blocks, bytes of a block)
    count = min(_AT_ONCE.value, out.size // blocks.block)
    decoding = Decoding(blocks, count, arrays, stored.device)
    target = tensor(out).view(*stored.shape[:-1], blocks.block)
    calls: list[Call] = []
    for part in _parts(tuple(stored.shape[:-1])):
        into = target[part]
        values = decoding.values[: into.shape[:-1].numel()].view(into.shape)
        calls += [*decoding.load(stored[part]), *decoding.calls, partial(into.copy_, values)]
    return in_order(calls)


@KERNELS("quantize", dtypes=f"f32 {' '.join(ENCODED)}")
def quantize(stream: Stream, op: str, out: Arg, x: Arg, importance: Arg | None = None, *, dtype: DType) -> Call:
    return encoder(dtype.name, tensor(out), tensor(x), None if importance is None else tensor(importance))
