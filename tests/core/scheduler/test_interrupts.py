"""Ctrl-C at any moment of a run leaves everything usable, in every way of running."""

from __future__ import annotations

import pytest

from tests.support.interrupts import USES, needs_timer, storm

pytestmark = [
    needs_timer,
    # An interrupt that arrives in a callback of a weak reference, or in a finaliser, gets no further.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "host"]], ids="+".join)
def test_no_number_of_interrupts_leaves_a_scheduler_waiting(devices, parallel, use):
    storm(devices, use, 500, parallel=parallel)
