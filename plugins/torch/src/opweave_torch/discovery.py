"""Which devices torch has here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import torch

from opweave.contract import Device
from opweave.errors import Broken
from opweave_torch.accelerator import CudaDevice, MpsDevice, SeparateCpuDevice, TorchAccelerator, XpuDevice
from opweave_torch.device import TorchCpuDevice
from opweave_torch.health import UnusableAccelerator

__all__ = ["SEPARATE_VARIABLE", "find_devices"]

SEPARATE_VARIABLE: Final = "OPWEAVE_TORCH_SEPARATE"
"""Environment variable: ``1`` gives ``torch:cpu`` a memory space of its own."""

_KNOWN: Final[dict[str, Callable[[torch.device], Device]]] = {"cuda": CudaDevice, "xpu": XpuDevice, "mps": MpsDevice}


def find_devices() -> list[Device]:
    """Every accelerator of torch, and the CPU last.

    Raises:
        Broken: ``OPWEAVE_TORCH_SEPARATE`` is neither 0 nor 1.
    """
    separate = os.environ.get(SEPARATE_VARIABLE, "").strip()
    if separate not in ("", "0", "1"):
        raise Broken(f"{SEPARATE_VARIABLE}={separate!r}", remedy=f"set {SEPARATE_VARIABLE} to 1, or unset it")
    return [*_accelerators(), SeparateCpuDevice() if separate == "1" else TorchCpuDevice()]


def _accelerators() -> list[Device]:
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    make = _KNOWN.get(kind.type, TorchAccelerator)
    if kind.type == "mps":
        return [make(torch.device("mps"))]
    return [_device(make, torch.device(kind.type, number)) for number in range(torch.accelerator.device_count())]


def _device(make: Callable[[torch.device], Device], target: torch.device) -> Device:
    """The device, or an `UnusableAccelerator` where torch fails to describe it, so that the others are still listed."""
    try:
        return make(target)
    except (RuntimeError, AssertionError) as error:
        return UnusableAccelerator(target, error)
