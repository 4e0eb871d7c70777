"""The table that every family's module enters its kernels into."""

from __future__ import annotations

from typing import Final

from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import FLOATS, HALVES, INTEGERS, NUMBERS, PLAIN, QUANTIZED, WIDE

__all__ = ["FLOATS", "HALVES", "INTEGERS", "KERNELS", "NUMBERS", "PLAIN", "QUANTIZED", "SYNCHRONIZES", "WIDE"]


KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")

SYNCHRONIZES: Final = {"custom", "expert_linear"}
"""Operations whose calls wait for results on the host, which a captured graph cannot."""
