"""The table in which the module of each family of operations registers its kernels."""

from __future__ import annotations

from typing import Final

from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import FLOATS, HALVES, INTEGERS, NUMBERS, PLAIN, QUANTIZED, WIDE

__all__ = ["FLOATS", "HALVES", "INTEGERS", "KERNELS", "NUMBERS", "PLAIN", "QUANTIZED", "SYNCHRONIZES", "WIDE"]


KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")

SYNCHRONIZES: Final = {"custom", "expert_linear"}
"""Operations whose calls wait for results on the host, so that plans with them cannot be captured as a graph."""
