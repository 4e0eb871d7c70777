"""Products of some rows in f32, whose lanes are the rows: compared with NumPy in f64, at each border of loops."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave_cpu import CpuDevice
from opweave_cpu.threads import THREADS
from opweave_cpu.tunables import COMPILED_ROWS, COMPILED_WORK, VECTOR_ROWS

pytest.importorskip("llvmlite")

pytestmark = pytest.mark.usefixtures("compiling")


def check(rows, inputs, outputs, biased):
    rng = np.random.default_rng(rows * inputs)
    a, v, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, inputs), (outputs, inputs), outputs))
    device, x, weights = CpuDevice(), ow.input("lanes", a.shape), ow.weights({"w": v, "b": b})
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(ow.linear(x, weights["w"], *[weights["b"]] * biased))
        for values in (np.full_like(a, np.nan), a):  # what the first run leaves behind is not read by the second
            got = program.run({x: values})
    assert ("row product" in {key[0] for *_, key in device.artefacts}) == (
        VECTOR_ROWS.value <= rows <= COMPILED_ROWS.value
    )
    want = a.astype(np.float64) @ v.astype(np.float64).T + (b if biased else 0)
    limit = 2e-7 * (np.abs(a) @ np.abs(v.T)) + 1e-6
    assert (np.abs(got - want) <= limit).all()


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", [1, 18, 20, 21, 24])
@pytest.mark.parametrize(("rows", "inputs"), [(7, 40), (8, 5), (9, 16), (13, 50), (16, 1024), (12, 275), (17, 48)])
def test_products(rows, inputs, outputs, biased):
    check(rows, inputs, outputs, biased)


@pytest.mark.parametrize("rows", [17, 31, 32, 33, 48])
def test_several_vectors_of_rows(rows, monkeypatch):
    monkeypatch.setattr(COMPILED_ROWS, "value", 48)
    check(rows, 70, 24, True)


def test_threads_take_parts_of_the_weights(monkeypatch):
    monkeypatch.setattr(THREADS, "cores", 3)
    monkeypatch.setattr(COMPILED_WORK, "value", 1 << 8)
    check(16, 96, 40, True)


def test_errors_do_not_grow_with_the_length_of_sums():
    rng = np.random.default_rng(0)
    a, v = rng.random((16, 8192), np.float32), rng.random((8, 8192), np.float32)
    x, w = ow.input("long lanes", a.shape), ow.weights({"w": v})["w"]
    with ow.Scheduler([CpuDevice()]) as scheduler:
        got = scheduler.build(ow.linear(x, w)).run({x: a})
    np.testing.assert_allclose(got, a.astype(np.float64) @ v.astype(np.float64).T, rtol=1e-6)
