"""`Updates`: buffers that a graph changes, as states.

torch's graphs are functional: a buffer's next values are a new tensor, in which some rows or a region are replaced.
Where nothing but such replacements lies between the old and the new values, the state itself is written; otherwise, the
new values are computed and assigned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.native import overload
from opweave_torch.frontend.source import Source

__all__ = ["Updates"]

INDEX_PUT, SLICE, SELECT, COPY = (overload(n) for n in ("index_put", "slice_scatter", "select_scatter", "copy"))


class Updates:
    """How the states of a graph are written.

    Args:
        source: the graph.
        in_place: whether to write rows and regions of states, or whole states only.
    """

    def __init__(self, source: Source, states: Mapping[torch.fx.Node, Tensor], in_place: bool) -> None:
        self._chains: Final[set[torch.fx.Node]] = set()
        for name, last in source.states.items():
            chain, node = [], last
            while isinstance(node, torch.fx.Node) and node.target in (INDEX_PUT, SLICE, SELECT, COPY):
                chain.append(node)
                node = node.args[0]
            if in_place and isinstance(node, torch.fx.Node) and node.name == name and node in states:
                self._chains.update(chain)

    def written(self, node: torch.fx.Node, args: Any, tensor: Callable[[Any], Tensor]) -> Tensor | None:
        """The next version of the state that a node writes; ``None`` if it does not write one."""
        if node not in self._chains:
            return None
        state, value = args[0], tensor(args[2] if node.target is INDEX_PUT else args[1])
        match node.target:
            case _ if node.target is INDEX_PUT:
                accumulate = args[3] if len(args) > 3 else False
                return None if accumulate else _rows_written(state, args[1], value, tensor)
            case _ if node.target is COPY:
                return ow.assign(state, value)
        dim = args[2] if len(args) > 2 else 0
        cut: list[Any] = [slice(None)] * state.ndim
        if node.target is SELECT:
            cut[dim] = args[3]
        else:
            cut[dim] = slice(*[*args[3:], *[None] * (6 - len(args))])
        region = state[tuple(cut)]
        return ow.assign(region, value) if region.size else state


def _rows_written(state: Tensor, indices: Any, value: Tensor, tensor: Callable[[Any], Tensor]) -> Tensor | None:
    """A state with the places along one axis replaced that ids name; ``None`` for other ways to name them."""
    places = [i for i, ids in enumerate(indices) if ids is not None]
    if len(places) != 1:
        return None
    ids, axis = tensor(indices[places[0]]), places[0]
    if not ids.dtype.is_integer or ids.ndim != 1:
        return None
    n = state.shape[axis]
    ids = ow.where(ow.less(ids, ow.constant(0, ids.dtype)), ids + n, ids)
    wanted = (*state.shape[:axis], ids.size, *state.shape[axis + 1 :])
    value = ow.broadcast_to(value.astype(state.dtype), wanted)
    front = (axis, *[i for i in range(state.ndim) if i != axis])
    return ow.index_copy(ow.transpose(state, front), ids, ow.transpose(value, front))
