"""Which steps ``torch:cpu`` takes over from another device in the same memory."""

from __future__ import annotations

from typing import Final

from opweave.contract import Step
from opweave.contract.offloading import flops
from opweave.graph.opdef import OPS

__all__ = ["is_worth_a_switch"]

SWITCH_FLOPS: Final = 1 << 20
"""Floating-point operations from which on a step saves more than the change of devices costs (some microseconds)."""


def is_worth_a_switch(step: Step) -> bool:
    """Whether torch's kernel for the CPU saves more time than the change of devices costs: of large products,
    attention and convolutions."""
    op = OPS.get(step.op)
    return op is not None and op.product and flops(step) >= SWITCH_FLOPS
