"""The numbers by which kernels choose their paths. Those of ``torch:cpu`` of which each machine has best values of its
own are measured by `opweave profile`; the others stand beside their kernels."""

from __future__ import annotations

from typing import Final

from opweave.contract import Limits, Tunable
from opweave.graph.tensor import Tensor
from opweave.ops.attention import attention
from opweave.ops.samples import operand

__all__ = ["CALL_SCORES", "TUNABLES", "limit"]


limit: Final = Limits()
"""Declares the other numbers, beside their kernels."""


def _attention() -> list[Tensor]:
    """Samples of two images with four heads of 32 elements, with ``tokens ** 2 * 4`` scores in each image."""
    sizes = ((2, 4, tokens, 32) for tokens in (24, 48, 96, 192))
    return [attention(*[operand(*size)] * 3) for size in sizes]


CALL_SCORES: Final = Tunable("call_scores", 1 << 14, [1 << power for power in range(10, 19, 2)], _attention)
"""Scores of an image from which on computing them takes longer than starting the kernels of its tile. Of several images
with fewer, the fused kernel computes all at once."""

TUNABLES: Final = (CALL_SCORES,)
