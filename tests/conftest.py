"""``pytest -m smoke`` takes about 40 seconds and touches every layer of the core and the CPU plugin."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long making an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("opweave", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("opweave")

HERE = Path(__file__).parent
SMOKE = (
    "core/graph", "core/ops", "core/host", "core/test_public_names.py", "core/contract/test_example_backend.py",
    "core/contract/test_kernels.py", "core/registry/test_names.py", "core/scheduler/test_allocate.py",
    "core/scheduler/test_assign.py", "core/scheduler/test_fusing.py", "core/scheduler/test_run.py",
    "cpu/test_elementwise.py",
)  # fmt: skip
"""Folders and files whose tests are the smoke selection."""

LONG = (
    "core/graph/test_dtypes.py", "core/graph/test_foreign_arrays.py", "core/graph/test_layout.py",
    "core/host/test_storage.py", "core/ops/test_third_party.py",
)  # fmt: skip
"""Files in these folders that take long, for all pairs of types or memories, hundreds of examples, or importing JAX.
Other tests of the selection use what they test."""


def _is_smoke(path: Path) -> bool:
    """Whether a file is, or a folder contains or is in, the selection."""
    name = path.relative_to(HERE).as_posix()
    return name not in LONG and any(f"{name}/".startswith(f"{s}/") or s.startswith(f"{name}/") for s in SMOKE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m smoke`` the other tests are not even imported: that would take as long as running the selection."""
    if config.option.markexpr != "smoke" or not collection_path.is_relative_to(HERE):
        return None
    return None if collection_path == HERE or _is_smoke(collection_path) else True


def pytest_collection_finish() -> None:
    """What is there when all tests are collected stays to the end: garbage collections, which many tests and checks of
    leaks ask for, need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and _is_smoke(item.path):
            item.add_marker(pytest.mark.smoke)
