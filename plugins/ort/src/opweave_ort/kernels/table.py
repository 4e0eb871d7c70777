"""The table in which the module of each family registers how its operations are written in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from opweave.contract import Step
from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import FLOATS, HALVES, INTEGERS, NUMBERS, PLAIN, WIDE

__all__ = ["F32", "FLOATS", "HALVES", "INTEGERS", "KERNELS", "MOVERS", "NUMBERS", "PLAIN", "WIDE", "emits"]

F32: Final = f"f32 {HALVES}"
"""Types whose values are computed in f32."""

KERNELS: Final = KernelTable(dtypes=FLOATS, layout="strided", index="i32 i64")
"""Emitters by operation: ``emitter(model, op, out, *sources, **attrs)`` writes a step and returns the name of its
result, which has the type ``out.dtype`` and the shape ``out.shape``."""

MOVERS: Final[set[str]] = set()
"""Operations whose emitters move elements and compute none: their operands keep the types of the graph; those of others
get the type that `opweave_ort.model.computed` gives."""

F = TypeVar("F", bound=Callable[..., str])


def emits(
    *ops: str,
    dtypes: str | None = None,
    when: Callable[[Step], str | None] | None = None,
    moves: bool = False,
    **facts: Any,
) -> Callable[[F], F]:
    """Register an emitter; arguments as `KernelTable.__call__`. Results that are not dense are refused.

    Args:
        moves: the operations are among `MOVERS`.
    """

    def accepts(step: Step) -> str | None:
        if not step.out.is_dense and any(step.out.strides):
            return "the output is not dense"
        return None if when is None else when(step)

    if moves:
        MOVERS.update(ops)
    register: Any = KERNELS(*ops, dtypes=dtypes, when=accepts, **facts)

    def keep(emitter: F) -> F:
        register(emitter)
        return emitter

    return keep
