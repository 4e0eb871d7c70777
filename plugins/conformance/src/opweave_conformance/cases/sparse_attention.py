"""Cases of sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opweave_conformance.case import FLOATS, LAYOUTS, Case, Operand, case

SIZES: Final = ((1, 1, 1, 1, 1), (2, 3, 5, 4, 7), (1, 2, 9, 3, 2), (1, 8, 33, 16, 65), (1, 4, 1, 64, 300))
"""Batch, heads, tokens, size, keys."""


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for batch, heads, tokens, size, keys in SIZES:
            q, k = Operand((batch, heads, tokens, size), dtype), Operand((batch, keys, size), dtype)
            yield case("indexer_scores", q, k, Operand((batch, heads, tokens), dtype))
        for layout in LAYOUTS:
            q, k = Operand((2, 3, 4, 5), dtype, layout), Operand((2, 6, 5), dtype, layout)
            yield case("indexer_scores", q, k, Operand((2, 3, 4), dtype, layout))
