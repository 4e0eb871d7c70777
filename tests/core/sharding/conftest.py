"""Devices of the tests of weights in shards."""

from __future__ import annotations

import pytest

import opweave as ow


@pytest.fixture(scope="module")
def cpus():
    """CPU devices with separate memories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWEAVE_CPU_DEVICES", "4")
        registry = ow.Registry()
        return [registry.device(f"cpu:{i}") for i in range(4)]
