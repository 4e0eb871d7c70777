"""Every operation against its definition, over a third of the types and layouts that the device accepts;
``opweave conformance ort`` runs all cases."""

from __future__ import annotations

import pytest

from opweave_conformance import CASES, Case
from opweave_ort.device import OrtDevice
from tests.support.kernels import assert_right_where_accepted, by_operation


@pytest.mark.parametrize("cases", by_operation(CASES))
def test_kernels_of(device: OrtDevice, cases: list[Case]) -> None:
    assert_right_where_accepted(device, cases[::3])
