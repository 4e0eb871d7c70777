"""Conformance of collectives: a sound backend passes, and each planted fault is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave_conformance.suite import Suite
from tests.support.collective_backend import ExchangingBackend


def results(backend: ExchangingBackend) -> dict[str, Any]:
    registry = ow.Registry(environ={}, search=[])
    registry.register(backend)
    suite = Suite("x", only=["collective-*"], using=registry)
    return {item.check.id: suite.perform(item) for item in suite.items}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("order", ["shards", "any"])
def test_a_sound_backend_passes(order, together):
    found = results(ExchangingBackend(3, order, together))
    assert {name: r.status for name, r in found.items()} == dict.fromkeys(
        ("collective-all-reduce", "collective-all-gather", "collective-reduce-scatter"), "passed"
    )


def test_without_collectives_or_a_second_device_nothing_is_checked():
    assert {r.status for r in results(ExchangingBackend(1)).values()} == {"skipped"}
    assert {r.status for r in results(ExchangingBackend(2, None)).values()} == {"skipped"}


def another_order(kind: str, outs: list[Any], parts: list[Any]) -> None:
    """Adds from the last part to the first."""
    if kind == "all_reduce":
        total = parts[-1].astype(np.float32) if parts[0].dtype.itemsize < 4 else parts[-1].copy()
        for part in parts[-2::-1]:
            total = total + part.astype(total.dtype)
        for out in outs:
            out[...] = total.astype(out.dtype)


def a_member_left_out(kind: str, outs: list[Any], parts: list[Any]) -> None:
    outs[-1].view(np.uint8)[...] = 0xA5


def another_dtype(kind: str, outs: list[Any], parts: list[Any]) -> None:
    """Adds the bits of half types as integers."""
    if kind == "all_reduce" and parts[0].dtype.itemsize == 2:
        for out in outs:
            out.view(np.int16)[...] = np.add.reduce([part.view(np.int16) for part in parts])


def a_changed_part(kind: str, outs: list[Any], parts: list[Any]) -> None:
    parts[0][...] = outs[0].reshape(-1)[: parts[0].size]


def other_bits(kind: str, outs: list[Any], parts: list[Any]) -> None:
    outs[-1].view(np.uint8).reshape(-1)[-1] ^= 1


def a_forgotten_part(kind: str, outs: list[Any], parts: list[Any]) -> None:
    if kind == "all_reduce":
        for out in outs:
            out[...] = parts[0]


FAULTS: list[tuple[Callable[..., None], str, str]] = [
    (another_order, "shards", "added in the order of the devices"),
    (a_member_left_out, "any", "the result of device"),
    (another_dtype, "any", "rounding of a sum"),
    (a_changed_part, "any", "a part"),
    (other_bits, "any", "the result of device"),
    (a_forgotten_part, "any", "rounding of a sum"),
]


@pytest.mark.parametrize(("fault", "order", "reason"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
def test_a_planted_fault_is_found(fault, order, reason):
    found = results(ExchangingBackend(3, order, fault=fault))["collective-all-reduce"]
    assert found.status == "failed"
    assert reason in found.reason
