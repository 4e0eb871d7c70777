"""Which steps are worth it: to leave another device of the same memory for, to bring weights from the host for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from opweave.contract import Step
from opweave.graph.opdef import OPS

__all__ = ["flops", "is_worth_a_switch", "is_worth_an_upload"]

SWITCH_FLOPS: Final = 1 << 20
"""Floating-point operations from which on a step saves more than the change of devices costs (some microseconds)."""

UPLOAD_ROWS: Final = 32
"""Rows that share a weight from which on a product gains more than bringing the weight takes."""


def is_worth_a_switch(step: Step) -> bool:
    """Whether torch's kernel for the CPU is worth leaving another device of this process for: large products,
    attention and convolutions."""
    op = OPS.get(step.op)
    return op is not None and op.product and flops(step) >= SWITCH_FLOPS


def is_worth_an_upload(step: Step) -> bool:
    """Whether to bring weights from the host for the step, on each run: products of many rows."""
    op = OPS.get(step.op)
    return op is not None and op.product and step.out.size >= UPLOAD_ROWS * step.out.shape[-1]


def flops(step: Step) -> int:
    """Floating-point operations of a step, by the operation's definition."""
    op = OPS[step.op]
    written: tuple[Any, ...] = (step.out,) if op.writes else ()
    node = SimpleNamespace(
        op=op, srcs=(*written, *step.srcs), attrs=step.attrs, shape=step.out.shape, size=step.out.size
    )
    return op.flops(node)  # type: ignore[arg-type]  # what costs are told by, without a graph
