"""The memory of this process, the device ``host`` that runs references in it, and copies between any two buffers."""

from opweave.host.device import HostBackend, HostDevice
from opweave.host.memory import HostMemory, NumPyMemory, host_memory_info

__all__ = ["HostBackend", "HostDevice", "HostMemory", "NumPyMemory", "host_memory_info"]
