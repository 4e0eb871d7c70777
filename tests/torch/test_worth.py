"""Which steps leave another device of the process for torch, and for which weights are brought to an accelerator."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Offloading, Step, flops
from opweave.runtime.offload import Rates
from opweave.scheduler.place.support import unbound_step
from opweave_torch.device import SWITCH_FLOPS, TorchCpuDevice, is_worth_a_switch


def step(tensor: ow.Tensor) -> Step:
    assert tensor.signature is not None
    return unbound_step(tensor.signature, TorchCpuDevice())


def test_large_products_attention_and_convolutions_are_worth_a_switch():
    q = ow.input("q", (1, 4, 64, 64))
    image, kernel = ow.input("i", (1, 8, 64, 64)), ow.input("k", (8, 8, 3, 3))
    big, small = ow.input("b", (128, 128)), ow.input("s", (8, 8))
    for node in (ow.attention(q, q, q), ow.conv2d(image, kernel), ow.linear(big, big), big @ big):
        assert flops(step(node)) >= SWITCH_FLOPS
        assert is_worth_a_switch(step(node))
    for node in (small @ small, ow.linear(small, small), ow.exp(ow.input("e", (4096, 4096)))):
        assert not is_worth_a_switch(step(node))


@pytest.mark.parametrize(("rows", "worth"), [(1, False), (7, False), (8, True), (64, True)])
def test_products_of_enough_rows_are_worth_an_upload(separate, monkeypatch, rows, worth):
    """By measured rates, here planted: the weights are brought in the time of 8 rows."""
    offloading = Offloading(separate)
    offloading._rates[ow.as_dtype("f32")] = Rates(0.0, 1e9, 4e9, 4e9)
    monkeypatch.setattr(separate, "_offloading", offloading)
    values = np.ones((rows, 64), np.float32)
    weights = ow.weights({"w": np.ones((64, 64), np.float32)}, device="host")
    with ow.Scheduler([separate, "host"]) as scheduler:
        program = scheduler.build(ow.linear(ow.input("x", (rows, 64)), weights["w"]))
        assert ("[offload]" in program.explain()) is worth
        np.testing.assert_array_equal(program.run(x=values), np.full((rows, 64), 64))


def test_an_accelerator_is_measured_when_it_is_asked(separate):
    rates = separate._offloading.rates(ow.as_dtype("f32"))
    assert rates is not None
    assert all(rate > 0 for rate in rates)


def test_a_large_product_moves_up_from_cpu_by_rule(device):
    cpu = pytest.importorskip("opweave_cpu").CpuDevice()
    weights = ow.weights({"w": np.ones((256, 256), np.float32)}, device=cpu)
    x, few = ow.input("x", (256, 256)), ow.input("few", (1, 256))
    large = ow.linear(ow.relu(x), weights["w"])
    small = ow.linear(few, weights["w"])
    with ow.Scheduler([device, cpu]) as scheduler:
        program = scheduler.build([large, small])
        assert program.device_of(large) is device
        assert program.device_of(small) is cpu
        assert "[upgrade]" in program.explain()
        assert program.n_copies == 0
        got = program.run(x=np.ones((256, 256), np.float32), few=np.ones((1, 256), np.float32))
    np.testing.assert_array_equal(got[0], np.full((256, 256), 256))
    np.testing.assert_array_equal(got[1], np.full((1, 256), 256))
