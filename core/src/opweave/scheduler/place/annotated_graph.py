"""`AnnotatedGraph`: a graph to place, with what the caller decided of it and what earlier passes made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from opweave.graph.graph import Graph
from opweave.graph.leaf import Placement
from opweave.graph.tensor import Tensor

if TYPE_CHECKING:
    from opweave.sharding.values import Collective

__all__ = ["AnnotatedGraph"]


@dataclass(frozen=True, eq=False)
class AnnotatedGraph:
    """A graph to place. Every pass that makes another graph returns a new one, so that nothing known of it is lost.

    Attributes:
        graph: the graph.
        pins: tensor -> index of the target on which it is computed, whatever a strategy finds.
        placed: computed tensors whose memory the caller decided.
        causes: pinned tensor -> why, where that is not the caller's pin.
        stand_ins: tensor of the graph as it was built -> the tensor here that has its value, where that is another.
        sharded: the weights of which it reads shards.
        collectives: the last node of a collective on a device -> that collective.
    """

    graph: Graph
    pins: Mapping[Tensor, int] = field(default_factory=dict)
    placed: Mapping[Tensor, Placement] = field(default_factory=dict)
    causes: Mapping[Tensor, str] = field(default_factory=dict)
    stand_ins: Mapping[Tensor, Tensor] = field(default_factory=dict)
    sharded: tuple[Tensor, ...] = ()
    collectives: Mapping[Tensor, Collective] = field(default_factory=dict)

    def rewritten(
        self, graph: Graph, changed: Mapping[Tensor, Tensor], again: Mapping[Tensor, Tensor] | None = None
    ) -> AnnotatedGraph:
        """The same of ``graph``, in which tensors of this one have others with their value in their place.

        Args:
            changed: tensor of this graph -> that of the new one, where they differ.
            again: node of the new graph -> that of this one which it computes again, and on the same device.
        """
        here = {*graph.nodes, *graph.leaves}

        def now(tensor: Tensor) -> Tensor:
            return changed.get(tensor, tensor)

        def inherited(known: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
            twins = {node: known[origin] for node, origin in (again or {}).items() if origin in known}
            return twins | {now(tensor): what for tensor, what in known.items()}

        collectives = {now(end): what.rewritten(changed) for end, what in self.collectives.items()}
        return replace(
            self,
            graph=graph,
            pins=inherited(self.pins),
            placed={now(tensor): where for tensor, where in self.placed.items()},
            causes=inherited(self.causes),
            stand_ins={**changed, **{built: now(tensor) for built, tensor in self.stand_ins.items()}},
            collectives={end: what for end, what in collectives.items() if here.issuperset((end, *what.inner))},
        )
