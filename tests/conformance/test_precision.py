"""Conformance judges a kernel by the limits of the precision that it is declared for."""

from __future__ import annotations

import pytest

from opweave_conformance.case import Case
from opweave_conformance.cases import cases_for
from opweave_conformance.check import run_case
from opweave_conformance.result import Result
from tests.support.rounding import Rounding


def results(device: Rounding, dtype: str) -> list[tuple[Case, Result]]:
    """Of every case of linear with weights of a dtype that the device runs."""
    cases = [case for case in cases_for("linear") if dtype in [operand.dtype for operand in case.operands[1:2]]]
    found = [(case, run_case(device, case)) for case in cases]
    ran = [(case, result) for case, result in found if result.status != "refused"]
    assert len(ran) > 5
    return ran


def reasons(device: Rounding, dtype: str) -> list[str]:
    return [f"{case}: {result.reason}" for case, result in results(device, dtype) if not result]


def test_kernels_within_the_limits_of_their_precision_conform():
    device = Rounding()
    assert reasons(device, "f32") == []
    assert {types for precision, types in device.calls if precision == "bf16"} >= {("f32", "f32"), ("f32", "bf16")}
    assert reasons(device, "q8_0") == []
    assert {precision for precision, _ in device.calls} == {"bf16", "int8", "exact"}


def test_a_kernel_that_rounds_to_bf16_and_says_it_is_exact_fails():
    assert reasons(Rounding(declared="exact"), "f32") == [], "the exact one, registered first, runs"
    found = reasons(Rounding(exact=False, declared="exact"), "f32")
    assert found
    assert not any("in bf16" in reason for reason in found)
    assert any("normalised mean square error" in reason or "largest error" in reason for reason in found)


def test_a_kernel_that_quantizes_badly_fails_in_int8_only():
    found = reasons(Rounding(levels=20), "q8_0")
    assert found
    assert all(": in int8: " in reason for reason in found)
    assert reasons(Rounding(levels=20), "f32") == []


@pytest.mark.parametrize("levels", [127, 20])
def test_a_device_with_an_int8_kernel_alone_is_judged(levels):
    found = reasons(Rounding(exact=False, levels=levels), "q8_0")
    assert bool(found) == (levels == 20)


def test_nan_and_infinities_are_unspecified_less_than_exactly():
    device = Rounding(exact=False)
    for case in cases_for("linear"):
        if {"q8_0", "special"} <= {*[o.dtype for o in case.operands], *[o.values for o in case.operands]}:
            assert run_case(device, case).status == "refused"
