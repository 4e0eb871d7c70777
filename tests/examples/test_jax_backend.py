"""The JAX example: a backend through the functional contract, against JAX itself and by conformance."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.registry import Registry
from opweave_conformance.suite import Suite

jax = pytest.importorskip("jax", reason="JAX is not installed")

FOLDER = Path(__file__).parents[2] / "examples" / "backends" / "jax" / "src"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    import opweave_jax

    yield opweave_jax
    sys.path.remove(str(FOLDER))


@pytest.fixture
def device(example: Any) -> Any:
    return example.JaxDevice(jax.devices()[0])


def test_it_is_short():
    assert len((FOLDER / "opweave_jax" / "__init__.py").read_text().splitlines()) < 200


def test_a_model_is_one_function_that_computes_what_jax_computes(example: Any, device: Any):
    rng = np.random.default_rng(0)
    w, b, x = (rng.standard_normal(shape).astype("f4") for shape in ((16, 8), (16,), (5, 8)))
    weights = ow.weights({"w": w, "b": b})
    fed = ow.input("x", (5, 8))
    h = ow.silu(ow.linear(fed, weights["w"], weights["b"]))
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build((ow.softmax(h), h.T[2:9:3]))
        assert [len(plan) for plan in program.run_lists[0].plans] == [1]
        got = program.run(x=x)
        kept = program.run(x=jax.numpy.asarray(x), on_device=True)
        program.run(x=np.zeros_like(x))
    h_ = jax.nn.silu(x @ w.T + b)
    for array, want in zip(got, (jax.nn.softmax(h_), h_.T[2:9:3]), strict=True):
        np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-6)
    assert all(isinstance(array, jax.Array) for array in kept)
    for array, want in zip(kept, got, strict=True):
        np.testing.assert_array_equal(array, want)


def test_other_leaves_and_slots_compile_nothing(device: Any, monkeypatch: pytest.MonkeyPatch):
    jitted: list[Any] = []
    right = jax.jit

    def noted(function: Any, **options: Any) -> Any:
        jitted.append(function)
        return right(function, **options)

    monkeypatch.setattr(jax, "jit", noted)
    x = ow.input("x", (3, 3))
    for _ in range(2):
        weight = ow.weights({"w": np.random.default_rng().standard_normal((3, 3)).astype("f4")})["w"]
        with ow.Scheduler(device, parallel=3) as scheduler:
            program = scheduler.build(ow.relu(x) + weight)
            for future in [program.submit(x=np.ones((3, 3), "f4")) for _ in range(4)]:
                future.result()
    assert len(jitted) == 1


def test_a_state_is_a_new_version_after_each_run_and_earlier_ones_stay(device: Any):
    total, x = ow.state("total", (4,)), ow.input("x", (4,))
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(ow.assign(total, total + x))
        versions = [program.run(x=np.ones(4, "f4"), on_device=True) for _ in range(3)]
        assert [v.tolist() for v in versions] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
        assert program.read("total").tolist() == [3.0] * 4


CHECKS = [
    "hygiene-*", "memory-*", "async-*", "compiler-*", "fault-*", "split-host-state-*", "split-separate-views",
    "overlap-separate-layers", "observe-host-norms", "add-f32-*", "softmax-f32-*", "sum-bf16-*", "linear-f16-*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", CHECKS)
def test_conformance(pattern: str, example: Any):
    registry = Registry(environ={}, search=[])
    registry.register(example.JaxBackend)
    found = Suite("jax", using=registry, only=[pattern])
    items = found.items[:: max(1, len(found.items) // 8)]
    assert items
    outcomes = [found.perform(item) for item in items]
    assert [(o.id, o.reason) for o in outcomes if o.status == "failed"] == []
    assert any(o.status == "passed" for o in outcomes)
