"""Devices over devices: what they are called and have, what they compute, and what happens when a member is lost."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_combined
from opweave import registry
from opweave.contract import Kind, Step
from opweave.runtime.host.device import HostDevice
from opweave_combined.device import CombinedDevice
from opweave_conformance.suite import Suite
from tests.core.scheduler.test_lost import Fragile
from tests.support.devices import Member, Separate

F = np.float32


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(F)


ARRAYS = {"up": numbers(96, 48), "bias": numbers(96, seed=1), "down": numbers(48, 96, seed=2)}


def mlp(x: ow.Tensor, w: Any) -> ow.Tensor:
    return ow.linear(ow.relu(ow.linear(x, w["up"], w["bias"])), w["down"]) + x


def expected(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    up, bias, down = ARRAYS.values()
    return np.maximum(value @ up.T + bias, 0) @ down.T + value


def programs(device: CombinedDevice) -> list[ow.Program[Any]]:
    """The programs over the members."""
    return [p for members in device._schedulers.values() for p in members.scheduler._programs.values()]


def test_commands_make_the_combinations_of_the_environment_and_those_that_are_named(monkeypatch):
    monkeypatch.setenv("OPWEAVE_COMBINE", "cpu+host")
    registry.REGISTRY.make_devices()
    name = ow.backend("combined").devices()[0].name
    ow.unload("combined")
    monkeypatch.delenv("OPWEAVE_COMBINE")
    registry.REGISTRY.make_devices(["host", name])
    assert ow.device(name).name == name
    ow.unload("combined")
    with pytest.raises(ow.UnknownNameError, match="no device named 'nosuch'"):
        registry.REGISTRY.make_devices(["combined:host+nosuch"])


# --- names and figures ----------------------------------------------------------------------------------------------


def test_a_combination_has_a_name_and_is_listed():
    made = opweave_combined.combine(["cpu", "host"])
    assert made.name.startswith("combined:cpu")
    assert made is opweave_combined.combine(["cpu", "host"])
    assert ow.device(made.name) is made
    assert ow.backend("combined").devices() == (made,)
    with pytest.raises(ow.SchedulerError, match="is there already"):
        opweave_combined.combine({"cpu": 3, "host": 1})
    with pytest.raises(ow.SchedulerError, match="one itself"):
        opweave_combined.combine([made, "host"])
    ow.unload("combined")
    again = opweave_combined.combine({"cpu": 3, "host": 1})
    assert again is not made
    assert list(again.shares.values()) == [3, 1]
    ow.unload("combined")


@pytest.mark.parametrize("given", [["host"], ["host", "host"], [], "host"])
def test_fewer_than_two_devices_are_no_combination(given):
    with pytest.raises(ow.SchedulerError):
        opweave_combined.combine(given)


def test_memory_is_the_sum_and_abilities_are_those_of_all(pair):
    for device, free in zip(pair, (3 << 30, 1 << 30), strict=True):
        device.mem_info = lambda free=free: (free, 4 << 30)
    made = CombinedDevice(pair)
    assert made.mem_info() == (4 << 30, 8 << 30)
    with made.alloc(1 << 20):
        assert made.mem_info()[0] == (4 << 30) - (1 << 20)
    assert made.mem_info()[0] == 4 << 30
    with pytest.raises(ow.AllocationError):
        made.alloc((4 << 30) + 1)

    def refuse(step: Step) -> str | None:
        return "no exp here" if step.op == "exp" else None

    pair[1]._why_not = refuse
    x = ow.input("x_abilities", (4,))
    with ow.Scheduler(made) as scheduler:
        assert scheduler.supports(made, ow.neg(x))
        assert not scheduler.supports(made, ow.exp(x))


def test_processors_have_the_memory_of_the_machine_once(pair):
    for device in pair:
        device.kind = Kind.CPU
        device.mem_info = lambda: (3 << 30, 4 << 30)
    assert CombinedDevice(pair).mem_info() == (3 << 30, 4 << 30)


# --- computing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, 2])
def test_weights_are_split_so_that_an_mlp_exchanges_once(both, pair, parallel):
    group = ow.weights(ARRAYS, device=both)
    x = ow.input("x_combined", (5, 48))
    with ow.Scheduler([both, HostDevice()], parallel=parallel) as scheduler:
        program = scheduler.build(mlp(x, group))
        for seed in range(3):
            value = numbers(5, 48, seed=seed)
            assert np.array_equal(program.run(x_combined=value), expected(value))
        (inner,) = programs(both)
        products = [n for n in inner.explain().nodes if n.op == "linear"]
        assert sorted(n.device for n in products) == ["left", "left", "right", "right"]
        assert all(f"f32{shape}, axis {axis}: left 48, right 48" in str(inner.explain())
                   for shape, axis in (([96, 48], 0), ([96], 0), ([48, 96], 1)))  # fmt: skip
        assert sum(copy.nbytes for copy in inner.explain().copies) == 3 * 5 * 48 * 4  # x to both, one partial sum
        used = inner.memory
        assert used["left"].weights == used["right"].weights == 2 * 48 * 48 * 4 + 48 * 4
    assert np.array_equal(ow.read(group["up"]), ARRAYS["up"])


def test_shares_say_how_much_of_each_weight_a_member_has(pair):
    both = CombinedDevice(pair, (3, 1))
    group = ow.weights(ARRAYS, device=both)
    with ow.Scheduler(both) as scheduler:
        scheduler.build(mlp(ow.input("x_shares", (5, 48)), group)).run(x_shares=numbers(5, 48))
        used = programs(both)[0].memory
    assert (used["left"].weights, used["right"].weights) == (2 * 72 * 48 * 4 + 72 * 4, 2 * 24 * 48 * 4 + 24 * 4)


def test_new_values_of_weights_are_used(both):
    group = ow.weights(ARRAYS, device=both)
    x = ow.input("x_written", (5, 48))
    with ow.Scheduler(both) as scheduler:
        program = scheduler.build(ow.linear(x, group["up"]))
        program.run(x_written=numbers(5, 48))
        new = numbers(96, 48, seed=9)
        group.write({"up": new})
        assert np.array_equal(program.run(x_written=numbers(5, 48)), numbers(5, 48) @ new.T)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k"])
def test_quantized_weights_are_cut_at_whole_blocks(both, dtype):
    blocks = ow.quantize(np.random.default_rng(0).standard_normal((24, 1024), F), dtype)
    x, value = ow.input("x_quantized", (3, 1024)), np.random.default_rng(1).standard_normal((3, 1024), F)
    with ow.Scheduler(both) as scheduler, ow.Scheduler(HostDevice()) as one:
        got = scheduler.build(ow.linear(x, ow.weights({"w": blocks}, device=both)["w"])).run(x_quantized=value)
        want = one.build(ow.linear(x, ow.weights({"w": blocks})["w"])).run(x_quantized=value)
        assert f"{dtype}[24, 1024], axis 0: left 12, right 12" in str(programs(both)[0].explain())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_states_stay_on_a_member_and_keep_their_values(both):
    cache = ow.state("combined_cache", (8, 4), device=both)
    rows, at = ow.input("rows_combined", (2, 4)), ow.input("at_combined", (2,), "i64")
    with ow.Scheduler(both) as scheduler:
        program = scheduler.build(ow.sum(ow.index_copy(cache, at, rows), axis=0))
        want = np.zeros((8, 4), F)
        for i in range(4):
            value = numbers(2, 4, seed=i)
            want[2 * i : 2 * i + 2] = value
            got = program.run({"rows_combined": value, "at_combined": np.arange(2 * i, 2 * i + 2)})
            assert np.array_equal(got, want.sum(0))
        assert len(programs(both)) == 1, "the state lies where it lay, so that the program serves again"
    assert np.array_equal(ow.read(cache), want)
    ow.write(cache, np.ones((8, 4), F))
    with ow.Scheduler(both) as scheduler:
        assert scheduler.build(ow.sum(cache)).run() == 32


def test_a_program_may_write_several_states(both):
    one, two = (ow.state(f"several_{i}", (4, 3), device=both) for i in range(2))
    x = ow.input("x_several", (4, 3))
    with ow.Scheduler(both) as scheduler:
        program = scheduler.build([ow.assign(one, x), ow.accumulate(two, x)])
        for _ in range(2):
            first, second = program.run(x_several=numbers(4, 3))
    assert np.array_equal(first, numbers(4, 3))
    assert np.array_equal(second, 2 * numbers(4, 3))


@pytest.mark.parametrize("blocks", [None, 6])
def test_a_cache_is_split_by_heads(both, blocks):
    heads, groups, size, width = 8, 4, 32, 24
    rng = np.random.default_rng(0)
    outs = {"q": heads, "k": groups, "v": groups}
    arrays = {n: rng.standard_normal((h * size, width), F) for n, h in outs.items()}
    arrays["o"] = rng.standard_normal((width, heads * size), F)

    def run(device: ow.Device) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        cache = ow.KVCache(1, 3, 8, groups, size, device=device, block=4, blocks=blocks, name=f"{device.name}{blocks}")
        w, sequence = ow.weights(arrays, device=device), cache.join()
        got: list[np.ndarray[Any, Any]] = []
        with ow.Scheduler(device) as scheduler:
            for tokens in ([1, 2, 3, 4], [4], [5]):
                batch = cache.feed({sequence: tokens})
                n, t = batch.tokens.shape
                x = ow.input("x_combined_cache", (n * t, width))
                slots, at = ow.input("slots_combined", (n, t), "i64"), ow.input("at_combined_cache", (n, t), "i64")
                table = ow.input("blocks_combined", batch.blocks.shape, "i64")
                q, k, v = (
                    ow.transpose(ow.reshape(ow.linear(x, w[name]), (n, t, number, size)), (0, 2, 1, 3))
                    for name, number in outs.items()
                )
                seen = cache.attend(0, q, k, v, at, slots, table, batch.reach)
                out = ow.linear(ow.reshape(ow.transpose(seen, (0, 2, 1, 3)), (n * t, heads * size)), w["o"])
                feeds = {"x_combined_cache": np.random.default_rng(len(got)).standard_normal((n * t, width), F),
                         "slots_combined": batch.slots, "at_combined_cache": batch.positions,
                         "blocks_combined": batch.blocks}  # fmt: skip
                got.append(scheduler.build(out).run(feeds))
            for inner in programs(device) if isinstance(device, CombinedDevice) else ():
                where = [n.device for n in inner.explain().nodes if n.op in ("attention", "index_copy")]
                assert sorted(where) == ["left"] * 3 + ["right"] * 3
                assert f"f32{[*cache.keys[0].shape]}" not in str(inner.explain()).partition("shards")[0]
        # What is written across the cut by another program is right too: the state then lies whole.
        with ow.Scheduler(device) as scheduler:
            scheduler.build(ow.sum(ow.assign(cache.keys[0][:, 1], 7.0))).run()
            got.append(scheduler.build(out).run(feeds))
        return got, ow.read(cache.keys[0])

    split, keys = run(both)
    whole, wanted = run(Member("one"))
    for a, b in zip(split, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    np.testing.assert_allclose(keys, wanted, rtol=1e-5, atol=1e-5)


def test_memory_of_members_goes_with_what_lies_there(both, pair):
    group = ow.weights(ARRAYS, device=both)
    with ow.Scheduler(both) as scheduler:
        scheduler.build(mlp(ow.input("x_freed", (5, 48)), group)).run(x_freed=numbers(5, 48))
        assert pair[0].live_buffers
        for buffer in group.buffers:
            buffer.free()
        gc.collect()
        assert not programs(both)
    assert both.mem_info() == (0, 0) or both._reserved == 0


def test_a_lost_member_is_a_lost_device():
    lost = Fragile("gpu")
    both = CombinedDevice([Separate("stays"), lost])
    group = ow.weights(ARRAYS, device=both)
    x = ow.input("x_lost_member", (5, 48))
    with ow.Scheduler(both) as scheduler:
        program = scheduler.build(mlp(x, group))
        program.run(x_lost_member=numbers(5, 48))
        lost.lost = True
        with pytest.raises(ow.ExecutionError, match="lost a member") as caught:
            program.run(x_lost_member=numbers(5, 48))
        assert isinstance(caught.value.__cause__, ow.DeviceLostError)


# --- conformance ----------------------------------------------------------------------------------------------------

CHECKS = [
    "hygiene-*", "memory-[a-m]*", "linear-f32-sliced*", "index_copy-q4_0*", "assign-f32-*", "add-i32-*",
    "async-upload-*", "observe-separate-state-written", "observe-host-products", "fault-r*", "fault-program*",
]  # fmt: skip


def test_two_cpu_devices_conform():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWEAVE_CPU_DEVICES", "2")
        members = ow.Registry()
        pair = [members.device(f"cpu:{i}") for i in range(2)]
    registry = ow.Registry(environ={}, search=[])
    registry.register_device(CombinedDevice(pair))
    suite = Suite("combineddevice", only=CHECKS, using=registry)
    results = [suite.perform(item) for item in suite.items]
    assert [f"{r.name}: {r.reason}" for r in results if r.status == "failed"] == []
    assert {r.level for r in results if r.status == "passed"} == {0, 1, 2, 3, 4, 5}
