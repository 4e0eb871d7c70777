"""Every kernel against the definition of its operation, over the types and layouts that the device accepts.

With memory of its own, a part of the cases; ``opweave conformance torch:cpu`` runs them all there too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import opweave as ow
from opweave.graph.opdef import OPS
from opweave_conformance import CASES, Case
from opweave_torch.accelerator import SeparateCpuDevice
from opweave_torch.device import TorchCpuDevice
from opweave_torch.kernels import KERNELS
from opweave_torch.packed import packed_types
from tests.support.kernels import assert_right_where_accepted, by_operation


@pytest.mark.parametrize("cases", by_operation(CASES))
def test_kernels_of(device: TorchCpuDevice, cases: list[Case]) -> None:
    assert_right_where_accepted(device, cases)


@pytest.mark.parametrize("cases", by_operation(CASES[::5]))
def test_kernels_in_memory_of_their_own(separate: SeparateCpuDevice, cases: list[Case]) -> None:
    assert_right_where_accepted(separate, cases)


def test_a_wrong_index_of_add_expert_is_named() -> None:
    x, table, ids = ow.input("x", (2, 3)), ow.input("table", (4, 3)), ow.input("ids", (2,), "i32")
    values = {"x": np.ones((2, 3), np.float32), "table": np.ones((4, 3), np.float32)}
    with ow.Scheduler("torch:cpu") as scheduler:
        program = scheduler.build(ow.add_expert(x, table, ids))
        with pytest.raises(ow.ExecutionError, match=r"add_expert: index 4 at \[1\] is outside of 0 .. 3"):
            program.run(ids=np.array([0, 4], np.int32), **values)


def test_every_operation_has_a_kernel() -> None:
    assert {name for name, op in OPS.items() if not op.is_view and op.family != "third-party"} <= KERNELS.ops()


def test_kernels_lie_where_their_operations_are_defined() -> None:
    for name in KERNELS.ops():
        for kernel in KERNELS.candidates(name):
            family = "packed_products" if set(kernel.accepts) & set(packed_types()) else OPS[name].family
            # Functions of one element each stand in one table.
            allowed = {family, "elementwise"} if OPS[name].pointwise else {family}
            assert kernel.factory.__module__.removeprefix("opweave_torch.kernels.") in allowed


@pytest.mark.parametrize("separate", ["0", "1"])
def test_the_suite_passes_without_exceptions(separate: str) -> None:
    """Levels 0 and 1, and some operations of level 2, by the command that authors use."""
    command = [sys.executable, "-m", "opweave", "conformance", "torch:cpu", "--json", "--level", "0", "--level", "1"]
    done = subprocess.run(
        command,
        env={**os.environ, "OPWEAVE_BACKENDS": "torch", "OPWEAVE_TORCH_SEPARATE": separate},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    statuses = {result["status"] for result in json.loads(done.stdout)["results"]}
    assert statuses <= {"passed", "skipped"}
