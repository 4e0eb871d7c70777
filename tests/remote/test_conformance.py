"""What the conformance suite tests beside kernels, on a device behind the protocol: order, events, copies, faults."""

from __future__ import annotations

import pytest

import opweave_remote
from opweave.contract import Backend
from tests.support.levels import failed

CONNECTIONS: list[opweave_remote.Connection] = []


class Remote(Backend):
    """The device of one process."""

    def devices(self):
        return CONNECTIONS[0].devices


@pytest.fixture
def process():
    device = opweave_remote.isolated("cpu")
    CONNECTIONS.append(device.connection)
    yield
    CONNECTIONS.pop().close()


def test_the_suite_passes_in_another_process(process):
    assert failed(Remote, beside="separate") == []
