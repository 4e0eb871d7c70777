"""`combine`: several devices as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from opweave import registry
from opweave.concurrency import Lock
from opweave.contract.backend import Backend
from opweave.contract.device import Kind
from opweave.contract.memory import MemorySpace, Usage
from opweave.errors import DeviceLostError, SchedulerError
from opweave.functional import ArrayDevice, ArrayMemory
from opweave.graph.opdef import OPS
from opweave.runtime.device import Device
from opweave.runtime.functional import FunctionCall
from opweave.runtime.stream import Stream
from opweave.sharding.placing import shares_by_device
from opweave_combined.function import CombinedFunction
from opweave_combined.members import Members
from opweave_combined.values import Values

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Call, Step
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.leaf import Leaf

__all__ = ["CombinedBackend", "CombinedDevice", "combine"]


def combine(devices: Sequence[str | Device] | Mapping[str | Device, float]) -> CombinedDevice:
    """One device over several: programs on it compute with all of them at once, and its memory is theirs together.

    Weights on it are split over the members, products along their output features, those that follow along the
    features that are summed over (Shoeybi et al., "Megatron-LM", 2019); `opweave.Sharded` says so by hand. Key-value
    caches that such products fill are split by heads; other states lie whole on the member with most room. It supports
    what all members support.

    Args:
        devices: two devices or more, or their names; or a mapping of these to shares, any positive numbers, in which
            weights are split. Default: by the memory that each has in all.

    Returns:
        The device, called ``combined:<names joined by +>``, which is registered: `opweave.device` finds it. The same
        object for the same members and shares.

    Raises:
        UnknownNameError, PluginError: no such device, or one that does not work.
        SchedulerError: fewer than two devices, one named twice, a combination among them, simulated ones, a share that
            is no positive number; or the same members are combined in other shares already.
        LifetimeError: a combination of members that were unloaded meanwhile has that name, and is in use.
    """
    given, shares = shares_by_device("combine()", devices)
    members = tuple([registry.device(d) if isinstance(d, str) else d for d in given])
    if len(set(members)) < 2 or len(set(members)) < len(members):
        raise SchedulerError(f"combine() takes two different devices or more, not {[d.name for d in members]}")
    for member in members:
        if isinstance(member, CombinedDevice) or member.simulated:
            raise SchedulerError(f"{member.name} cannot be a member of a combination; it is "
                                 f"{'simulated' if member.simulated else 'one itself: name its members'}")  # fmt: skip
    made = CombinedDevice(members, shares)
    with LOCK:
        return BACKEND.admit(made, fixed=shares is not None)


class CombinedBackend(Backend):
    """The combinations of a process."""

    name = "combined"
    dynamic = True
    priority = -100  # devices are used as they are where nobody asks for their combination

    def __init__(self) -> None:
        self._devices: list[CombinedDevice] = []

    def devices(self) -> Sequence[CombinedDevice]:
        return tuple(self._devices)

    def admit(self, device: CombinedDevice, fixed: bool) -> CombinedDevice:
        """Register a combination, or find the one of the same members; ``fixed``: its shares were given."""
        self._devices = [known for known in self._devices if known.backend is self]  # the others were unloaded
        for known in self._devices:
            if known.members == device.members:
                if fixed and known.shares != device.shares:
                    raise SchedulerError(
                        f"{known.name} is there already, with the shares {list(known.shares.values())}"
                    )
                return known
        others = [known for known in self._devices if known.name != device.name]
        again = len(others) < len(self._devices)
        if again:  # of devices that were unloaded, and loaded again: others by the same names
            registry.unload(self)
        before, self._devices = self._devices, [*others, device]
        try:
            if again or len(self._devices) == 1:
                registry.register(self)
            else:
                registry.register_device(device, self)
        except BaseException:
            self._devices = before
            raise
        return device


class CombinedStream(Stream):
    """Runs each group as a program of the scheduler over the members. It is synchronous; the members run at once."""

    def __init__(self, device: CombinedDevice, **params: Any) -> None:
        super().__init__(device)
        self.members: Final = device.members_with(params)
        self.members.users.add(self)

    def _compile_functional(
        self, steps: Sequence[Step], inputs: Sequence[Arg], outputs: Sequence[Arg], donated: Sequence[int]
    ) -> CombinedFunction:
        return CombinedFunction(self.members, steps, inputs, outputs)

    def _warm(self, call: Call) -> None:
        if isinstance(call, FunctionCall) and isinstance(call.function, CombinedFunction):
            with self.members.lock:
                call.function.prepare([cell.load() for cell in call.reads]).program.warm()

    def _translate(self, error: Exception) -> Exception:
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, DeviceLostError):
                return DeviceLostError(f"{self.device.name} lost a member: {seen}")
            seen = seen.__cause__ or seen.__context__
        return error

    def _abort(self) -> None:
        runner = self.members.runner
        if runner and runner == self.submission.thread:  # and not another stream's
            self.members.cancel()

    def _close(self) -> None:
        self.members.leave(self)


class CombinedDevice(ArrayDevice):
    """Made by `combine`.

    Attributes:
        members: the devices, in order.
        shares: member -> its share of each weight.
    """

    stream_class = CombinedStream

    def __init__(self, members: Sequence[Device], shares: Sequence[float] | None = None) -> None:
        self.members: Final = tuple(members)
        total = [float(member.mem_info()[1]) for member in members]
        given = shares or (total if all(total) else [1.0] * len(members))
        self.shares: Final[dict[str | Device, float]] = dict(zip(members, given, strict=True))
        self.id = "+".join([member.name for member in members])
        self.name = f"combined:{self.id}"
        self.space = MemorySpace(self.name)
        self.kind = max((member.kind for member in members), key=lambda kind: kind.rank)
        self.description = f"{len(members)} devices as one"
        self.alignment = max(member.alignment for member in members)
        self.threaded = all(member.threaded for member in members)
        self.raises_index_errors = all(member.raises_index_errors for member in members)
        self.survives_fork = all(member.survives_fork for member in members)
        self._schedulers: Final[dict[Any, Members]] = {}
        self._lock: Final = Lock()
        self._reserved = 0  # bytes of its buffers
        self._kept: Final[WeakKeyDictionary[Leaf, int]] = WeakKeyDictionary()  # bytes of values that members keep
        self.library = Values(weights=False)  # of arrays that are put; memory for weights has one of its own

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return all(member.alive for member in self.members)

    def features(self) -> Mapping[str, Any]:
        return {"members": ", ".join(member.name for member in self.members)}

    def mem_info(self) -> tuple[int, int]:
        known = [member.mem_info() for member in self.members if member.kind is not Kind.CPU]
        machine = [member.mem_info() for member in self.members if member.kind is Kind.CPU]
        if machine:  # CPUs share the memory of the machine, which counts once
            known.append((min(free for free, _ in machine), max(total for _, total in machine)))
        if not all(total for _, total in known):
            return 0, 0
        waiting = max(self._reserved - sum(self._kept.values()), 0)
        return max(sum(free for free, _ in known) - waiting, 0), sum(total for _, total in known)

    def members_with(self, params: Mapping[str, Any]) -> Members:
        """The scheduler over the members whose streams were opened with these parameters."""
        if params and not (self.threaded and set(params) == {"threads"}):
            raise TypeError(f"unknown parameters {sorted(params)}")
        with self._lock:
            return self._schedulers.setdefault(
                tuple(params.items()), Members(self.name, self.members, self.shares, self._note, params)
            )

    # --- memory -----------------------------------------------------------------------------------------------------

    def _note(self, leaf: Leaf, nbytes: int) -> None:
        """Note that members keep the values of one of this device's buffers in ``leaf``."""
        self._kept[leaf] = nbytes

    def _alloc(self, size: int, usage: Usage) -> ArrayMemory:
        lost = [member.name for member in self.members if not member.alive]
        if lost:
            raise DeviceLostError(f"{self.name} lost a member: {', '.join(lost)}")
        free, total = self.mem_info()
        if total and size > free:
            raise MemoryError(f"{free:,} bytes are free on its members together")
        with self._lock:
            self._reserved += size
        return ArrayMemory(size, Values(weights=True) if usage is Usage.WEIGHTS else self.library)

    def _free(self, mem: ArrayMemory) -> None:
        with self._lock:
            self._reserved -= mem.size
        if mem.size:
            mem.write(0, np.empty(mem.size, np.uint8))  # nothing that lay there is needed any more
            mem.cell(0, None, (mem.size,)).array = None
        for members in list(self._schedulers.values()):
            members.forget_unused()

    def _export_dlpack(self, mem: ArrayMemory, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        raise BufferError(f"{self.name} does not export its memory to other libraries")

    # --- work -------------------------------------------------------------------------------------------------------

    def _why_not(self, step: Step) -> str | None:
        if step.op not in OPS:
            return f"no definition of {step.op}"
        for member in self.members:
            why = member._why_not(step)
            if why is not None:
                return f"{member.name}: {why}"
        return None


BACKEND: Final = CombinedBackend()
LOCK: Final = Lock()
