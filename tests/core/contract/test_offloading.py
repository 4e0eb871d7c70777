"""Which steps are worth bringing weights from the host for, by rates that are planted or measured."""

from __future__ import annotations

import pytest

import opweave as ow
from opweave.contract import Offloading, Step, flops
from opweave.graph.dtypes import as_dtype
from opweave.runtime.host.device import HostDevice
from opweave.runtime.offload import Rates
from opweave.scheduler.place.support import unbound_step
from opweave_conformance import CASES
from opweave_conformance.trial import the_node
from tests.support.devices import Separate

F32 = as_dtype("f32")


def step(tensor: ow.Tensor) -> Step:
    assert tensor.signature is not None
    return unbound_step(tensor.signature, HostDevice())


def planted(latency: float, upload: float, device: float, host: float) -> Offloading:
    """Of a device that is never measured."""
    offloading = Offloading(HostDevice())
    offloading._rates[F32] = Rates(latency, upload, device, host)
    return offloading


def product(rows: int, side: int = 256) -> Step:
    return step(ow.linear(ow.input("x", (rows, side)), ow.input("w", (side, side))))


def test_operations_are_counted_by_their_definitions():
    x, w = ow.input("x", (8, 32)), ow.input("w", (16, 32))
    assert flops(step(ow.linear(x, w))) == 2 * 8 * 32 * 16
    assert flops(step(ow.matmul(x, w.T))) == 2 * 8 * 32 * 16
    state = ow.state("s", (8, 32))
    assert flops(step(ow.assign(state, x))) == state.op.flops(state) if state.op else True


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_steps_of_every_operation_are_counted_as_its_nodes_are(op):
    """The functions of definitions read what they like of a node: its dtype, the number of its axes."""
    for case in [case for case in CASES if case.op == op][::20]:
        node = the_node(case.build(*case.tensors()))
        assert node.op is not None
        assert flops(step(node)) == node.op.flops(node), case.id


@pytest.mark.parametrize(("rows", "pays"), [(1, False), (15, False), (16, True), (1000, True)])
def test_weights_are_brought_where_that_takes_no_longer_than_the_product(rows, pays):
    # 262,144 bytes take as long as 16 rows of 131,072 operations; the host is as fast as the device.
    assert planted(0, 2.0**18, 2.0**21, 2.0**21).pays(product(rows)) is pays


@pytest.mark.parametrize(("rows", "pays"), [(1, False), (16, False), (17, True)])
def test_weights_are_brought_where_the_host_would_take_longer_than_both(rows, pays):
    assert planted(0, 2.0**18, 2.0**40, 2.0**21).pays(product(rows)) is pays


def test_small_products_are_not_worth_the_start_of_a_transfer():
    assert planted(1e-5, 1e12, 1e11, 1e11).pays(product(64))
    assert not planted(1e-5, 1e12, 1e11, 1e11).pays(product(64, 16))


def test_of_experts_those_in_use_count():
    x, w = ow.input("x", (2, 1, 64)), ow.input("w", (1024, 64, 64))
    few = step(ow.expert_linear(x, w, ow.input("ids", (2, 1), "i32")))
    # Two experts of 16,384 bytes for 16,384 operations.
    assert planted(0, 2.0**15, 2.0**14, 2.0**14).pays(few)
    assert not planted(0, 2.0**14, 2.0**14, 2.0**14).pays(few)


def test_the_larger_operand_of_a_product_counts():
    x, w = ow.input("x", (2048, 8)), ow.input("w", (8, 8))
    assert planted(0, 2048 * 32, 2 * 2048 * 64, 1.0).pays(step(ow.matmul(x, w)))
    assert not planted(0, 2048 * 32 - 100, 2 * 2048 * 64, 1e9).pays(step(ow.matmul(x, w)))


def test_only_products_are_worth_it():
    offloading = planted(0, 1e20, 1.0, 1e-20)
    big, ids = ow.input("big", (512, 512)), ow.input("ids", (4096,), "i32")
    assert offloading.pays(step(ow.linear(big, big)))
    assert offloading.pays(step(ow.conv2d(ow.input("i", (1, 8, 64, 64)), ow.input("k", (8, 8, 3, 3)))))
    for node in (ow.exp(big), big + big, ow.embedding(big, ids), ow.layer_norm(big, ow.input("g", (512,)))):
        assert not offloading.pays(step(node))


def test_rates_are_measured_once_for_each_type():
    device = Separate("gpu")
    offloading = Offloading(device)
    rates = offloading.rates(F32)
    assert rates is not None
    assert all(rate > 0 for rate in rates)
    assert offloading.rates(F32) is rates
    held = sum(not buffer.freed for buffer in device.live_buffers)
    assert held == 0
    # So many rows that the transfer is negligible.
    assert offloading.pays(product(1 << 24))


def test_a_device_without_products_of_a_type_is_never_worth_it():
    device = Separate("gpu", ["add"])
    offloading = Offloading(device)
    assert offloading.rates(F32) is None
    assert not offloading.pays(product(1 << 24))
