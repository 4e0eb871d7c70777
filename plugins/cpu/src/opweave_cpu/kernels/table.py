"""The table that every family's module enters its kernels into."""

from __future__ import annotations

from typing import Final

from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import DTYPES

__all__ = ["FLOATS", "KERNELS", "NUMBERS", "PLAIN", "QUANTIZED"]

FLOATS: Final = "f64 f32 f16 bf16"
NUMBERS: Final = f"{FLOATS} i64 i32 i16 i8 u8"
PLAIN: Final = f"{NUMBERS} bool"
QUANTIZED: Final = tuple(t for t in DTYPES.values() if t.is_quantized)

KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")
