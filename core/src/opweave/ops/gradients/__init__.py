"""The gradients of the operations, by family. Importing this enters them into the definitions (`OpDef.gradient`).

A gradient is a composition of operations: it builds an ordinary graph, which runs on every device that runs these
operations. A gradient builds the gradients of all sources; nodes that are not needed are never part of a graph.
"""

from opweave.ops.gradients import (
    attention,
    convolution,
    linear_attention,
    matmul,
    movement,
    normalization,
    reduction,
    rope,
    state_space,
)
from opweave.ops.gradients.rules import gradient_of
from opweave.ops.pointwise import no_gradient

__all__ = [
    "attention", "convolution", "linear_attention", "matmul", "movement", "normalization",
    "reduction", "rope", "state_space",
]  # fmt: skip

gradient_of("full", "arange", "uniform", "normal", "quantize", "dequantize")(no_gradient)
gradient_of("argmax", "count_equal", "argsort", "top_k")(no_gradient)
