"""Remarks of `explain`: quantized products on a processor, where a faster device is here."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract.kernels import KernelTable
from opweave_cost.cost_model import ANY, Curve, OpCost, Profile
from tests.support.devices import Separate, reference_kernel

F = np.float32
X = ow.input("x", (1, 32))
PLAIN = ow.constant(np.ones((8, 32), F))
QUANTIZED = ow.weights({name: ow.quantize(np.ones((8, 32), F), "q8_0") for name in ("a", "b")})


class Card(Separate):
    """A GPU that multiplies by quantized weights."""

    def __init__(self, name: str = "card") -> None:
        super().__init__(name)
        self.kernels = KernelTable("f32", "strided")
        self.kernels("linear", dtypes="f32 q8_0")(reference_kernel)


@pytest.fixture
def here(monkeypatch):
    """The devices of this machine, and the profiles that were measured."""
    profiles: dict[str, Profile] = {}
    found: list[ow.Device] = [ow.device("cpu"), Card(), Card("second"), ow.device("host")]
    monkeypatch.setattr("opweave.registry.devices", lambda: found)
    monkeypatch.setattr("opweave_cost.store.known_profile", lambda device: profiles.get(device.name))
    return profiles


def products() -> ow.Tensor:
    return ow.linear(X, QUANTIZED["a"]) + ow.linear(X, QUANTIZED["b"])


def explained(outputs: ow.Tensor, *devices: ow.Device | str):
    with ow.Scheduler(devices) as scheduler:
        return scheduler.build(outputs).explain()


def profile(name: str, flops: float) -> Profile:
    line = Curve.line(1e-6, 1e9)
    return Profile(name, 1e-6, line, line, {ANY: {ANY: OpCost(line, Curve.line(1e-6, flops))}})


def test_a_faster_device_is_named_once(here):
    found = explained(products(), "cpu")
    (remark,) = found.remarks
    assert "cpu computes 2 products of quantized weights (q8_0); card is here" in remark
    assert str(found).count(remark) == 1
    assert "remarks:" in found
    assert found.html().count("products of quantized weights") == 1


@pytest.mark.parametrize("factor", [0.5, 1.2, 2.0])
def test_measured_profiles_decide_where_there_are_some(here, factor):
    here.update({name: profile(name, 1e9 * (factor if name != "cpu" else 1)) for name in ("cpu", "card", "second")})
    assert bool(explained(products(), "cpu").remarks) == (factor > 1.5)


def test_nothing_is_remarked_where_nothing_is_better(here, monkeypatch):
    assert not explained(ow.linear(X, PLAIN), "cpu").remarks
    assert "remarks" not in explained(ow.linear(X, PLAIN), "cpu")
    assert not explained(products(), Card("first"), "cpu").remarks
    monkeypatch.setattr("opweave.registry.devices", lambda: [ow.device("cpu"), Separate("f32 only"), ow.device("host")])
    assert not explained(products(), "cpu").remarks


def test_other_plugins_are_not_loaded_without_quantized_products(monkeypatch):
    monkeypatch.setattr("opweave.registry.devices", lambda: pytest.fail("asked for all devices"))
    assert not explained(ow.linear(X, PLAIN), "cpu").remarks
