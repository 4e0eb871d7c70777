"""How far a result may be from the reference, by operation and type. A new operation that needs room gets it here."""

from __future__ import annotations

from typing import Final, NamedTuple

from opweave.graph.dtypes import bool_
from opweave.graph.tensor import Tensor

__all__ = ["Limits", "limits"]


class Limits(NamedTuple):
    """How far a result may be from the reference. 0, 0 means: not at all.

    Attributes:
        nmse: mean square error divided by the mean square of the reference.
        error: largest error of an element, relative to the element plus the root mean square of all.
    """

    nmse: float
    error: float


_BY_DTYPE: Final = {
    "f64": Limits(1e-24, 1e-11),
    "f32": Limits(1e-12, 1e-5),
    "f16": Limits(1e-6, 1e-3),
    "bf16": Limits(6e-5, 8e-3),
}
"""Half types: a result may fall on the other side of one rounding (2⁻¹⁰, 2⁻⁷), also the one that outweighs all others.
How many do is judged in `compare`."""

_SLACK: Final = {
    "attention": 4.0,
    "conv1d": 4.0,
    "conv2d": 4.0,
    "conv3d": 4.0,
    "conv_transpose1d": 4.0,
    "conv_transpose2d": 4.0,
    "exp": 2.0,
    "expert_linear": 4.0,
    "gelu": 2.0,
    "head_softmax": 2.0,
    "index_add": 2.0,
    "layer_norm": 4.0,
    "linear": 4.0,
    "matmul": 4.0,
    "mean": 2.0,
    "prod": 2.0,
    "selective_scan": 4.0,
    "softmax": 2.0,
    "sum": 2.0,
    "var": 2.0,
}
"""Operations whose error may be this many times larger: sums of many terms, functions that devices approximate."""

_EXACT: Final = frozenset({
    "abs", "assign", "ceil", "clamp", "concat", "contiguous", "copy", "diag_embed", "embedding", "flip", "floor",
    "full", "im2col", "index_copy", "max", "max_pool1d", "max_pool2d", "maximum", "min", "minimum", "neg", "pad",
    "relu", "roll", "round", "set_region", "sign", "step", "take_along_axis", "tril", "triu", "trunc", "where",
})  # fmt: skip
"""Operations that only choose among their sources' values, where those are of the output's dtype, and operations
whose result such a type holds exactly. The condition of a choice is bool."""


def limits(node: Tensor) -> Limits:
    """The limits for the result of ``node``, by its operation and dtype."""
    assert node.op is not None
    if not node.dtype.is_float:
        return Limits(0.0, 0.0)
    data = [s for i, s in enumerate(node.srcs) if i not in node.op.indices]
    if node.op.name in _EXACT and all(s.dtype in (node.dtype, bool_) for s in data):
        return Limits(0.0, 0.0)
    # Half types compute in f32: what is lost there is far below one rounding.
    slack = 1.0 if node.dtype.is_half else _SLACK.get(node.op.name, 1.0)
    base = _BY_DTYPE[node.dtype.name]
    return Limits(base.nmse * slack * slack, base.error * slack)
