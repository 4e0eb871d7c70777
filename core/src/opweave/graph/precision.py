"""`Precision`: how far the operands of products may be rounded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from opweave.errors import UnknownNameError

__all__ = ["PRECISIONS", "Precision", "check_precision", "is_within"]

Precision = Literal["exact", "bf16", "int8"]
"""``exact``: products accumulate in f32 (f64 for f64) over the operands as they are. ``bf16``: operands and results
are rounded to bf16. ``int8``: activations are quantized to 8-bit integers in blocks, as ggml and ONNX Runtime do for
products with quantized weights.

A kernel declares the precision in which it computes. A program declares the roughest precision that it allows; ``int8``
for products with weights that are stored rounded, quantized or in bf16, for which it allows kernels of ``bf16`` too.
"""

PRECISIONS: Final[Mapping[Precision, int]] = MappingProxyType({"exact": 0, "bf16": 1, "int8": 2})
"""Precision -> rank, finest first."""


def check_precision(name: Any) -> Precision:
    """The precision with a name; raises `UnknownNameError` if there is none."""
    if not isinstance(name, str) or name not in PRECISIONS:
        raise UnknownNameError("precision", str(name), PRECISIONS)
    return cast("Precision", name)


def is_within(precision: Precision, allowed: Precision) -> bool:
    """Whether a kernel of one precision may run where another one is allowed: it is that one or finer."""
    return PRECISIONS[precision] <= PRECISIONS[allowed]
