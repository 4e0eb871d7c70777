"""Memory of this process, the device that runs the references there, and moving bytes between any two buffers."""

from opweave.host.device import HostBackend, HostDevice
from opweave.host.memory import HostMemory, NumPyMemory, host_memory_info

__all__ = ["HostBackend", "HostDevice", "HostMemory", "NumPyMemory", "host_memory_info"]
