"""Ctrl-C at any moment of a run leaves torch, and whatever runs beside it, as it was."""

from __future__ import annotations

import pytest
import torch

from tests.support.interrupts import needs_timer, storm

pytestmark = [
    needs_timer,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize("use", ["run", "submit"])
@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
def test_no_number_of_interrupts_leaves_a_scheduler_waiting_or_torch_in_another_mode(parallel, use):
    storm(["torch:cpu", "cpu"], use, 1000, parallel=parallel)
    assert not torch.is_inference_mode_enabled()
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad
