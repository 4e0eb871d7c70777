"""Weights in host memory that are brought to an OpenCL device for each run."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Offloading
from opweave.runtime.offload import Rates
from opweave_opencl import OpenCLDevice

ROWS = np.random.default_rng(0).integers(-2, 3, (64, 128)).astype(np.float32)


@pytest.fixture
def swift(device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch) -> OpenCLDevice:
    """The device, measured as one that gains from 10 rows on."""
    offloading = Offloading(device)
    for dtype in ("f32", "q8_0"):
        offloading._rates[ow.as_dtype(dtype)] = Rates(0.0, 10e9, 50e9, 50e9)
    monkeypatch.setattr(device, "_offloading", offloading)
    return device


def layers(rows: int) -> tuple[ow.Tensor, np.ndarray]:
    arrays = {f"w{i}": np.random.default_rng(i).integers(-1, 2, (128, 128)).astype(np.float32) for i in range(3)}
    weights = ow.weights(arrays, device="host")
    y, want = ow.input("x", (rows, 128)), ROWS[:rows].astype(np.float64)
    for name, array in arrays.items():
        y, want = ow.relu(ow.linear(y, weights[name])), np.maximum(want @ array.T, 0)
    return y, want


@pytest.mark.parametrize("other", ["cpu", "host"])
@pytest.mark.parametrize("parallel", [False, True])
def test_products_of_many_rows_are_computed_there(swift, other, parallel):
    if other == "cpu":
        pytest.importorskip("opweave_cpu")
    y, want = layers(64)
    with ow.Scheduler([swift, other], parallel=parallel) as scheduler:
        program = scheduler.build(y)
        assert sum(line.endswith("[offload]") for line in program.explain().text.splitlines()) == 3
        assert program.device_of(y) is swift
        for _ in range(3):
            np.testing.assert_array_equal(program.run(x=ROWS), want)


def test_products_of_few_rows_stay_with_the_weights(swift):
    pytest.importorskip("opweave_cpu")
    y, want = layers(2)
    with ow.Scheduler([swift, "cpu"]) as scheduler:
        program = scheduler.build(y)
        assert "[offload]" not in program.explain()
        np.testing.assert_array_equal(program.run(x=ROWS[:2]), want)


def test_it_can_be_refused(swift):
    y, want = layers(64)
    with ow.Scheduler([swift, "host"], op_offload=False) as scheduler:
        program = scheduler.build(y)
        assert "[offload]" not in program.explain()
        np.testing.assert_array_equal(program.run(x=ROWS), want)


def test_quantized_weights_are_brought_as_they_are(swift):
    pytest.importorskip("opweave_cpu")
    blocks = ow.as_dtype("q8_0")
    raw = np.random.default_rng(0).integers(0, 100, (128, 128 // blocks.block * blocks.itemsize), np.uint8)
    raw.reshape(-1, blocks.itemsize)[:, :2] = np.array([0.5], np.float16).view(np.uint8)
    w = ow.weights({"w": ow.Blocks(raw, (128, 128), blocks)}, device="host")["w"]
    y = ow.linear(ow.input("x", (64, 128)), w)
    with ow.Scheduler([swift, "cpu"]) as scheduler:
        program = scheduler.build(y)
        assert "[offload]" in program.explain()
        before = scheduler.stats.copied
        got = program.run(x=ROWS)
        assert scheduler.stats.copied - before < raw.nbytes + 3 * ROWS.nbytes
    with ow.Scheduler("host") as scheduler:
        np.testing.assert_allclose(got, scheduler.build(y).run(x=ROWS), rtol=1e-5, atol=1e-3)


def test_the_device_is_measured_when_it_is_asked(device):
    assert device.caps.offload
    rates = device._offloading.rates(ow.as_dtype("f32"))
    assert rates is not None
    assert all(rate > 0 for rate in rates)
