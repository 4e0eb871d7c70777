"""`Members`: the members of a combination, and the scheduler over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from opweave.concurrency import Lock
from opweave.runtime.device import Device
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from opweave.graph.leaf import Leaf
    from opweave.runtime.stream import Stream
    from opweave.scheduler.program import Program

__all__ = ["Members"]


class Members:
    """The members with the scheduler over them, which the streams with the same parameters share while one of them is
    open.

    Attributes:
        name: of the combination.
        devices: the members, in order.
        shares: member -> its share of each weight.
        note: called with a leaf in which members keep values of the combination's memory, and with their bytes.
        lock: held while a program is built or run.
        runner: the thread that runs a program, 0: none does.
    """

    def __init__(
        self,
        name: str,
        devices: tuple[Device, ...],
        shares: Mapping[str | Device, float],
        note: Callable[[Leaf, int], None],
        params: Mapping[str, Any],
    ) -> None:
        self.name: Final = name
        self.devices: Final = devices
        self.shares: Final = shares
        self.note: Final = note
        self.lock: Final = Lock()
        self.runner = 0
        self._params: Final = dict(params)
        self._scheduler: Scheduler | None = None
        self.users: Final[WeakSet[Stream]] = WeakSet()
        self.unused: Final[list[Program[Any]]] = []  # programs for values that no longer exist

    def roomiest(self) -> Device:
        """The member with most free memory."""
        return max(self.devices, key=lambda device: device.mem_info()[0])

    @property
    def scheduler(self) -> Scheduler:
        """Made at its first use: the members in order, then the host, for nodes that no member runs as they are."""
        if self._scheduler is None:
            self._scheduler = Scheduler([*self.devices, HostDevice()], **self._params)
        return self._scheduler

    def cancel(self) -> None:
        """End the program that is being run."""
        if self._scheduler is not None:
            self._scheduler.cancel()

    def forget_unused(self) -> None:
        """Close the programs that no call can need any more, which gives memory back."""
        while self.unused:
            self.unused.pop().close()

    def leave(self, stream: Stream) -> None:
        """Note that a stream was closed; with the last one the scheduler is closed."""
        self.users.discard(stream)
        if not self.users and self._scheduler is not None:
            with self.lock:
                scheduler, self._scheduler = self._scheduler, None
                scheduler.close()
