"""Ctrl-C at any moment of a run leaves everything usable."""

from __future__ import annotations

import pytest

from tests.support.interrupts import needs_timer, storm

pytestmark = [
    needs_timer,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize("use", ["run", "submit"])
@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
def test_no_number_of_interrupts_leaves_a_scheduler_waiting(parallel, use):
    storm(["opencl:0", "cpu"], use, 500, parallel=parallel)
