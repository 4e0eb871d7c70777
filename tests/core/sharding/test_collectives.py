"""How values are exchanged: by the backend's procedure, by each device in the others' memory, by copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.contract import Stream
from opweave.graph.dtypes import as_dtype
from opweave.runtime.host.device import HostDevice
from opweave.sharding import values
from tests.support.collective_backend import ExchangingBackend
from tests.support.devices import Separate

F = np.float32
ROWS, WIDTH = 6, 64


def integers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(F)


ARRAYS = {"up": integers(96, WIDTH), "down": integers(WIDTH, 96, seed=1), "bias": integers(WIDTH, seed=2)}


def mlp(x: ow.Tensor, w: Any) -> ow.Tensor:
    return ow.linear(ow.relu(ow.linear(x, w["up"])), w["down"], w["bias"])


def expected(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.maximum(value @ ARRAYS["up"].T, 0) @ ARRAYS["down"].T + ARRAYS["bias"]


def sharded(devices: Sequence[ow.Device]) -> Any:
    by = {"up": ow.Sharded(devices), "down": ow.Sharded(devices, axis=1)}
    return ow.weights(ARRAYS, device=by)


def copies(program: ow.Program[Any]) -> list[Any]:
    return [c for c in program.partition.copies if c.kind is not None]


# --- the procedure of a backend --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_sums_without_axes_are_exchanged(cpus, count):
    """Each device adds up its part of a weight; the partial sums are single numbers."""
    devices, array = cpus[:count], integers(6, 4)
    whole = ow.weights({"w": array}, device=ow.Sharded(devices, multiple=1))["w"]
    with ow.Scheduler(devices) as scheduler:
        program = scheduler.build([ow.sum(whole), ow.sum(whole) * whole])
        total, scaled = program.run()
        assert total == array.sum()
        assert np.array_equal(scaled, array.sum() * array)
        assert {c.kind for c in copies(program)} >= {"all_reduce"}


@pytest.mark.parametrize("parallel", [False, 2])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_the_backend_adds_partial_sums(count, together, parallel):
    backend = ExchangingBackend(count, together=together)
    x = ow.input(f"x_adds_{count}_{together}", (ROWS, WIDTH))
    with ow.Scheduler([*backend.members, HostDevice()], parallel=parallel) as scheduler:
        y = mlp(x, sharded(backend.members))
        program = scheduler.build(mlp(y, sharded(backend.members)))
        for seed in range(3):
            value = integers(ROWS, WIDTH, seed=seed)
            assert np.array_equal(program.run({x: value}), expected(expected(value)))
    assert set(backend.made) == {"all_reduce"}
    found = copies(program)
    assert {c.cause for c in found} == {"collective"}
    if together:
        assert len(found) == 2
        assert all(len(c.terms) == count - 1 == len(c.outs) for c in found)
    assert "all_reduce" in str(program.explain())


def test_the_backend_gathers():
    backend = ExchangingBackend(3)
    w = ow.weights({"w": integers(96, WIDTH)}, device=ow.Sharded(backend.members))["w"]
    x = ow.input("x_gathers", (1, WIDTH))  # one row: the parts lie one after the other
    last = ow.weights({"v": integers(3, 96, seed=3)}, device=ow.Sharded(backend.members, multiple=1))["v"]
    with ow.Scheduler([*backend.members, HostDevice()]) as scheduler:
        program = scheduler.build(ow.linear(ow.linear(x, w), last))
        value = integers(1, WIDTH, seed=4)
        want = value @ integers(96, WIDTH).T @ integers(3, 96, seed=3).T
        assert np.array_equal(program.run({x: value}), want)
    assert backend.made == ["all_gather"]


@pytest.mark.parametrize(("count", "precision", "used"), [(2, None, True), (3, None, False), (3, "bf16", True)])
def test_another_order_is_used_only_where_it_may_be(count, precision, used):
    """Two terms have one order; of more only where the program may compute the products less than exactly."""
    backend = ExchangingBackend(count, "any")
    x = ow.input(f"x_order_{count}", (ROWS, WIDTH))
    with ow.Scheduler([*backend.members, HostDevice()]) as scheduler:
        program = scheduler.build(mlp(x, sharded(backend.members)), precision=precision)
        value = integers(ROWS, WIDTH)
        assert np.array_equal(program.run({x: value}), expected(value))
    assert bool(backend.made) is used
    assert ("all_reduce", "f32", ROWS * WIDTH) in backend.asked


def test_without_support_the_core_exchanges():
    backend = ExchangingBackend(2, None)
    x = ow.input("x_none", (ROWS, WIDTH))
    with ow.Scheduler([*backend.members, HostDevice()]) as scheduler:
        program = scheduler.build(mlp(x, sharded(backend.members)))
        assert np.array_equal(program.run({x: integers(ROWS, WIDTH)}), expected(integers(ROWS, WIDTH)))
    assert backend.asked
    assert not backend.made
    assert not copies(program)


def test_a_fault_of_the_backend_is_an_error_of_the_run():
    def fail(kind: str, outs: list[Any], parts: list[Any]) -> None:
        raise RuntimeError("planted")

    backend = ExchangingBackend(2, fault=fail)
    x = ow.input("x_planted", (ROWS, WIDTH))
    with ow.Scheduler([*backend.members, HostDevice()]) as scheduler:
        program = scheduler.build(mlp(x, sharded(backend.members)))
        with pytest.raises(ow.ExecutionError, match="planted"):
            program.run({x: integers(ROWS, WIDTH)})
        backend.fault = lambda kind, outs, parts: None
        assert np.array_equal(program.run({x: integers(ROWS, WIDTH)}), expected(integers(ROWS, WIDTH)))


def test_observed_sums_are_computed_node_by_node():
    backend = ExchangingBackend(2)
    x = ow.input("x_seen", (ROWS, WIDTH))
    with ow.Scheduler([*backend.members, HostDevice()]) as scheduler:
        program = scheduler.build(mlp(x, sharded(backend.members)))
        seen: list[str] = []
        with program.observe(lambda node, array: seen.append(node.name)):
            assert np.array_equal(program.run({x: integers(ROWS, WIDTH)}), expected(integers(ROWS, WIDTH)))
    assert seen


# --- each device in the memory of the others -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_device_gets_the_sum_in_the_order_of_the_shards(cpus, count, dtype):
    """Bit-equal to adding one after the other in f32, which another order is not, on every device. Each part of the
    weight takes a column of the input as it is."""
    devices, kind = cpus[:count], as_dtype(dtype).numpy
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((ROWS, WIDTH)) * 2.0 ** rng.integers(-8, 9, (ROWS, WIDTH))).astype(kind)
    group = ow.weights({"w": np.zeros((WIDTH, WIDTH), kind)}, device=ow.Sharded(devices, axis=1))
    assert group["w"].leaf is not None
    assert group["w"].leaf.shards is not None
    cuts = group["w"].leaf.shards.cuts
    chosen = [rng.permutation(np.arange(start, stop).repeat(WIDTH))[:WIDTH] for start, stop in pairwise(cuts)]
    w = np.zeros((WIDTH, WIDTH), kind)
    for columns in chosen:
        w[np.arange(WIDTH), columns] = 1
    group = ow.weights({"w": w}, device=ow.Sharded(devices, axis=1))
    given = ow.input(f"x_every_{count}_{dtype}", (ROWS, WIDTH), dtype)
    summed = ow.linear(given, group["w"])
    by_rows = ow.weights({"v": np.eye(WIDTH, dtype=kind)}, device=ow.Sharded(devices))["v"]
    with ow.Scheduler(devices, threads=1) as scheduler:
        first, again = scheduler.build((summed, ow.linear(summed, by_rows))).run({given: x})
    wide = np.float32 if np.dtype(kind).itemsize < 4 else kind
    total = x[:, chosen[0]].astype(wide)
    for columns in chosen[1:]:
        total = total + x[:, columns].astype(wide)
    want = total.astype(kind)
    assert first.tobytes() == want.tobytes()
    assert again.tobytes() == want.tobytes()  # each device has made its columns of the sum that it has itself


def test_cpu_devices_add_what_lies_with_the_others(cpus):
    """Each device reads the parts where they are: no copy goes between two of them."""
    x = ow.input("x_at_once", (ROWS, WIDTH))
    with ow.Scheduler(cpus[:2], threads=1) as scheduler:
        program = scheduler.build(mlp(mlp(x, sharded(cpus[:2])), sharded(cpus[:2])))
        assert np.array_equal(program.run({x: integers(ROWS, WIDTH)}), expected(expected(integers(ROWS, WIDTH))))
    found, arenas = copies(program), program.partition.arena_of
    assert [c.kind for c in found] == ["all_reduce"] * 3
    for c in found:
        assert len({arenas[view.storage] for view in (c.src, *c.terms)}) == 2
        assert c.nbytes == ROWS * WIDTH * 4
    assert not any(c.cause == "gather" for c in program.partition.copies)


def test_inputs_are_fed_before_threads_begin(cpus):
    """So that a device does not wait for another one's thread to get its input."""
    x = ow.input("x_fed", (ROWS, WIDTH))
    with ow.Scheduler(cpus[:2], threads=1) as scheduler:
        program = scheduler.build(mlp(x, sharded(cpus[:2])))
        (feed,) = program.internals.lists[0].feeds.values()
        assert not feed.queued
    with ow.Scheduler(cpus[:2], threads=1, parallel=2) as scheduler:
        (feed,) = scheduler.build(mlp(x, sharded(cpus[:2]))).internals.lists[0].feeds.values()
        assert feed.queued  # an earlier run may still read the memory


