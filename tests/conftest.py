"""``pytest -m smoke`` takes less than a minute and touches every layer of the core and the CPU plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SMOKE = (
    "core/graph", "core/ops", "core/host", "core/test_public_names.py", "core/contract/test_example_backend.py",
    "core/contract/test_kernels.py", "core/registry/test_names.py", "core/scheduler/test_allocate.py",
    "core/scheduler/test_assign.py", "core/scheduler/test_fusing.py", "core/scheduler/test_run.py",
    "cpu/test_elementwise.py", "cpu/test_kernels.py",
)  # fmt: skip
"""Folders and files whose tests are the smoke selection."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen = [HERE / name for name in SMOKE]
    for item in items:
        if any(item.path.is_relative_to(path) for path in chosen):
            item.add_marker(pytest.mark.smoke)
