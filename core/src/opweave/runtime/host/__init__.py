"""The memory of this process, the device ``host`` that runs references in it, and copies between any two buffers."""

from opweave.runtime.host.device import HostBackend, HostDevice
from opweave.runtime.host.memory import HostMemory, NumPyMemory, host_memory_info

__all__ = ["HostBackend", "HostDevice", "HostMemory", "NumPyMemory", "host_memory_info"]
