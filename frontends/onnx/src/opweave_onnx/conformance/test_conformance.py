"""``pytest --pyargs opweave_onnx.conformance``: ONNX's own tests of backends, on the devices that
``OPWEAVE_ONNX_DEVICES`` names, by default ``cpu,host``. What is refused is skipped, with the reason."""

from __future__ import annotations

import pytest

from opweave_onnx.conformance.backend import devices
from opweave_onnx.conformance.scoreboard import KINDS, Case, cases, run_case

CASES = [case for kind in KINDS for case in cases(kind)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}-{case.name}" for case in CASES])
def test_onnx(case: Case) -> None:
    """One test of ONNX."""
    result = run_case(case, devices())
    if result.state == "refused":
        pytest.skip(result.why)
    assert result.state == "passed", result.why
