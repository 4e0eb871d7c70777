"""Products with quantized weights, by ``MatMulNBits``."""

from __future__ import annotations

from typing import Final

import numpy as np

from opweave.contract import Step
from opweave.graph.dtypes import QUANTIZED, DType, f32, f64
from opweave_ort.kernels.table import HALVES, emits
from opweave_ort.model import MICROSOFT, Model, Operand
from opweave_ort.weights import FOUR_BITS, OFFSETS, Form, block_length, form_of, pieces

_TYPES: Final = " ".join(["f32", HALVES, *[t.name for t in QUANTIZED]])


def _why_not(step: Step) -> str | None:
    if not step.srcs[1].dtype.is_quantized:
        return "the weights are not quantized"
    return "MatMulNBits computes in f32" if step.out.dtype is f64 else None


@emits("linear", dtypes=_TYPES, when=_why_not)
def linear(m: Model, op: str, out: Operand, x: Operand, w: Operand, b: Operand | None = None, *, blocks: DType) -> str:
    return product(m, out, x, w, b, form_of(blocks, "exact"), 0)


@emits("linear", dtypes=_TYPES, when=_why_not, precision="int8")
def linear_of_bytes(
    m: Model, op: str, out: Operand, x: Operand, w: Operand, b: Operand | None = None, *, blocks: DType
) -> str:
    """ONNX Runtime quantizes the activations to 8 bits in blocks as long as those of the weights."""
    return product(m, out, x, w, b, form_of(blocks, "int8"), 4)


def product(m: Model, out: Operand, x: Operand, w: Operand, b: Operand | None, form: Form, accuracy: int) -> str:
    """The product of rows with a repacked weight, whose operand's name is those of its `pieces` with blanks between."""
    names = dict(zip([p.name for p in pieces(w.stored, w.shape, form)], w.name.split(), strict=True))
    outputs, inputs = w.shape
    length = block_length(w.stored)
    count = inputs // length
    source = m.expanded(x)
    signed = w.stored.name not in OFFSETS

    def zeros(bits: int) -> str:
        return m.constant(np.zeros((outputs, -(-count * bits // 8)), np.uint8))

    def part(piece: str, scales: str, zero: str, bits: int) -> str:
        return m("MatMulNBits", source, names[piece], names[scales], *([zero] if zero else []), domain=MICROSOFT,
                 K=inputs, N=outputs, bits=bits, block_size=length, accuracy_level=accuracy)  # fmt: skip

    # The default zero point is the middle of the range, 8 or 128.
    if form == "bytes":
        result = part("bytes", "scales", "" if signed else zeros(8), 8)
    elif w.stored.name in FOUR_BITS:
        result = part("low", "scales", "" if signed else zeros(4), 4)
    else:
        result = m(
            "Add", part("high", "high_scales", "" if signed else zeros(4), 4), part("low", "scales", zeros(4), 4)
        )
    if "offsets" in names:
        sums = m("ReduceSum", m.reshape(source, (*x.shape[:-1], count, length)), m.integers(-1), keepdims=0)
        result = m("Add", result, m("MatMul", sums, names["offsets"]))
    return result if b is None else m("Add", result, m.cast(b.name, b.dtype, f32))
