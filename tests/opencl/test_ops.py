"""Every operation, on f32, in every layout: right where accepted, and accepted."""

from __future__ import annotations

import pytest

from opweave.conformance import CASES, Case, run_case
from opweave.opdef import OPS
from opweave_opencl import OpenCLBackend, OpenCLDevice
from opweave_opencl.kernels import KERNELS
from opweave_opencl.tuning import Tuning

RUNS = {name for name, op in OPS.items() if not op.is_view} - {"custom"}
SHARING = {
    *("add", "arange", "argmax", "argsort", "cumsum", "embedding", "head_softmax", "index_add", "layer_norm", "linear"),
    *("matmul", "max", "mean", "pad", "rms_norm", "softmax", "sum", "take_along_axis", "tril", "var"),
}
"""Operations whose work-items share rows or tiles, or load fewer elements, where there are many of them."""
GROUPED = Tuning(vector=4, group=64, row_vector=1, row_group=64, tiled=True)
"""How kernels are built for GPUs; every driver runs them so, only not as fast."""


def is_f32(case: Case) -> bool:
    return all(x.dtype == "f32" or x.values == "ids" for x in case.operands)


@pytest.fixture(scope="session")
def grouped() -> OpenCLDevice:
    found = OpenCLBackend().devices()[0]
    assert isinstance(found, OpenCLDevice)
    found.tuning = GROUPED
    return found


def test_the_table_has_every_operation_but_functions_in_python():
    assert KERNELS.ops() == RUNS


@pytest.mark.parametrize("case", [c for c in CASES if c.op in RUNS], ids=str)
def test_accepted_is_right_and_f32_is_accepted(device, case):
    verdict = run_case(device, case)
    assert verdict, verdict.reason
    if verdict.status == "refused":
        assert verdict.reason
        assert not is_f32(case) or case.op == "cast", verdict.reason


@pytest.mark.parametrize("case", [c for c in CASES if c.op in SHARING and is_f32(c)], ids=str)
def test_work_groups_that_share_rows_and_tiles(grouped, case):
    verdict = run_case(grouped, case)
    assert verdict, verdict.reason
