"""What callers give to a scheduler, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from opweave import registry
from opweave.errors import HazardError, SchedulerError
from opweave.graph.leaf import Placement
from opweave.graph.tensor import Tensor
from opweave.runtime.device import Device
from opweave.runtime.memory import BufferType
from opweave.runtime.stream import Stream
from opweave.scheduler.place.target import Target, Where, find_target

if TYPE_CHECKING:
    from opweave.scheduler.place.strategy import Strategy

__all__ = ["Outputs", "checked_options", "checked_outputs", "checked_pins", "checked_placements"]

Outputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]

MOST_SLOTS: Final = 64
"""At most this many runs may overlap: each has memory of its own for inputs and for what crosses devices."""


def checked_options(
    devices: Where | Sequence[Where],
    parallel: bool | int,
    buffer_types: Mapping[Device | str, BufferType] | None,
    placement: str,
    memory_limit: int | None = None,
) -> tuple[list[Device | Stream], dict[str, BufferType], Strategy | None]:
    """The devices and streams, device name -> kind of memory for its temporaries, and the strategy of placement that a
    plugin offers, ``None`` for that of the core."""
    if not isinstance(placement, str):
        raise SchedulerError(f"placement is the name of a strategy, such as 'priority', not {placement!r:.60}")
    chosen = None
    if placement != "priority":
        from opweave.scheduler.place.strategy import strategy  # most schedulers place by priority

        chosen = strategy(placement)
    if memory_limit is not None:
        from opweave.scheduler.place.strategy import rewrite  # most schedulers have no limit

        if not isinstance(memory_limit, int) or memory_limit < 0:
            raise SchedulerError(f"memory_limit is a number of bytes, not {memory_limit!r}")
        rewrite("memory_limit")
    if not isinstance(parallel, int) or not 0 <= parallel <= MOST_SLOTS:
        raise SchedulerError(
            f"parallel is True, False or a number of slots, not {parallel!r:.60} (at most {MOST_SLOTS})"
        )
    if not isinstance(buffer_types, (Mapping, type(None))):
        raise SchedulerError(f"buffer_types are a mapping of devices to kinds of memory, not {buffer_types!r:.60}")
    if not isinstance(devices, (Device, Stream, Iterable)):
        raise SchedulerError(f"a scheduler runs on devices, streams, or names of devices, not on {devices!r:.60}")
    given = [devices] if isinstance(devices, (Device, Stream, str)) else list(devices)
    if not given:
        raise SchedulerError("a scheduler needs at least one device")
    kinds = {k if isinstance(k, str) else k.name: v for k, v in (buffer_types or {}).items()}
    resolved = [registry.device(d) if isinstance(d, str) else d for d in given]
    for item in resolved:
        if not isinstance(item, (Device, Stream)):
            raise SchedulerError(f"a scheduler runs on devices, streams, or names of devices, not on {item!r}")
    names = [d.name if isinstance(d, Device) else d.device.name for d in resolved if isinstance(d, Device)]
    if len(set(names)) != len(names):
        raise SchedulerError(f"a device is named twice: {', '.join(names)}; give two streams of it instead")
    return resolved, kinds, chosen


def checked_pins(targets: Sequence[Target], pins: Mapping[Tensor, Where]) -> dict[Tensor, int]:
    """The indices of targets for the nodes, inputs and states that a caller pins; of states that have memory already
    it is only checked that they lie there.

    Raises:
        SchedulerError: no mapping, pins of other tensors, to other devices, or of states that lie elsewhere.
    """
    if not isinstance(pins, Mapping):
        raise SchedulerError(f"pins are a mapping of computed tensors to devices, not {pins!r:.60}")
    resolved = {}
    for tensor, where in pins.items():
        leaf = tensor.root.leaf if isinstance(tensor, Tensor) else None
        if not isinstance(tensor, Tensor) or (leaf is not None and leaf.kind not in ("input", "state")):
            raise SchedulerError("computed tensors, inputs and states are pinned; place weights when making them, "
                                 f"not {tensor!r:.60}")  # fmt: skip
        target = find_target(targets, where)
        if leaf is None or leaf.placement is None:
            resolved[tensor.root] = target.index
        elif leaf.placement.buffer.device is not target.device:
            raise SchedulerError(f"{tensor.describe()} lies on {leaf.placement.buffer.device.name} and cannot "
                                 f"be pinned to {target.name}")  # fmt: skip
    return resolved


def checked_placements(placements: Iterable[Placement]) -> dict[Tensor, Placement]:
    """Placements of computed tensors, checked against each other."""
    placed: dict[Tensor, Placement] = {}
    if not isinstance(placements, Iterable):
        raise SchedulerError(f"placements are a sequence of what ow.storage made, not {placements!r:.60}")
    for made in placements:
        if not isinstance(made, Placement):
            raise SchedulerError(f"placements are what ow.storage made; one of them is {made!r:.60}")
        if made.tensor.op is None or made.tensor.memory is not made.tensor:
            raise SchedulerError(f"{made.tensor.describe()} is not a computed tensor with memory of its own")
        made.buffer.check(made.offset, made.buffer.type.alloc_size(made.tensor))
        for other in placed.values():
            apart = (
                made.offset + made.tensor.nbytes <= other.offset or other.offset + other.tensor.nbytes <= made.offset
            )
            if other.buffer is made.buffer and not apart:
                raise HazardError(f"{made.tensor.describe()} is placed over {other.tensor.describe()}")
        placed[made.tensor] = made
    return placed


def checked_outputs(outputs: Outputs) -> tuple[tuple[Tensor, ...], Any]:
    """The output tensors, and a hashable key for the form in which results are returned."""
    if isinstance(outputs, Tensor):
        return (outputs,), "one"
    if not isinstance(outputs, Iterable):
        raise SchedulerError(f"outputs are a tensor, a sequence or a mapping of tensors, not {outputs!r:.60}")
    tensors: tuple[Tensor, ...] = tuple(outputs.values() if isinstance(outputs, Mapping) else outputs)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise SchedulerError(f"outputs are tensors, one, a sequence or a mapping; one of them is {tensor!r:.60}")
    return tensors, tuple(outputs) if isinstance(outputs, Mapping) else "many"
