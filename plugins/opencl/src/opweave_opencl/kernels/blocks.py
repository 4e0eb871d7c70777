"""Rows of quantized blocks: which types kernels decode, and the rows of a table by index."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from opweave.contract import Arg, Call, Step
from opweave.graph.dtypes import DTYPES, DType
from opweave.ops.codebooks import codebook
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded, padded_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__ = ["QUANTIZED", "block_macros", "not_in_rows", "not_of_blocks"]

QUANTIZED: Final = " ".join(name for name, t in DTYPES.items() if t.is_quantized)
"""The types that ``blocks.cl`` decodes: all that opweave has."""


@cache
def block_macros(dtype: DType) -> Mapping[str, str]:
    """The macros by which ``blocks.cl`` decodes a type."""
    macros = {"BLOCKS": "1", f"BLOCKS_{dtype.name}": "1"}
    if dtype.name.startswith(("iq1", "iq2", "iq3")):
        name = "iq1" if dtype.name.startswith("iq1") else dtype.name
        macros["CODEBOOK"] = ",".join(map(str, _packed_codebook(name)))
    return macros


def _packed_codebook(name: str) -> list[int]:
    """The entries of a codebook: two bits for the number of each of three levels, three bits for that of each of eight,
    the first level in the lowest bits."""
    entries = codebook(name)
    levels = np.unique(entries)
    digits = np.searchsorted(levels, entries).astype(np.uint16)
    width = 2 if len(levels) == 3 else 3
    packed = np.bitwise_or.reduce(digits << np.arange(entries.shape[1], dtype=np.uint16) * width, 1)
    return [int(entry) for entry in packed]


def not_in_rows(what: str, x: Arg) -> str | None:
    """Why an operand's rows cannot be read 16 elements at a time, or ``None``."""
    if x.shape[-1] > 1 and x.strides[-1] != x.dtype.itemsize:
        return f"the rows of {what} have gaps"
    return None


def not_of_blocks(step: Step) -> str | None:
    """Why a kernel for float rows of the result's type and quantized weights refuses a ``linear``, or ``None``."""
    x, w = step.srcs[:2]
    if x.dtype is not step.out.dtype or not x.dtype.is_float:
        return f"source 0 is {x.dtype}"
    return None if w.dtype.is_quantized else "the weights are not quantized"


def _why_not(step: Step) -> str | None:
    table, out = step.srcs[0], step.out
    if not table.dtype.is_quantized:
        return "the table is not quantized"
    return not_in_rows("the table", table) or not_in_rows("the output", out)


@KERNELS("embedding", dtypes=f"f32 {QUANTIZED}", when=_why_not)
def embedding(stream: OpenCLStream, op: str, out: Arg, table: Arg, ids: Arg, *, blocks: DType) -> Call:
    """A row of the output whose index is outside of the table is zeros."""
    split = len(ids.shape)
    o_steps = element_strides(out)
    shape, (o_ids, i_ids) = coalesce(ids.shape, [o_steps[:split], element_strides(ids)])
    # The table's axes between the first and the last, whose rows of blocks follow by bytes.
    inner, (o_inner, t_inner) = coalesce(table.shape[1:-1], [o_steps[split:-1], table.strides[1:-1]])
    width = table.shape[-1]
    words = [len(shape), *padded(shape, 1), len(inner), *padded(inner, 1)]
    words += padded_strides((o_ids, i_ids, o_inner, t_inner))
    words += [element_offset(out), table.offset, element_offset(ids), table.strides[0], table.shape[0], width]
    check = stream.indices.bind(op, table.shape[0])
    macros = {"T": "f32", "ID": ids.dtype.name, **block_macros(blocks), **check.macros}
    program = stream.target.programs.get("embedding", macros)
    operands = (out, table, ids, *check.operands)
    size = width // 16, prod(inner), ids.size
    return stream.launch(program, "take_blocks", size, (1, 1, 1), operands, [*words, *check.words])
