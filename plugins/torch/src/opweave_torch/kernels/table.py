"""The table that every family's module enters its kernels into."""

from __future__ import annotations

from typing import Final

from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import DTYPES

__all__ = ["FLOATS", "HALVES", "KERNELS", "NUMBERS", "PLAIN", "QUANTIZED", "SYNCHRONIZES", "WHOLE", "WIDE"]

WIDE: Final = "f64 f32"
HALVES: Final = "f16 bf16"
FLOATS: Final = f"{WIDE} {HALVES}"
WHOLE: Final = "i64 i32 i16 i8 u8"
NUMBERS: Final = f"{FLOATS} {WHOLE}"
PLAIN: Final = f"{NUMBERS} bool"
QUANTIZED: Final = tuple(t for t in DTYPES.values() if t.is_quantized)

KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")

SYNCHRONIZES: Final = {"custom", "expert_linear"}
"""Operations whose calls wait for results on the host, which a captured graph cannot."""
