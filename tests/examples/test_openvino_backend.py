"""The OpenVINO example: a backend whose graphs are built node by node, against NumPy and by conformance."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.registry import Registry
from opweave_conformance.expectations import Expectations
from opweave_conformance.suite import Suite

pytest.importorskip("openvino", reason="OpenVINO is not installed")

FOLDER = Path(__file__).parents[2] / "examples" / "backends" / "openvino"


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    sys.path.insert(0, str(FOLDER / "src"))
    from opweave_openvino import OpenVINOBackend

    made = Registry(environ={}, search=[])
    made.register(OpenVINOBackend)
    yield made
    sys.path.remove(str(FOLDER / "src"))


def test_a_model_is_compiled_once_and_computes_what_numpy_computes(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    device = registry.device("openvino:CPU")
    rng = np.random.default_rng(0)
    w, b, x = (rng.standard_normal(shape).astype("f4") for shape in ((16, 8), (16,), (5, 8)))
    compiled: list[Any] = []
    right = type(device).stream_class._compile_functional

    def noted(*arguments: Any) -> Any:
        compiled.append(arguments[1])
        return right(*arguments)

    monkeypatch.setattr(type(device).stream_class, "_compile_functional", noted)
    for factor in (1, 2):  # other weights, the same structure
        weights = ow.weights({"w": w * factor, "b": b})
        h = ow.relu(ow.linear(ow.input("x", (5, 8)), weights["w"], weights["b"]))
        with ow.Scheduler([device, registry.device("host")]) as scheduler:
            program = scheduler.build((ow.softmax(h), h.T[2:9:3], ow.exp(h)))
            assert [split.target.name for split in program.splits] == ["openvino:CPU", "host"]
            got = program.run(x=x)
        want = np.maximum(x @ (w * factor).T + b, 0)
        powers = np.exp(want - want.max(-1, keepdims=True))
        for array, truth in zip(
            got, (powers / powers.sum(-1, keepdims=True), want.T[2:9:3], np.exp(want)), strict=True
        ):
            np.testing.assert_allclose(array, truth, rtol=1e-5, atol=1e-6)
    assert len(compiled) == 1


CHECKS = [
    "hygiene-*", "memory-*", "async-*", "compiler-*", "fault-*", "split-host-state-*", "split-separate-views",
    "add-f32-*", "softmax-f32-*", "layer_norm-f32-*", "linear-f32-*", "concat-i32-*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", CHECKS)
def test_conformance(pattern: str, registry: Registry):
    known = Expectations.read(FOLDER / "conformance.toml")
    found = Suite("openvino", using=registry, only=[pattern], expectations=known)
    outcomes = [found.perform(item) for item in found.items[:: max(1, len(found.items) // 6)]]
    assert [(o.id, o.reason) for o in outcomes if o.status == "failed"] == []
    assert any(o.status == "passed" for o in outcomes)
