"""The table of kernels, to which the module of each family adds its own."""

from __future__ import annotations

from typing import Final

from opweave.contract.kernels import KernelTable, needs_dense_output
from opweave.graph.dtypes import FLOATS, HALVES, INTEGERS, NUMBERS, PLAIN, QUANTIZED, WIDE

__all__ = [
    "FLOATS", "HALVES", "INTEGERS", "KERNELS", "NUMBERS", "PLAIN", "QUANTIZED", "WIDE", "WIDE_NUMBERS",
    "needs_dense_output",
]  # fmt: skip

WIDE_NUMBERS: Final = f"{WIDE} {INTEGERS}"
"""The number types that NumPy computes in as they are."""

KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")
