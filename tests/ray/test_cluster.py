"""Devices of the nodes of a Ray cluster, which is started here with two nodes and Ray's token authentication."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.errors import DeviceLostError, ExecutionError, Unavailable
from opweave_remote.link import Fate

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # of jax, where another test has imported it
]

F32 = np.float32


@pytest.fixture(scope="module")
def local():
    """A cluster of two nodes; nobody without its token can reach it."""
    before = dict(os.environ)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789abcdef" * 2)
    import ray  # reads them once
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def cluster(local):
    import opweave_ray

    with opweave_ray.connect(devices=["cpu"], deadline=20) as made:
        yield made


def graph(scale: float) -> tuple[ow.Tensor, Any]:
    rng = np.random.default_rng(0)
    x = ow.input("to_ray", (8, 32))
    first, second = (rng.standard_normal((32, 32)).astype(F32) for _ in range(2))
    middle = ow.tanh(ow.linear(x, ow.constant(first))) * scale
    return middle, ow.linear(middle, ow.constant(second))


def run_for(seconds: float, scheduler: ow.Scheduler, y: ow.Tensor, values: Any) -> None:
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        scheduler.build(y).run(to_ray=values)


def test_a_graph_is_split_over_the_nodes(cluster):
    assert len(cluster.connections) == 2
    assert not cluster.problems
    one, two = cluster.devices
    assert {one, two} <= set(ow.devices())
    assert one.connection.info.heartbeat
    assert not one.connection.plain
    middle, y = graph(1.0)
    values = np.random.default_rng(1).standard_normal((8, 32)).astype(F32)
    with ow.Scheduler("cpu") as here:
        want = here.build(y).run(to_ray=values)
    with ow.Scheduler([one, two, "host"]) as scheduler:
        program = scheduler.build(y, pins={middle: one, y: two})
        assert {s.target.device for s in program.splits} >= {one, two}
        np.testing.assert_array_equal(program.run(to_ray=values), want)


def test_devices_that_no_node_has_are_refused_with_each_nodes_reason(local):
    import opweave_ray

    with pytest.raises(Unavailable, match=r"no node of the Ray cluster has devices[\s\S]*nope"):
        opweave_ray.connect(devices=["nope"])


def test_a_lost_node_is_left_out_and_a_new_one_taken(local, cluster):
    """Long before the heartbeat would tell, which needs 20 seconds here."""
    import ray

    node, made = next((n, c) for n, c in cluster.connections.items() if n != ray.get_runtime_context().get_node_id())
    (lost,) = made.devices
    rest = next(d for d in cluster.devices if d is not lost)
    _, y = graph(2.0)
    values = np.ones((8, 32), F32)
    scheduler = ow.Scheduler([lost, rest, "host"])
    want = scheduler.build(y).run(to_ray=values)
    raylet = next(n for n in local.list_all_nodes() if n.node_id == node)
    local.remove_node(raylet, allow_graceful=False)
    with pytest.raises((DeviceLostError, ExecutionError)):
        run_for(15, scheduler, y, values)
    assert lost not in ow.devices()
    with scheduler.without(lost) as scheduler:
        np.testing.assert_array_equal(scheduler.build(y).run(to_ray=values), want)
    local.add_node(num_cpus=1)
    until = time.monotonic() + 30
    while not (new := cluster.refresh()) and time.monotonic() < until:
        time.sleep(0.2)
    assert len(new) == 1
    with ow.Scheduler([*new, "host"]) as scheduler:
        np.testing.assert_array_equal(scheduler.build(y).run(to_ray=values), want)


def test_large_transfers_by_the_object_store_give_what_was_sent(cluster, monkeypatch):
    from opweave_ray import objects

    monkeypatch.setattr(objects, "_PART", 5 << 20)
    data = np.random.default_rng(2).integers(0, 256, (17 << 20) + 3, np.uint8)
    for device in cluster.devices:
        store = device.connection.carrier
        store._measured, store.used = True, frozenset(["up", "down"])
        sent = [link.wire.sent for link in device.connection.bulk()]
        with device.alloc(data.size + 8) as buffer:
            buffer.upload(5, data)
            assert [link.wire.sent for link in device.connection.bulk()] == sent
            np.testing.assert_array_equal(buffer.read(5, data.size), data)
            assert [link.wire.sent for link in device.connection.bulk()] == sent
        assert store.used


def test_the_faster_way_for_large_transfers_is_used_by_measurement(cluster, monkeypatch):
    device = cluster.devices[0]
    store = device.connection.carrier
    data = np.random.default_rng(2).integers(0, 256, store.least, np.uint8)

    def slowed(work):
        def slow(*args):
            time.sleep(0.5)
            work(*args)

        return slow

    with device.alloc(data.size) as buffer:
        buffer.upload(0, data)
        assert set(store.rates) == {"up", "down"}
        assert store.used == {way for way, (objects, sockets) in store.rates.items() if objects > sockets}
        for slow, used in ((store, frozenset()), (device, frozenset(["up", "down"]))):
            with monkeypatch.context() as patch:
                for name in ("_write", "_read") if slow is store else ("send", "receive"):
                    patch.setattr(slow, name, slowed(getattr(slow, name)))
                store._measured = False
                buffer.upload(0, data)
                assert store.used == used
        np.testing.assert_array_equal(buffer.read(), data)


def test_where_ray_fails_the_sockets_carry_it(cluster, monkeypatch):
    device = cluster.devices[0]
    store = device.connection.carrier
    store._measured, store.used = True, frozenset(["up", "down"])
    monkeypatch.setattr(store, "_result", lambda ref: 1 / 0)
    data = np.random.default_rng(2).integers(0, 256, store.least, np.uint8)
    with device.alloc(data.size) as buffer:
        buffer.upload(0, data)
        assert not store.used
        np.testing.assert_array_equal(buffer.read(), data)


def test_ray_tells_that_a_server_has_ended(cluster, monkeypatch):
    import ray

    node, made = next(iter(cluster.connections.items()))
    right = Fate.lose
    monkeypatch.setattr(Fate, "lose", lambda self, why, **more: why.startswith("Ray") and right(self, why, **more))
    ray.kill(cluster._actors[node])
    until = time.monotonic() + 15
    while made.alive and time.monotonic() < until:
        time.sleep(0.05)
    assert "Ray says" in str(made.fate.error)
    monkeypatch.undo()
    (new,) = cluster.refresh()
    assert new in ow.devices()
    new.alloc(100).free()
