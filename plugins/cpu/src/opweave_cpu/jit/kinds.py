"""`Kind`: what is known of steps of one kind and one layout, so that it is found out once."""

from __future__ import annotations

from typing import Any, Final

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.kernels import Kernel
from opweave_cpu.jit import batched_products, pointwise, products, rows
from opweave_cpu.jit.supported import BLOCKS, ROWS
from opweave_cpu.jit.walk import Prepared
from opweave_cpu.kernels.half_products import multiplies_halves
from opweave_cpu.kernels.integer_products import unpacks_integers
from opweave_cpu.kernels.row_products import multiplies_rows

__all__ = ["Kind", "kind_of"]


class Kind:
    """What is known of steps like ``step``.

    Attributes:
        chains: whether chains may contain them.
        work: elementary operations for one element, in a chain.
        kernel: what computes one that is in no chain, if it is compiled.
    """

    def __init__(self, step: Step) -> None:
        self.chains: Final = pointwise.fits(step)
        self.work: Final = pointwise.work_of(step)
        compiled = pointwise.is_worth_compiling(step) if self.chains else _fits_alone(step)
        self.kernel: Final = Kernel(self._bind, *_NO_LIMITS) if compiled else None
        self._prepared: Prepared | None = None

    def _bind(self, stream: Stream, op: str, out: Arg, *srcs: Arg, **attrs: Any) -> Call:
        if self._prepared is None:
            prepare = rows.prepare_rows if op in ROWS else pointwise.prepare_step
            prepare = {"linear": products.prepare_product, "matmul": batched_products.prepare_products}.get(op, prepare)
            self._prepared = prepare(stream, Step(op, out, srcs, attrs))
        return self._prepared.bind(stream, (*srcs, out))


_NO_LIMITS: Final = (frozenset[Any](), frozenset[Any](), "strided", False, None, None)
"""The fields of a `Kernel` behind its factory: they limit nothing, as only steps that fit are given to it."""


def kind_of(step: Step) -> Kind:
    """What is known of a step."""
    choice = step.choice
    if choice is None:
        return Kind(step)
    layout = (step.out.strides, *[src.strides for src in step.srcs])
    known: Kind | None = choice.kept.get(layout)
    if known is None:
        known = choice.kept[layout] = Kind(step)
    return known


def _fits_alone(step: Step) -> bool:
    """Whether a row operation or a product is compiled."""
    if step.op == "matmul":
        return batched_products.fits(step)
    if step.op != "linear":
        return step.op in ROWS and rows.fits(step)
    if not products.fits(step) or multiplies_rows(step) or multiplies_halves(step):
        return False
    return not (step.srcs[1].dtype.name in BLOCKS and unpacks_integers(step))
