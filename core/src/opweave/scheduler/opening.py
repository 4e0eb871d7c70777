"""The targets of a scheduler: opening the streams of its devices, closing them, finding the one that a caller means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from opweave.contract.device import Device
from opweave.contract.memory import BufferType
from opweave.contract.stream import Stream
from opweave.contract.worker import WorkerStream
from opweave.errors import SchedulerError
from opweave.graph.tensor import Tensor
from opweave.scheduler.arguments import Where, repack_limit
from opweave.scheduler.target import Target, check_buffer_type

if TYPE_CHECKING:
    from opweave.contract.submission import Submission
    from opweave.host.threads import ThreadPool

__all__ = ["close_targets", "equal_part", "open_targets", "resolved_pins", "target_of"]


def open_targets(
    devices: Sequence[Device | Stream],
    kinds: dict[str, BufferType],
    parallel: bool,
    threads: int | ThreadPool | None,
    repack: bool | int | None,
    ownership: Submission,
) -> list[Target]:
    """A target for each device or stream, in order; streams of devices are opened here.

    Args:
        kinds: device name -> kind of memory for its temporaries.
        parallel, threads, repack: as of `opweave.Scheduler`.
        ownership: the submission that synchronous streams which are opened here share.

    Raises:
        SchedulerError: as `opweave.Scheduler`. What was opened is closed.
    """
    owners = [item if isinstance(item, Device) else item.device for item in devices]
    limits = [repack_limit(repack, device) for device in owners]
    targets: list[Target] = []
    together = sum(isinstance(item, Device) and item.threaded for item in devices)
    shared = equal_part(together) if threads is None and parallel and together > 1 else threads
    rest = dict(kinds)
    try:
        for index, (item, device) in enumerate(zip(devices, owners, strict=True)):
            kind = rest.pop(device.name, None)
            check_buffer_type(device, kind)
            params: dict[str, Any] = {"threads": shared} if shared is not None and device.threaded else {}
            stream = item if isinstance(item, Stream) else item.open(worker=parallel, **params)
            if parallel and not isinstance(stream, WorkerStream):
                raise SchedulerError(f"{stream!r} has no thread of its own, which parallel=True needs: "
                                     "give the device, or device.open(worker=True)")  # fmt: skip
            target = Target(index, stream, kind, owned=stream is not item, repack=limits[index])
            if target.owned and not stream.is_async:
                stream._submission = ownership
            targets.append(target)
        if rest:
            raise SchedulerError(f"buffer types for devices that are not here: {', '.join(rest)}")
    except BaseException:
        close_targets(targets)
        raise
    return targets


def close_targets(targets: Sequence[Target]) -> None:
    """Close all of them, the first one first, whatever one of them raises."""
    with ExitStack() as stack:
        for target in reversed(targets):
            stack.callback(target.close)


def equal_part(number: int) -> int:
    """How many processors each of ``number`` devices gets where they compute at the same time, at least one."""
    from opweave.host.cores import usable_cores  # importing opweave must not pay for it

    return max(1, usable_cores().usable // max(1, number))


def target_of(targets: Iterable[Target], where: Where) -> Target:
    """The target that is meant: by its device, its stream, its device's name, or the part of that before the colon.

    Raises:
        SchedulerError: there is none, or ``where`` is none of these.
    """
    if not isinstance(where, (str, Device, Stream)):
        raise SchedulerError(f"a device, a stream or the name of a device, not {where!r:.60}")
    for target in targets:
        if where is target.device or where is target.stream:
            return target
        if isinstance(where, str) and where.lower() in (target.name.lower(), target.name.lower().split(":")[0]):
            return target
    name = where if isinstance(where, str) else where.name if isinstance(where, Device) else where.device.name
    raise SchedulerError(f"{name!r} is not a device of <Scheduler over {', '.join(t.name for t in targets)}>")


def resolved_pins(targets: Sequence[Target], pins: Mapping[Tensor, Where]) -> dict[Tensor, int]:
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
        target = target_of(targets, where)
        if leaf is None or leaf.placement is None:
            resolved[tensor.root] = target.index
        elif leaf.placement.buffer.device is not target.device:
            raise SchedulerError(f"{tensor.describe()} lies on {leaf.placement.buffer.device.name} and cannot "
                                 f"be pinned to {target.name}")  # fmt: skip
    return resolved
