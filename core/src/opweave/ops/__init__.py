"""The operations, by family. Importing this enters all of them into the table ``opweave.graph.opdef.OPS``.

One operation is one room: its definition (shape rule, NumPy reference, what may be overwritten, cost) stands right
above its public builder.
"""

from opweave.ops.activation import (
    elu,
    gelu,
    gelu_quick,
    gelu_tanh,
    hardsigmoid,
    hardswish,
    leaky_relu,
    relu,
    sigmoid,
    silu,
    softplus,
)
from opweave.ops.arrangement import diag, diag_embed, flip, pad, repeat, roll, tile, tril, triu
from opweave.ops.attention import attention
from opweave.ops.convolution import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, im2col
from opweave.ops.creation import arange, full
from opweave.ops.custom import custom
from opweave.ops.elementwise import (
    abs,
    add,
    cast,
    cos,
    div,
    exp,
    expm1,
    log,
    log1p,
    mul,
    neg,
    pow,
    reciprocal,
    rsqrt,
    scale,
    sign,
    sin,
    sqrt,
    square,
    sub,
    tanh,
)
from opweave.ops.experts import add_expert, expert_linear
from opweave.ops.gated import geglu, reglu, swiglu, swiglu_oai
from opweave.ops.indexing import (
    accumulate,
    add_region,
    assign,
    embedding,
    index_add,
    index_copy,
    set_region,
    take_along_axis,
)
from opweave.ops.interpolation import interpolate
from opweave.ops.matmul import linear, matmul, outer
from opweave.ops.movement import (
    broadcast_to,
    concat,
    contiguous,
    copy,
    diagonal,
    expand_dims,
    flatten,
    reshape,
    slice,
    split,
    squeeze,
    swapaxes,
    transpose,
)
from opweave.ops.normalization import group_norm, l2_norm, layer_norm, log_softmax, rms_norm, softmax
from opweave.ops.pooling import avg_pool1d, avg_pool2d, max_pool1d, max_pool2d
from opweave.ops.reduction import argmax, count_equal, max, mean, min, prod, sum, var
from opweave.ops.rope import rope, timestep_embedding
from opweave.ops.rounding import ceil, floor, round, trunc
from opweave.ops.selection import clamp, maximum, minimum, step, where
from opweave.ops.sorting import argsort, cumsum, top_k
from opweave.ops.state_space import causal_conv1d, selective_scan

__all__ = [
    "abs", "accumulate", "add", "add_expert", "add_region", "arange", "argmax", "argsort", "assign", "attention",
    "avg_pool1d", "avg_pool2d", "broadcast_to", "cast", "causal_conv1d", "ceil", "clamp", "concat", "contiguous",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "copy", "cos", "count_equal", "cumsum",
    "custom", "diag", "diag_embed", "diagonal", "div", "elu", "embedding", "exp", "expand_dims", "expert_linear",
    "expm1", "flatten", "flip", "floor", "full", "geglu", "gelu", "gelu_quick", "gelu_tanh", "group_norm",
    "hardsigmoid", "hardswish", "im2col", "index_add", "index_copy", "interpolate", "l2_norm", "layer_norm",
    "leaky_relu", "linear", "log", "log1p", "log_softmax", "matmul", "max", "max_pool1d", "max_pool2d", "maximum",
    "mean", "min", "minimum", "mul", "neg", "outer", "pad", "pow", "prod", "reciprocal", "reglu", "relu", "repeat",
    "reshape", "rms_norm", "roll", "rope", "round", "rsqrt", "scale", "selective_scan", "set_region", "sigmoid",
    "sign", "silu", "sin", "slice", "softmax", "softplus", "split", "sqrt", "square", "squeeze", "step", "sub",
    "sum", "swapaxes", "swiglu", "swiglu_oai", "take_along_axis", "tanh", "tile", "timestep_embedding", "top_k",
    "transpose", "tril", "triu", "trunc", "var", "where",
]  # fmt: skip
