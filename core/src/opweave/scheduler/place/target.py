"""`Target`: one of the scheduler's devices with its stream, its rank, and what it remembers of signatures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, Any, Final

from opweave.contract.memory import Usage
from opweave.errors import SchedulerError
from opweave.runtime.device import Device
from opweave.runtime.host.device import HostDevice
from opweave.runtime.memory import BufferType
from opweave.runtime.stream import Stream
from opweave.runtime.worker import WorkerStream
from opweave.scheduler.place.support import Support, ask, ask_repacked, has_dense_sources, unbound_step

if TYPE_CHECKING:
    from opweave.contract.step import Step
    from opweave.graph.graph import Graph
    from opweave.graph.tensor import Signature
    from opweave.runtime.host.threads import ThreadPool
    from opweave.runtime.submission import Submission

__all__ = [
    "HostForEmpty", "Repack", "Target", "Where", "check_buffer_type", "close_targets", "equal_part", "find_target",
    "open_targets", "reads_nothing", "repack_limit",
]  # fmt: skip

Where = Device | Stream | str
"""How callers name a device of a scheduler."""

Repack = bool | int | Mapping[Any, bool | int] | None
"""How callers limit copies of weights in special memory: for every device, or by device or its name."""


def check_buffer_type(device: Device, kind: BufferType | None) -> None:
    """Raise `SchedulerError` unless temporaries of a device can lie in a kind of memory (``None``: its ordinary one):
    kernels of the device write plain bytes there."""
    if not device.default_buffer_type.is_raw:
        raise SchedulerError(f"the ordinary memory of {device.name} keeps tensors in a form of its own (it overrides "
                             "_init); ordinary memory is plain, others are listed in buffer_types")  # fmt: skip
    if kind is None:
        kind = device.default_buffer_type
    if not isinstance(kind, BufferType):
        raise SchedulerError(f"the memory for temporaries of {device.name} is a BufferType, not {kind!r}")
    if not device.reaches(kind.space):
        raise SchedulerError(f"{device.name} cannot reach the memory of {kind!r}")
    if not kind.is_raw:
        raise SchedulerError(f"{kind!r} keeps tensors in a form of its own (it overrides _init), which kernels do not "
                             "write; take plain memory for temporaries")  # fmt: skip
    if not kind.holds(Usage.COMPUTE):
        raise SchedulerError(f"{kind!r} is not for temporaries: Usage.COMPUTE is not among its usages")


class Target:
    """One device of a scheduler.

    Attributes:
        index: position in the order of priority, 0 first.
        device, stream: where it runs.
        buffer_type: what its temporaries lie in.
        owned: the scheduler opened the stream and closes it.
        copier: a second stream of an asynchronous device, for copies beside its steps (`open_copier`).
        repack: bytes that copies of weights in special memory may take for one program (`Capabilities`).
        replaced: the target with the synchronous stream that this one was made of (`at_once`), which programs that were
            built earlier use.
    """

    __slots__ = ("buffer_type", "copier", "device", "index", "name", "owned", "repack", "replaced", "space", "stream")

    def __init__(
        self, index: int, stream: Stream, buffer_type: BufferType | None, owned: bool, repack: float = 0
    ) -> None:
        self.repack: Final = repack
        self.index: Final = index
        self.stream: Final = stream
        stream.repack = repack
        self.device: Final = stream.device
        self.name: Final = stream.device.name
        self.buffer_type: Final = stream.device.default_buffer_type if buffer_type is None else buffer_type
        self.space: Final = self.buffer_type.space
        self.owned: Final = owned
        self.copier: Stream | None = None
        self.replaced: Target | None = None

    def __repr__(self) -> str:
        return f"<Target {self.index}: {self.name}>"

    @property
    def given(self) -> Device | Stream:
        """What the scheduler was given: the device, or a stream that others own."""
        return self.device if self.owned else self.stream

    @property
    def streams(self) -> list[Stream]:
        own = [self.stream] if self.copier is None else [self.stream, self.copier]
        return own if self.replaced is None else [*own, *self.replaced.streams]

    @property
    def fetches_ahead(self) -> bool:
        """Whether copies run beside steps: the device is asynchronous, and its streams wait for each other."""
        return self.stream.is_async and self.stream.has_events

    def open_copier(self) -> None:
        """Open the stream for copies beside steps, where the device can do that."""
        if self.copier is None and self.fetches_ahead:
            self.copier = self.device.open(worker=self.stream.has_thread)

    def at_once(self, **params: Any) -> Target:
        """The same device with a thread of its own, so that it computes while others do; itself where it does already,
        or where its stream is not the scheduler's."""
        if not self.owned or self.stream.is_async:
            return self
        kind = None if self.buffer_type is self.device.default_buffer_type else self.buffer_type
        made = Target(self.index, self.device.open(worker=True, **params), kind, owned=True, repack=self.repack)
        made.replaced = self
        return made

    def close(self) -> None:
        """Close the streams that were opened for the scheduler."""
        if self.replaced is not None:
            self.replaced.close()
        if self.copier is not None:
            self.copier.close()
            self.copier = None
        if self.owned:
            self.stream.close()

    def support(self, signature: Signature) -> Support:
        """What the device says of nodes with a signature; remembered on it."""
        known = signature.support.get(self.device)
        if known is None:
            known = signature.support[self.device] = ask(self.device, signature)
        return known

    def support_whole(self, signature: Signature, plain: Signature) -> Support:
        """What the device says of nodes with a signature whose ``whole`` sources it may read in special memory; where
        it does not want that, what it says of ``plain``, the same without them, which it is asked only once."""
        known = signature.support.get(self.device)
        if known is None:
            known = self.support(plain)
            if self.device in signature.repacking and known.reason is None and not known.unpacked:
                known = ask_repacked(self.device, signature, known)
            signature.support[self.device] = known
        return known

    def ask_ahead(self, signatures: Iterable[Signature]) -> None:
        """Ask the device about many signatures at once, if it can answer that; packed too where it refuses them."""
        if not self.device.answers_many:
            return
        new = [s for s in dict.fromkeys(signatures) if self.device not in s.support]
        runs = self.device.ask_ahead([unbound_step(s, self.device) for s in new])
        loose = [s for s, run in zip(new, runs, strict=True) if not run and not has_dense_sources(s)]
        self.device.ask_ahead([unbound_step(s, self.device, Support(None, packed=True)) for s in loose])


