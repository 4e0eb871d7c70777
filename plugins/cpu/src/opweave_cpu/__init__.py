"""The CPU backend of opweave: NumPy and its BLAS, in the memory of the process."""

from opweave_cpu.backend import CpuBackend
from opweave_cpu.device import CpuDevice, IsolatedCpuDevice

__all__ = ["CpuBackend", "CpuDevice", "IsolatedCpuDevice"]
