"""`copy_graph`: a copy of a graph with states of its own, which shares everything else with the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from opweave.graph.graph import Graph, rebuilt
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import read_leaf, write_state
from opweave.leaves import state
from opweave.runtime.device import Device
from opweave.scheduler.place.arguments import checked_outputs

__all__ = ["GraphCopy", "copy_graph"]


class GraphCopy(NamedTuple):
    """The result of `copy_graph`.

    Attributes:
        outputs: the outputs of the copy, in the form in which those of the graph were given.
        states: state of the graph -> that of the copy.
    """

    outputs: Any
    states: Mapping[Tensor, Tensor]


def copy_graph(outputs: Any, device: Device | str | None = None) -> GraphCopy:
    """A copy of a graph with states of its own: a second conversation with a model, the same graph on another device.

    Each state begins with the present values of the original. Inputs, constants and weights are the same tensors:
    programs of both graphs share the memory of weights, and of weights that are placed where a scheduler does not
    reach them its programs share one copy.

    Args:
        outputs: a tensor, a sequence or a mapping of tensors.
        device: where the states of the copy lie; ``None``: where those of the graph lie, if they are placed.

    Raises:
        SchedulerError: outputs that are no tensors.
        UnknownNameError: no such device.
        AllocationError: the device has no room for the states.
        ExecutionError: a failed run left a state half written.
    """
    tensors, _ = checked_outputs(outputs)
    states = {leaf: _copied(leaf, device) for leaf in Graph(tensors).leaves if leaf.leaf and leaf.leaf.kind == "state"}
    made = rebuilt(tensors, states)
    if isinstance(outputs, Tensor):
        return GraphCopy(made[0], states)
    return GraphCopy(dict(zip(outputs, made, strict=True)) if isinstance(outputs, Mapping) else made, states)


def _copied(tensor: Tensor, device: Device | str | None) -> Tensor:
    leaf = tensor.leaf
    assert leaf is not None
    if device is None and leaf.placement is not None:
        device = leaf.placement.buffer.device
    made = state(leaf.name, tensor.shape, tensor.dtype, device=device, fill=leaf.fill)
    if leaf.placement is not None or leaf.data is not None or leaf.damaged or leaf.shards is not None:
        write_state(made, read_leaf(tensor))
    return made