class HostForEmpty(HostDevice):
    """The host, in a scheduler that has not been given it, for nodes with a source without elements: kernels of devices
    are never given those, and an empty batch must run on any devices."""

    def __init__(self) -> None:
        self.name = "host"

    def _why_not(self, step: Step) -> str | None:
        if not any(0 in src.shape for src in step.srcs):
            return "it is not among the scheduler's devices, and then only runs nodes with a source without elements"
        return super()._why_not(step)


def reads_nothing(graph: Graph) -> bool:
    """Whether a node that has elements reads a source that has none."""
    return any(0 not in node.shape and any(0 in source.shape for source in node.srcs) for node in graph.nodes)


def repack_limit(given: Repack, device: Device) -> float:
    """Bytes that copies of weights in special memory of a device may take, by what a caller gave as ``repack``.

    Where that says nothing of the device, the environment variable of its backend decides, such as
    ``OPWEAVE_CPU_CACHE_BYTES``, else ``OPWEAVE_REPACK_BYTES``.

    Raises:
        SchedulerError: neither a truth value nor a number of bytes, given or in a variable.
    """
    what: str = "repack"
    value: object = given.get(device.name, given.get(device)) if isinstance(given, Mapping) else given
    if value is None:
        value = True
        backend = device.name.partition(":")[0].upper().replace("-", "_")
        for variable in (f"OPWEAVE_{backend}_CACHE_BYTES", "OPWEAVE_REPACK_BYTES"):
            text = os.environ.get(variable, "")
            if text:
                what, value = variable, int(text) if text.isascii() and text.isdigit() else text
                break
    if not isinstance(value, int) or value < 0:
        raise SchedulerError(f"{what} is True, False or a number of bytes, not {value!r:.60}")
    return inf if value is True else value


def open_targets(
    devices: Sequence[Device | Stream],
    kinds: dict[str, BufferType],
    parallel: bool,
    threads: int | ThreadPool | None,
    repack: Repack,
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
    if isinstance(repack, Mapping):
        here = {*owners, *[device.name for device in owners]}
        if strange := [str(key) for key in repack if key not in here]:
            raise SchedulerError(f"repack names devices that are not here: {', '.join(strange)}")
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
                stream.submission = ownership
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
    from opweave.runtime.host.cores import usable_cores  # importing opweave must not pay for it

    return max(1, usable_cores().usable // max(1, number))


def find_target(targets: Iterable[Target], where: Where) -> Target:
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
