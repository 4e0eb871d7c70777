"""Products that are computed less than exactly cost what was measured of them in that precision."""

from __future__ import annotations

from itertools import cycle

import pytest

import opweave as ow
from opweave.graph.opdef import OPS
from opweave_cost import measure as measuring
from opweave_cost.cost_model import Curve, OpCost, Profile
from tests.support.rounding import Rounding


def test_a_profile_has_every_precision_that_the_device_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "OPS", {name: OPS[name] for name in ("add", "linear")})
    monkeypatch.setattr(measuring, "PASSES", 1)
    monkeypatch.setattr(measuring, "RUNS", (1, 1))
    device = Rounding()
    profile = measuring.measure(device)
    assert {"f32", "f32 in bf16", "q8_0", "q8_0 in int8"} <= profile.costs["linear"].keys()
    assert not {"q8_0 in bf16", "f32 in int8", "f64 in bf16"} & profile.costs["linear"].keys()
    assert ("bf16", ("f32", "bf16")) in device.calls, "weights come rounded, as in programs"
    assert Profile.from_json(profile.to_json()) == profile


def test_steps_are_told_from_the_start_of_a_run_that_takes_long_and_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device of another process: what starting a run varies by is 30 times what its smallest step takes."""
    start, rate, varying = 3e-4, 2e10, cycle((1.0, 0.96, 1.02, 0.97, 1.01, 0.99))

    def seconds(stream: object, bound: measuring.Bound, count: int = 1) -> float:
        return start * next(varying) + count * sum(buffer.size for buffer in bound.buffers) / rate

    monkeypatch.setattr(measuring, "OPS", {"add": OPS["add"]})
    monkeypatch.setattr(measuring, "seconds_of_step", seconds)
    profile = measuring.measure(Rounding())
    assert profile.again == pytest.approx(start, rel=0.1)
    points = profile.costs["add"]["f32"].by_bytes.points
    assert len(points) == 3
    assert [taken for _, taken in points] == pytest.approx([size / rate for size, _ in points], rel=0.1)


def test_a_device_is_chosen_for_what_it_takes_in_the_precision_that_is_allowed() -> None:
    def costs(**linear: float) -> Profile:
        by_dtype = {dtype.replace("_", " "): OpCost(Curve.line(each, 1e12)) for dtype, each in linear.items()}
        known = {"add": {"f32": OpCost(Curve.line(1e-6, 1e12))}, "linear": by_dtype}
        return Profile("", 0.0, Curve.line(0, 1e12), Curve.line(0, 1e12), known)

    first, second = Rounding("first"), Rounding("second")
    first.declared = lambda: costs(f32=1e-3)  # type: ignore[attr-defined]
    second.declared = lambda: costs(f32=2e-3, f32_in_bf16=1e-4)  # type: ignore[attr-defined]
    y = ow.linear(ow.input("x", (8, 8)), ow.input("w", (8, 8)))
    with ow.Scheduler([first, second], placement="cost") as scheduler:
        exact, rough = scheduler.partition(y), scheduler.partition(y, precision="bf16")
    assert (exact.device_of(y), rough.device_of(y)) == (first, second)
    assert rough.explain().nodes[0].seconds == pytest.approx(1e-4, rel=0.1)
