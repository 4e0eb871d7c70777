"""Cases of the conformance suite on one device: all cases of an operation in one test, every failing case named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from opweave.contract import Device
from opweave_conformance import Case, Result, run_case

__all__ = ["assert_right", "assert_right_where_accepted", "by_operation"]


def by_operation(cases: Iterable[Case]) -> list[Any]:
    """One parameter set for each operation: the list of its cases, named after it."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.op, []).append(case)
    return [pytest.param(group, id=op) for op, group in groups.items()]


def assert_right(device: Device, cases: Iterable[Case]) -> list[Result]:
    """Run the cases: each one has to be right or refused by the typed error. Returns what became of each."""
    results = [run_case(device, case) for case in cases]
    assert results, "no case was run"
    wrong = [f"{v.id}: {v.reason}" for v in results if not v]
    if wrong:
        pytest.fail(
            f"{len(wrong)} of {len(results)} cases are wrong on {device.name}:\n" + "\n".join(wrong), pytrace=False
        )
    return results


def assert_right_where_accepted(device: Device, cases: Iterable[Case]) -> None:
    """`assert_right`; where the device refuses all cases the test is skipped."""
    results = assert_right(device, cases)
    if all(v.status == "refused" for v in results):
        pytest.skip(f"{device.name} refuses all cases, the first one: {results[0].reason}")
