"""Checks for ``opweave doctor``: the version of ONNX Runtime, its providers, and its threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnxruntime
from packaging.version import Version

from opweave.registry import Diagnosis
from opweave.runtime.host.cores import usable_cores
from opweave_ort.providers import installed_packages
from opweave_ort.runtime import RUNTIME
from opweave_ort.sessions import SESSIONS

__all__ = ["diagnose", "package_diagnosis", "version_diagnosis"]

NEWEST_MAJOR: Final = 2
"""The first major version that the plugin was not tried with."""

_DRIVERS: Final = (
    ("an NVIDIA driver", Path("/proc/driver/nvidia/version"), "CUDAExecutionProvider", "onnxruntime-gpu"),
    ("an AMD driver", Path("/dev/kfd"), "MIGraphXExecutionProvider", "onnxruntime-migraphx"),
)


def diagnose() -> Iterator[Diagnosis]:
    """What there is to say about ONNX Runtime."""
    yield version_diagnosis(onnxruntime.__version__)
    yield package_diagnosis()
    cores = usable_cores().usable
    threads = RUNTIME.threads or cores
    message = f"{threads} threads on {cores} processors"
    slow = threads != cores
    remedy = f"set_threads({cores})" if slow else ""
    yield Diagnosis("ONNX Runtime's threads", "slow" if slow else "ok", message, remedy)
    yield Diagnosis("sessions", "ok", f"{SESSIONS.count()} in memory, each for as long as an open program uses it")


def version_diagnosis(version: str) -> Diagnosis:
    """Whether the plugin was tried with this version of ONNX Runtime."""
    about = "onnxruntime"
    if Version(version).major >= NEWEST_MAJOR:
        message = f"onnxruntime {version} is newer than what opweave-ort was tried with"
        return Diagnosis(about, "wrong", message, f"pip install 'onnxruntime<{NEWEST_MAJOR}'")
    return Diagnosis(about, "ok", f"onnxruntime {version}")


def package_diagnosis() -> Diagnosis:
    """Whether exactly one package is installed, and has the provider for the hardware whose driver is here."""
    packages = installed_packages()
    if len(packages) > 1:
        message = f"{' and '.join(packages)} write the same files, so that one of them is damaged"
        remedy = f"pip uninstall {' '.join(packages)}, then pip install the one that is wanted"
        return Diagnosis("providers", "wrong", message, remedy)
    providers = onnxruntime.get_available_providers()
    for driver, sign, provider, package in _DRIVERS:
        if sign.exists() and provider not in providers:
            message = f"{driver} is here, but the installed onnxruntime has no {provider}"
            return Diagnosis("providers", "slow", message, f"pip install {package} in place of onnxruntime")
    return Diagnosis("providers", "ok", ", ".join(providers))
