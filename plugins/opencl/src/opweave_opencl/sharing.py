"""`SharedContext`: one context for the devices of a platform, so that they copy and wait without the host."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["SharedContext"]


class SharedContext:
    """The context of a platform's devices, made when the first of them is used. Thread-safe.

    Args:
        devices: of one platform.
    """

    def __init__(self, devices: Sequence[cl.Device]) -> None:
        self._devices: Final = list(devices)
        self._contexts: Final[dict[cl.Device, cl.Context]] = {}
        self._lock: Final = Lock()

    def exclude(self, device: cl.Device) -> None:
        """Make the context without ``device``, which does not work."""
        with self._lock:
            self._devices[:] = [other for other in self._devices if other != device]

    def of(self, device: cl.Device) -> cl.Context:
        """The context of ``device``: the one of all devices, or its own where the driver makes no common one."""
        import pyopencl as cl

        with self._lock:
            if not self._contexts:
                try:
                    common = cl.Context(self._devices)
                except cl.Error:
                    if len(self._devices) == 1:
                        raise
                else:
                    self._contexts.update(dict.fromkeys(self._devices, common))
            if device not in self._contexts:
                self._contexts[device] = cl.Context([device])
            return self._contexts[device]
