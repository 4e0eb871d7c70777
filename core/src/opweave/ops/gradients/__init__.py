"""The gradients of the operations, by family. Importing this enters them into the definitions (`OpDef.gradient`).

A gradient is a composition of operations: what it builds is an ordinary graph, which runs wherever these run. Nodes
that nobody asks for are never part of a graph, so a gradient builds those of all sources.
"""

from opweave.ops.gradients import (
    attention,
    convolution,
    elementwise,
    linalg,
    linear_attention,
    matmul,
    movement,
    normalization,
    reduction,
    rope,
    sparse_attention,
    state_space,
    trigonometry,
)

__all__ = [
    "attention", "convolution", "elementwise", "linalg", "linear_attention", "matmul", "movement", "normalization",
    "reduction", "rope", "sparse_attention", "state_space", "trigonometry",
]  # fmt: skip
