"""The CPU backend of opweave: NumPy and its BLAS, in the memory of the process.

Importing this package imports no kernels; that comes with the first of its names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opweave_cpu.backend import CpuBackend
    from opweave_cpu.device import CpuDevice, IsolatedCpuDevice

__all__ = ["CpuBackend", "CpuDevice", "IsolatedCpuDevice"]

_FROM = {"CpuBackend": "backend", "CpuDevice": "device", "IsolatedCpuDevice": "device"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