def test_one_device_alone_gets_no_thread(cpus):
    w = ow.weights({"w": integers(96, WIDTH)}, device=ow.Sharded(cpus[:2]))["w"]
    with ow.Scheduler(cpus[:2]) as scheduler:
        program = scheduler.build(w)
        assert np.array_equal(program.run(), integers(96, WIDTH))
        assert [c.kind for c in copies(program)] == ["all_gather"]  # straight to its place, not by way of the host
        assert not any(stream.has_thread for stream in scheduler.streams)


# --- copies ----------------------------------------------------------------------------------------------------------


class PeerStream(Stream):
    """Copies from the memory of any other device of its kind."""

    def _copy_from(self, dst: Any, dst_offset: int, src: Any, src_offset: int, size: int) -> bool:
        self.device.seen.append((src.device.name, dst.device.name))  # type: ignore[attr-defined]
        dst.handle[dst_offset : dst_offset + size] = src.handle[src_offset : src_offset + size]
        return True

    def _synchronize(self) -> None:
        pass

    def _record(self) -> None:
        return None

    def _join(self, handle: Any) -> None:
        pass

    def _wait(self, handle: Any) -> bool:
        return True


class Peer(Separate):
    """A device that copies directly from others."""

    stream_class = PeerStream

    def __init__(self, name: str, seen: list[tuple[str, str]]) -> None:
        super().__init__(name)
        self.seen = seen


