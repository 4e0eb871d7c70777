"""Every kernel against the definition of its operation, over all types and layouts that the device accepts."""

import pytest

from opweave.conformance import CASES, Case, run_case
from opweave.graph.opdef import OPS
from opweave_cpu import CpuDevice
from opweave_cpu.kernels import KERNELS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(device: CpuDevice, case: Case) -> None:
    verdict = run_case(device, case)
    if verdict.status == "refused":
        pytest.skip(verdict.reason)
    assert verdict, verdict.reason


def test_every_operation_has_a_kernel() -> None:
    assert {name for name, op in OPS.items() if not op.is_view and op.family != "third-party"} <= KERNELS.ops()


def test_kernels_lie_where_their_operations_are_defined() -> None:
    for name in KERNELS.ops():
        for kernel in KERNELS.candidates(name):
            assert kernel.factory.__module__ == f"opweave_cpu.kernels.{OPS[name].family}"
