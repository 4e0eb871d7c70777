"""Attention that never writes its scores: keys are read in blocks, each of which updates the softmax of its rows.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.kernels import of_other_type
from opweave.ops.operands import optional_operands
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_offset, element_strides, optional_strides
from opweave_opencl.tuning import limit, processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream
    from opweave_opencl.tuning import Tuning

__all__: list[str] = []

KEYS: Final = limit("attention_keys", 32, 1, 32, bounds=(1, 32))
"""Keys of a block."""

FEW_ROWS: Final = processor_limit("attention_few_rows", 4, 1, 32)
"""Up to so many rows, a work-item computes 4 of them, key by key, else 32, with vectors of neighbouring keys."""

LARGEST: Final = 1024
"""The most elements of a key or value: local memory holds rows of them. Larger ones are refused."""


def _why_not(step: Step) -> str | None:
    other = of_other_type(step, 1, 2)
    if other is not None:
        return other
    largest = max(step.srcs[0].shape[3], step.srcs[2].shape[3])
    return f"keys or values of {largest} elements, not at most {LARGEST}" if largest > LARGEST else None


@KERNELS("attention", dtypes="f32 f16 bf16", when=_why_not)
def attention(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    q: Arg,
    k: Arg,
    v: Arg,
    *rest: Arg,
    scale: float,
    causal: bool,
    max_bias: float,
    soft_cap: float,
    masked: bool,
) -> Call:
    mask, sinks = optional_operands(rest, masked)
    batch, heads, tokens, size = q.shape
    groups, keys, width = k.shape[1], k.shape[2], v.shape[3]
    operands = [out, q, k, v, mask or q, sinks or q]
    words = [batch, heads, groups, tokens, keys, size, width, int(causal), int(masked), int(sinks is not None)]
    for arg in (out, q, k, v):
        words += element_strides(arg)
    words += [*optional_strides(mask, 4), *optional_strides(sinks, 1)]
    words += map(element_offset, operands)
    rows = heads // groups * tokens
    tuning = stream.target.tuning
    macros = {"T": q.dtype.name, "DIRECT": str(int(q.dtype.name == "f32"))}
    macros |= {"MASK": operands[4].dtype.name, "SINK": operands[5].dtype.name}
    whole = 16 * -(-size // 16), 16 * -(-width // 16)
    if tuning.row_group == 1 and _bytes(many := _rows(rows), KEYS.value, *whole) <= tuning.local:
        kernel, group, each = "attend", 1, many
        macros |= {"ATTEND": "1", "ROWS": str(many), "KEYS": str(KEYS.value)}
        macros |= {"SIZE": str(whole[0]), "WIDTH": str(whole[1])}
    else:
        kernel, group = "attend_group", tuning.row_group
        each, block = _shares(size, width, tuning)
        macros |= {"ATTEND_GROUP": "1", "ROWS": str(each), "KEYS": str(block)}
        macros |= {"SIZE": str(size), "WIDTH": str(width)} | stream.target.sharing()
    program = stream.target.programs.get("attention", macros)
    launch = (-(-rows // each) * group, groups, batch)
    return stream.launch(program, kernel, launch, (group, 1, 1), operands, words, (scale, max_bias, soft_cap))


def _rows(rows: int) -> int:
    """How many of ``rows`` rows a work-item of a processor takes."""
    return 4 if rows <= FEW_ROWS.value else 32


def _bytes(rows: int, keys: int, size: int, width: int) -> int:
    """Local memory: queries, results, scores and three numbers of each row; keys and values of a block."""
    return 4 * (rows * (size + width + keys + 3) + keys * (size + 1 + width))


def _shares(size: int, width: int, tuning: Tuning) -> tuple[int, int]:
    """How many rows a group takes, and how many keys at once."""
    rows, keys = 8, KEYS.value
    while _bytes(rows, keys, size, width) > tuning.local and (rows, keys) != (1, 1):
        rows, keys = (rows, keys // 2) if keys >= 2 * rows or rows == 1 else (rows // 2, keys)
    return rows, keys
