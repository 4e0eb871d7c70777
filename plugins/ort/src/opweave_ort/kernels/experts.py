"""Mixtures of experts: products with the weights, and biases, that each row chooses."""

from __future__ import annotations

from typing import Final

from opweave.contract import Step
from opweave.contract.kernels import of_other_type
from opweave_ort.kernels.indexing import checked
from opweave_ort.kernels.table import emits
from opweave_ort.limits import limit
from opweave_ort.model import ONNX_TYPES, Model, Operand

CHOSEN_BYTES: Final = limit("chosen_bytes", 1 << 26, 1, 1 << 28)
"""Bytes of chosen weights, a matrix for each row, up to which they are copied for a product."""


def _few(step: Step) -> str | None:
    _, w, ids = step.srcs
    if w.dtype.is_quantized:
        return "ONNX Runtime has no product with chosen quantized weights"
    most = CHOSEN_BYTES.value
    if ids.size * w.shape[1] * w.shape[2] * 4 > most:
        return f"the chosen weights, a matrix for each row, would be copied and take more than {most:,} bytes"
    return of_other_type(step, 1)


@emits("expert_linear", when=_few)
def expert_linear(m: Model, op: str, out: Operand, x: Operand, w: Operand, ids: Operand) -> str:
    """Chosen weights are cast, and not all, of which the session would keep a copy."""
    chosen = m("Gather", m.before_cast(m.expanded(w)), checked(m, ids, w.shape[0]), axis=0)
    product = m("MatMul", m("Cast", chosen, to=ONNX_TYPES[w.dtype]), m("Unsqueeze", m.expanded(x), m.integers(-1)))
    return m("Squeeze", product, m.integers(-1))


@emits("add_expert", when=lambda step: of_other_type(step, 1))
def add_expert(m: Model, op: str, out: Operand, x: Operand, table: Operand, ids: Operand) -> str:
    return m("Add", m.expanded(x), m("Gather", m.expanded(table), checked(m, ids, table.shape[0]), axis=0))
