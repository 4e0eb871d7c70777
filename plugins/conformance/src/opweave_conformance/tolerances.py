"""Error limits: how far a result may be from the reference, by its dtype, its operation's definition and the precision
that it is computed in."""

from __future__ import annotations

from typing import Final

from opweave.graph.dtypes import bool_
from opweave.graph.opdef import Limits
from opweave.graph.precision import Precision
from opweave.graph.tensor import Tensor

__all__ = ["Limits", "limits"]

_BY_DTYPE: Final = {
    "f64": Limits(1e-24, 1e-11),
    "f32": Limits(1e-12, 1e-5),
    "f16": Limits(1e-6, 1e-3),
    "bf16": Limits(6e-5, 8e-3),
}
"""For half types a single result may be rounded to the neighbouring value (2⁻¹⁰, 2⁻⁷), even if it dominates the mean
square. How many results may be is checked in `compare`."""


def limits(node: Tensor, precision: Precision = "exact") -> Limits:
    """The limits for the result of ``node``, by its operation and dtype, computed in ``precision``."""
    op = node.op
    assert op is not None
    if precision != "exact":
        exact, rough = limits(node), op.rough[precision]
        return Limits(max(exact.nmse, rough.nmse), max(exact.error, rough.error))
    if not node.dtype.is_float:
        return Limits(0.0, 0.0)
    own = op.limits.get(node.dtype.name)
    if own is not None:
        return own
    # The condition of a choice is bool.
    data = [s for i, s in enumerate(node.srcs) if i not in op.indices]
    if op.exact and all(s.dtype in (node.dtype, bool_) for s in data):
        return Limits(0.0, 0.0)
    # Kernels for half types accumulate in f32, whose errors are far below the final rounding.
    slack = 1.0 if node.dtype.is_half else op.slack
    base = _BY_DTYPE[node.dtype.name]
    return Limits(base.nmse * slack * slack, base.error * slack)
