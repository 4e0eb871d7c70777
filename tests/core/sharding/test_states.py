"""States in shards: written and read in parts, seen as a whole from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.ops.movement import after
from opweave_training.checkpoint import restore, write_checkpoint
from tests.core.scheduler.test_lost import Fragile
from tests.support.devices import Member

F = np.float32


@pytest.fixture
def pair():
    return [Member("left"), Member("right")]


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(F)


def parts_of(state: ow.Tensor) -> tuple[ow.Tensor, ...]:
    assert state.leaf is not None
    assert state.leaf.shards is not None
    return state.leaf.shards.parts


@pytest.mark.parametrize("axis", [0, 1])
def test_a_state_lies_in_parts_and_is_read_and_written_whole(pair, axis):
    state = ow.state(f"parts{axis}", (6, 8), device=ow.Sharded({pair[0]: 1, pair[1]: 1}, axis, multiple=1), fill=2)
    assert [p.leaf.placement.buffer.device for p in parts_of(state) if p.leaf and p.leaf.placement] == pair
    assert np.array_equal(ow.read(state), np.full((6, 8), 2, F))
    value = numbers(6, 8)
    ow.write(state, value)
    assert np.array_equal(ow.read(state), value)
    ow.write(state[1:3, 2:7], np.ones((2, 5), F))
    value[1:3, 2:7] = 1
    assert np.array_equal(ow.read(state[:, 1]), value[:, 1])
    assert np.array_equal(np.concatenate([ow.read(p) for p in parts_of(state)], axis), value)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", [ow.assign, ow.accumulate], ids=["assign", "accumulate"])
def test_parts_are_written_where_they_lie(pair, op, axis):
    state = ow.state(f"written_{op.__name__}{axis}", (6, 8), device=ow.Sharded(pair, axis, multiple=1))
    x = ow.input("x_states", (6, 8))
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build([op(state, x * 2.0), ow.sum(x)])
        want = np.zeros((6, 8), F)
        for seed in range(3):
            value = numbers(6, 8, seed=seed)
            want = value * 2 if op is ow.assign else want + value * 2
            assert np.array_equal(program.run(x_states=value)[0], want)
        assert np.array_equal(program.read(state), want)
        program.write(state.key, np.zeros((6, 8), F))
        program.run(x_states=value)
        assert np.array_equal(ow.read(state), value * 2)
        writers = [n for n in program.explain().nodes if n.op == op.__name__]
        assert sorted(n.device for n in writers) == ["left", "right"]


@pytest.mark.parametrize("op", ["index_copy", "assign", "accumulate"])
def test_a_whole_state_takes_what_is_computed_in_parts(pair, op):
    w = numbers(8, 6)
    state = ow.state(f"whole_{op}", (4, 8), device=pair[1])
    x = ow.input("x_whole_state", (4, 6))
    made = ow.linear(x, ow.weights({"w": w}, device=ow.Sharded(pair, multiple=1))["w"])
    new = ow.index_copy(state, np.arange(4), made) if op == "index_copy" else getattr(ow, op)(state, made)
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(ow.neg(new))
        for times in (1, 2):
            want = numbers(4, 6) @ w.T * (times if op == "accumulate" else 1)
            assert np.array_equal(program.run(x_whole_state=numbers(4, 6)), -want)
    assert np.array_equal(ow.read(state), want)


def test_regions_are_written_in_parts(pair):
    state = ow.state("regions_states", (4, 6, 8), device=ow.Sharded(pair, 2, multiple=1))
    row, rows = ow.input("row_regions", (8,)), ow.input("rows_regions", (2, 8, 1))
    with ow.Scheduler(pair) as scheduler:
        first = ow.assign(state[1, 2], row)
        program = scheduler.build(ow.assign(ow.transpose(first, (1, 2, 0))[3:5, :, 3:], rows))
        want = np.zeros((4, 6, 8), F)
        want[1, 2], new = numbers(8), numbers(2, 8, 1, seed=1)
        want.transpose(1, 2, 0)[3:5, :, 3:] = new
        assert np.array_equal(program.run({"row_regions": numbers(8), "rows_regions": new}), want)
    assert np.array_equal(ow.read(state), want)


def test_old_values_are_read_before_they_are_written(pair):
    state = ow.state("old_states", (6, 8), device=ow.Sharded(pair, 1, multiple=1), fill=1)
    x = ow.input("x_old", (6, 8))
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build([ow.neg(state), ow.assign(state, x), ow.sum(state, axis=1)])
        value = numbers(6, 8)
        before, after, total = program.run(x_old=value)
    assert np.array_equal(before, np.full((6, 8), -1, F))
    assert np.array_equal(after, value)
    assert np.array_equal(total, np.full(6, 8, F))


def test_writes_across_the_cut_are_refused(pair):
    state = ow.state("across", (6, 8), device=ow.Sharded(pair, 0, multiple=1))
    rows, at = ow.input("rows_across", (2, 8)), ow.input("at_across", (2,), "i64")
    with ow.Scheduler(pair) as scheduler:
        with pytest.raises(ow.LayoutError, match="'across' is split along axis 0"):
            scheduler.build(ow.index_copy(state, at, rows))
        with pytest.raises(ow.LayoutError, match="split along axis 0"):
            scheduler.build(ow.assign(state[1:3], rows))
    with pytest.raises(ow.SchedulerError, match="buffer_type"):
        ow.state("kind", (6, 8), device=ow.Sharded(pair), buffer_type=pair[0].default_buffer_type)
    with pytest.raises(ow.BoundsError, match="axis 2"):
        ow.state("axis", (6, 8), device=ow.Sharded(pair, axis=2))
    with pair[0].open() as stream, pytest.raises(ow.SchedulerError, match="lies in parts"):
        ow.write(state, numbers(6, 8), stream=stream)


def test_copies_of_graphs_have_the_values(pair):
    state = ow.state("copied_states", (6, 8), device=ow.Sharded(pair, 1, multiple=1))
    ow.write(state, numbers(6, 8))
    with ow.Scheduler(pair[0]) as scheduler:
        outputs, _ = opweave_cost.copy_graph(ow.neg(state))
        assert np.array_equal(scheduler.build(outputs).run(), -numbers(6, 8))


def test_checkpoints_have_the_whole(pair, tmp_path):
    one = ow.state("checkpointed", (6, 8), device=ow.Sharded(pair, 1, multiple=1))
    other = ow.state("restored", (6, 8), device=ow.Sharded(pair, 0, multiple=1))
    ow.write(one, numbers(6, 8))
    write_checkpoint(tmp_path / "c", {"s": one}, {"structure": "a"})
    restore(tmp_path / "c", {"s": other}, "a")
    assert np.array_equal(ow.read(other), numbers(6, 8))


def test_the_part_of_a_lost_device_is_said(pair):
    lost = Fragile("gpu")
    state = ow.state("lost_part", (6, 8), device=ow.Sharded([pair[0], lost], 1, multiple=1))
    x = ow.input("x_lost_part", (6, 8))
    scheduler = ow.Scheduler([pair[0], lost, pair[1]])
    scheduler.build(ow.sum(ow.assign(state, x))).run(x_lost_part=numbers(6, 8))
    lost.lost = True
    with scheduler.without("gpu") as rest:
        with pytest.raises(ow.ExecutionError, match="lost_part"):
            ow.read(state)
        ow.write(state, numbers(6, 8, seed=1))
        assert rest.build(ow.sum(state)).run() == numbers(6, 8, seed=1).sum()


# --- key-value caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize("blocks", [None, 6])
def test_a_cache_split_by_heads_is_never_whole(pair, dtype, blocks):
    heads, groups, size, width = 8, 4, 32, 24
    rng = np.random.default_rng(0)
    names = {"q": heads, "k": groups, "v": groups}
    arrays = {n: rng.standard_normal((h * size, width), F) for n, h in names.items()}
    arrays["o"] = rng.standard_normal((width, heads * size), F)
    shape = (1, 3, 8, groups, size)
    each = heads // groups * size

    def run(devices, by, where, label):
        cache = ow.KVCache(*shape, dtype, device=where, block=4, blocks=blocks, name=f"{label}_{dtype}_{blocks}")
        w = ow.weights(arrays, device=by)
        sequence = cache.join()
        got: list[np.ndarray[Any, Any]] = []
        with ow.Scheduler(devices) as scheduler:
            for tokens in ([1, 2, 3], [4], [5, 6]):
                batch = cache.feed({sequence: tokens})
                n, width_ = batch.tokens.shape
                x = ow.input("x_cache", (n * width_, width))
                slots, at = ow.input("slots_cache", (n, width_), "i64"), ow.input("at_cache", (n, width_), "i64")
                table = ow.input("blocks_cache", batch.blocks.shape, "i64")

                def of(name, number, x=x, w=w, n=n, width_=width_):
                    rows = ow.reshape(ow.linear(x, w[name]), (n, width_, number, size))
                    return ow.transpose(rows, (0, 2, 1, 3))

                q, k, v = of("q", heads), of("k", groups), of("v", groups)
                seen = cache.attend(0, q, k, v, at, slots, table, batch.reach)
                out = ow.linear(ow.reshape(ow.transpose(seen, (0, 2, 1, 3)), (n * width_, heads * size)), w["o"])
                program = scheduler.build(out)
                values = np.random.default_rng(len(got)).standard_normal((n * width_, width), F)
                got.append(program.run({"x_cache": values, "slots_cache": batch.slots, "at_cache": batch.positions,
                                        "blocks_cache": batch.blocks}))  # fmt: skip
                why = program.explain()
            cache.truncate(sequence, 2)
        return got, why, cache

    by = {"q": ow.Sharded(pair, multiple=each), "[kv]": ow.Sharded(pair, multiple=size),
          "o": ow.Sharded(pair, axis=1, multiple=each)}  # fmt: skip
    got, why, cache = run(pair, by, ow.Sharded(pair, axis=1, multiple=1), "split")
    want, _, whole = run(pair[:1], None, None, "whole")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3 * np.abs(b).max())
    assert np.array_equal(ow.read(cache.keys[0]), ow.read(whole.keys[0]))
    assert sorted(n.device for n in why.nodes if n.op == "attention") == ["left", "right"]
    assert sorted(n.device for n in why.nodes if n.op == "index_copy") == ["left", "left", "right", "right"]
    assert not any(n.op == "concat" for n in why.nodes)
    for device in ("left", "right"):
        ops = [n.op for n in why.nodes if n.device == device and n.op in ("index_copy", "embedding")]
        assert ops == ["index_copy"] * 2 + ["embedding"] * 2, "both are written before one is read"


@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_part_waits_for_that_of_its_own_device_or_for_the_whole(pair, axis):
    """However what it waits for is cut, nothing of it moves if it lies in parts; and it is done in any case."""
    where = pair[1] if axis is None else ow.Sharded(pair, axis, multiple=1)
    state = ow.state(f"waited_for_{axis}", (4, 10), device=where)
    weights = ow.weights({"w": numbers(6, 8)}, device={"w": ow.Sharded(pair, 1, multiple=1)})
    x, y = ow.input("x_waiting", (6, 8)), ow.input("y_waiting", (4, 10))
    with ow.Scheduler(pair) as scheduler:
        program = scheduler.build(ow.relu(after(x + weights["w"], [ow.assign(state, y * 2.0)])))
        feeds = {"x_waiting": numbers(6, 8, seed=1), "y_waiting": numbers(4, 10, seed=2)}
        assert np.array_equal(program.run(feeds), np.maximum(feeds["x_waiting"] + numbers(6, 8), 0))
        assert np.array_equal(program.read(state), 2 * feeds["y_waiting"])
        gathered = [row.tensor for row in program.explain().copies if "waited_for" in row.tensor]
        assert sorted(n.device for n in program.explain().nodes if n.op == "relu") == ["left", "right"]
    if axis is not None:
        assert not gathered


def test_a_cache_is_split_by_heads_only(pair):
    with pytest.raises(ow.LayoutError, match="by heads"):
        ow.KVCache(1, 2, 8, 4, 32, device=ow.Sharded(pair), name="wrong_axis")
