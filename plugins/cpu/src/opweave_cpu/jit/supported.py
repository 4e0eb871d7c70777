"""What can be compiled: names and limits that are looked up before LLVM is loaded."""

from __future__ import annotations

from typing import Final

from opweave_cpu.tunables import limit

__all__ = ["BLOCKS", "MOST_STEPS", "MOST_WORK", "ROWS", "VECTOR", "WRITES"]

VECTOR: Final = 16
"""Lanes of a vector. Rows of weights in half types, or f32, keys and values are read as they lie if their length is a
multiple of this."""

ROWS: Final = frozenset(
    {
        "softmax", "log_softmax", "l2_norm", "rms_norm", "layer_norm", "softmax_backward", "log_softmax_backward",
        "rms_norm_backward", "layer_norm_backward",
    }
)  # fmt: skip
"""Operations of `opweave_cpu.jit.rows`."""

WRITES: Final = frozenset({"assign", "accumulate"})
"""Operations that write a state element by element, which chains may contain."""

BLOCKS: Final = frozenset({"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"})
"""Types of weights that `opweave_cpu.jit.blocks` decodes."""

MOST_STEPS: Final = limit("fused_steps", 32, 1, 64)
"""Steps of a chain at most."""

MOST_WORK: Final = limit("fused_work", 512, 1, 4096)
"""Elementary operations of a chain at most: compiling takes about a tenth of a millisecond for each."""
