"""Cases made of the samples in an operation's definition, which test the operations of third parties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from opweave.graph.graph import Graph, rebuilt
from opweave.graph.opdef import SAMPLE_IDS, OpDef
from opweave.graph.tensor import Tensor
from opweave_conformance.case import Case, Operand, case

__all__ = ["sampled"]

MOST: Final = 1 << 18
"""Elements of the largest operand of a case; samples for measuring may be larger."""


def sampled(op: OpDef) -> Iterator[Case]:
    """A case for each sample of moderate size, and with NaN and infinities for the smallest of each type, where the
    definition says what becomes of them."""
    number = 0
    for sample in op.samples() if op.samples is not None else ():
        nodes = dict.fromkeys([*sample.build(), *(sample.products() if sample.products is not None else ())])
        for first, node in enumerate(nodes):
            leaves = Graph(node).leaves
            if any(leaf.size > MOST for leaf in (node, *leaves)):
                continue
            operands = [_operand(op, node, leaf) for leaf in leaves]
            build = _builder(node, leaves)
            number += 1
            yield case(op.name, *operands, build=build, tag=f"sample{number}")
            if op.nan and first == 0 and any(leaf.dtype.is_float for leaf in leaves):
                odd = [o._replace(values="special") if leaf.dtype.is_float else o
                       for o, leaf in zip(operands, leaves, strict=True)]  # fmt: skip
                yield case(op.name, *odd, build=build, tag=f"sample{number}")


def _operand(op: OpDef, node: Tensor, leaf: Tensor) -> Operand:
    state = leaf.leaf is not None and leaf.leaf.kind == "state"
    if any(i in op.indices and source.root is leaf for i, source in enumerate(node.srcs)):
        return Operand(leaf.shape, leaf.dtype.name, values="ids", high=SAMPLE_IDS)
    return Operand(leaf.shape, leaf.dtype.name, state=state)


def _builder(node: Tensor, leaves: Sequence[Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: rebuilt((node,), dict(zip(leaves, tensors, strict=True)))[0]
