"""Checks for ``opweave doctor``: whether torch's wheel is one for the hardware, and its threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from opweave.registry import Diagnosis
from opweave.runtime.host.cores import usable_cores
from opweave.tools.doctor import threads_diagnosis

__all__ = ["diagnose", "wheel_diagnosis"]

_WHEELS: Final = "see https://pytorch.org/get-started/locally"

_DRIVERS: Final = (
    ("an NVIDIA driver", Path("/proc/driver/nvidia/version"), "cuda"),
    ("an AMD driver", Path("/dev/kfd"), "hip"),
)


def diagnose() -> Iterator[Diagnosis]:
    """What there is to say about torch."""
    yield wheel_diagnosis()
    yield threads_diagnosis("torch's threads", torch.get_num_threads(), usable_cores(), ("OMP_NUM_THREADS",))


def wheel_diagnosis() -> Diagnosis:
    """Whether torch was built for the accelerators whose drivers are here, and reaches them."""
    about, version = "torch", f"torch {torch.__version__}"
    here = () if torch.accelerator.is_available() else _DRIVERS
    for driver, sign, built_for in here:
        if sign.exists() and getattr(torch.version, built_for) is None:
            message = f"{driver} is here, but {version} was built without {built_for.upper()}"
            return Diagnosis(about, "slow", message, f"pip install torch from the index for it, {_WHEELS}")
        if sign.exists():
            message = f"{driver} is here, but {version} reaches no device; it may be older than the wheel asks for"
            return Diagnosis(about, "wrong", message, f"update the driver, or install a wheel for it, {_WHEELS}")
    return Diagnosis(about, "ok", f"{version}, kernels for {torch.backends.cpu.get_cpu_capability()} on the CPU")
