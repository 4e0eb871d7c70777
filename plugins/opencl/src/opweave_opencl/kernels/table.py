"""The table that every family enters its kernels into."""

from __future__ import annotations

from typing import Final

from opweave.kernels import KernelTable

__all__ = ["KERNELS", "MOVABLE", "PLAIN"]

KERNELS: Final = KernelTable("f32", "strided", index="i32 i64")
"""What every OpenCL device runs."""

PLAIN: Final = {
    "f32": "float",
    "i64": "long",
    "i32": "int",
    "u8": "uchar",
    "bool": "uchar",
}
"""Types that kernels calculate with and convert between, and OpenCL's names for them."""

MOVABLE: Final = "f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool"
"""Types that are only moved, as words of their size."""
