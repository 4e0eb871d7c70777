"""The table that every family's module enters its kernels into."""

from __future__ import annotations

from typing import Final

from opweave.contract import Step
from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import FLOATS, NUMBERS, PLAIN, QUANTIZED

__all__ = ["FLOATS", "HALVES", "KERNELS", "NUMBERS", "PLAIN", "QUANTIZED", "WIDE_NUMBERS", "needs_dense_output"]

HALVES: Final = "f16 bf16"
WIDE_NUMBERS: Final = "f64 f32 i64 i32 i16 i8 u8"
"""The number types that NumPy computes in as they are."""

KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")


def needs_dense_output(step: Step) -> str | None:
    """Why a kernel that writes its output as one dense array refuses ``step``, or ``None``."""
    return None if step.out.is_dense else "the output is not dense"
