"""Devices of the tests of combinations."""

from __future__ import annotations

import pytest

from opweave_combined.device import CombinedDevice
from tests.support.devices import Member


@pytest.fixture
def pair():
    return Member("left"), Member("right")


@pytest.fixture
def both(pair):
    return CombinedDevice(pair)
