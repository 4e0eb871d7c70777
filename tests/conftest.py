"""``pytest`` runs the tests in several processes, ``pytest -n 0`` in this one (`pytest_cmdline_main`).

``pytest -m smoke`` takes less than a minute and touches every layer of the core and the CPU plugin.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.notes import note, notes

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# How long making an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("opweave", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("opweave")

HERE = Path(__file__).parent
PROCESSES = 4
"""How many processes run tests at most: each takes up to 2 GB, for PyTorch and the drivers, and has threads for all
processors."""

SMOKE = (
    "core/graph", "core/ops", "core/runtime/host", "core/test_public_names.py", "core/contract/test_example_backend.py",
    "core/contract/test_kernels.py", "core/registry/test_names.py", "core/scheduler/test_allocate.py",
    "core/scheduler/test_assign.py", "core/scheduler/test_fusing.py", "core/scheduler/test_run.py",
    "cpu/test_elementwise.py",
)  # fmt: skip
"""Folders and files whose tests are the smoke selection."""

LONG = (
    "core/graph/test_dtypes.py", "core/graph/test_foreign_arrays.py", "core/graph/test_layout.py",
    "core/runtime/host/test_operands.py", "core/ops/test_third_party.py",
)  # fmt: skip
"""Files in these folders that take long, for all pairs of types or memories, hundreds of examples, or importing JAX.
Other tests of the selection use what they test."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """For whole folders, as many processes as there are processors, up to `PROCESSES`; one process if files or tests
    are named, with ``-s``, ``--pdb`` or ``--trace``, and without pytest-xdist. ``-n`` decides otherwise.

    Here and not in the settings of pytest, so that ``-p no:xdist`` works and suites of conformance are not affected.
    """
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    folders = any(Path(config.invocation_params.dir, name).is_dir() for name in config.args)
    if option.numprocesses is None and not option.tx and folders and option.capture != "no" and not option.trace:
        option.numprocesses = "auto"
        option.maxprocesses = option.maxprocesses or PROCESSES
        if option.dist == "no":
            # Each process gets a run of neighbours: most files stay in one, with what their fixtures made.
            option.dist = "worksteal"
    if option.numprocesses:
        # PyTorch's threads, of which each process has as many as there are processors, spin while they wait for each
        # other, so that its kernels take five times as long in two processes that run at once.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """A process has run its tests: what it notes about them is printed here."""
    note(node.config, getattr(node, "workeroutput", {}).get("notes", ()))  # nothing, if the process crashed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in notes(terminalreporter.config):
        terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["notes"] = notes(session.config)


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
