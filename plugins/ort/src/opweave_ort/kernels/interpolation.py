"""Resampling to another size, axis by axis, by the places and weights that the operation's definition computes in f64.

ONNX's ``Resize`` computes places in f32, and takes other neighbours where they fall between two elements.
"""

from __future__ import annotations

from opweave.graph.layout import Shape
from opweave.ops.interpolation import Factors, axis_taps, tap_kind
from opweave_ort.kernels.table import PLAIN, emits
from opweave_ort.model import Model, Operand


@emits("interpolate", dtypes=PLAIN)
def interpolate(
    m: Model, op: str, out: Operand, x: Operand, *, size: Shape, scale_factor: Factors, mode: str, align_corners: bool
) -> str:
    value = m.expanded(x)
    for axis, n in enumerate(size, 2):
        factor = scale_factor[axis - 2] if scale_factor else 0.0
        places, weights = axis_taps(x.shape[axis], n, factor, tap_kind(mode), align_corners)
        taps = [m("Gather", value, m.constant(p), axis=axis) for p in places]
        if mode != "nearest":
            shape = (-1, *[1] * (len(x.shape) - 1 - axis))
            taps = [m("Mul", t, m.constant(w.reshape(shape), x.dtype)) for t, w in zip(taps, weights, strict=True)]
        value = taps[0]
        for tap in taps[1:]:
            value = m("Add", value, tap)
    return value