@settings(max_examples=12, deadline=None)
@given(st.integers(3, 5), st.integers(0, 1000))
def test_sums_between_devices_that_copy_directly(count, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "SMALL", 0)
        between: list[tuple[str, str]] = []
        devices = [Peer(f"p{i}", between) for i in range(count)]
        rng = np.random.default_rng(seed)
        arrays = {f"{k}{i}": rng.integers(-2, 3, (WIDTH, WIDTH)).astype(F) for i in range(2) for k in ("up", "down")}
        by = {"up*": ow.Sharded(devices, multiple=1), "down*": ow.Sharded(devices, axis=1, multiple=1)}
        w = ow.weights(arrays, device=by)
        x, value = ow.input(f"x_ring{count}", (ROWS, WIDTH)), rng.integers(-2, 3, (ROWS, WIDTH)).astype(F)
        y, want = x, value
        for i in range(2):
            y = ow.linear(ow.relu(ow.linear(y, w[f"up{i}"])), w[f"down{i}"])
            want = np.maximum(want @ arrays[f"up{i}"].T, 0) @ arrays[f"down{i}"].T
        with ow.Scheduler([*devices, HostDevice()]) as scheduler:
            program = scheduler.build(y)
            for _ in range(2):
                assert np.array_equal(program.run({x: value}), want)
        assert between
