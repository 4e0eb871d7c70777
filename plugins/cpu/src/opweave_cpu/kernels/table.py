"""The table that every family's module enters its kernels into."""

from __future__ import annotations

from typing import Final

from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import FLOATS, NUMBERS, PLAIN, QUANTIZED

__all__ = ["FLOATS", "KERNELS", "NUMBERS", "PLAIN", "QUANTIZED"]


KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")
