"""The cache's bookkeeping: slots, blocks, positions and padding of ragged batches, and errors.

Attention over the cache is compared with torch in ``tests/examples``, by the decoder in `examples`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow


def cache(**other):
    return ow.KVCache(**({"layers": 2, "sequences": 3, "capacity": 20, "groups": 2, "size": 4, "block": 8} | other))


def test_a_ragged_batch():
    kv = cache()
    a, b, c = kv.join(), kv.join(), kv.join()
    assert (a, b, c) == (0, 1, 2)
    kv.feed({a: [5, 6]})
    batch = kv.feed({c: [1, 2, 3], a: [4]})
    assert batch.tokens.tolist() == [[4, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 0]]
    assert batch.positions.tolist() == [[2, 20, 20, 20], [20, 20, 20, 20], [0, 1, 2, 20]]
    assert batch.slots.tolist() == [[2, 60, 60, 60], [60, 60, 60, 60], [40, 41, 42, 60]]
    assert batch.blocks.tolist() == [[0], [0], [2]]
    assert batch.last.tolist() == [0, 4, 10]
    assert batch.reach == 8
    assert batch.rows == {0: 0, 1: 1, 2: 2}
    assert kv.lengths.tolist() == [3, 0, 3]
    tokens, positions, slots, blocks, last, reach = batch
    assert all(array.dtype == np.int64 for array in (tokens, positions, slots, blocks, last))
    assert reach == batch.reach


@pytest.mark.parametrize("options", [{}, {"blocks": 9}, {"blocks": 9, "window": 4}])
def test_specs_are_the_shapes_of_a_batch(options):
    kv = cache(**options)
    for fed, rows, tokens in (({kv.join(): [1] * 3, kv.join(): [1] * 9}, 3, 16), ({0: [1]}, 1, 1)):
        *arrays, reach = kv.feed(fed)
        *specs, last = kv.specs(rows, tokens, reach)
        assert [(spec.shape, spec.dtype) for spec in specs] == [(x.shape, ow.as_dtype(x.dtype)) for x in arrays]
        assert last == reach


def test_one_sequence_alone_is_one_row():
    kv = cache()
    kv.join()
    b = kv.join()
    batch = kv.feed({b: range(9)})
    assert batch.tokens.shape == (1, 16)
    assert (batch.blocks.tolist(), batch.last.tolist(), batch.reach, batch.rows) == ([[1]], [8], 16, {1: 0})
    assert batch.slots[0, :9].tolist() == list(range(20, 29))


def test_reaches_are_doubled_blocks_up_to_the_capacity():
    assert cache().reaches == (8, 16, 20)
    assert cache(block=64).reaches == (20,)
    assert cache(capacity=32).reaches == (8, 16, 32)
    assert cache(capacity=1).reaches == (1,)
    assert cache(blocks=5).reaches == (8, 16, 24)
    assert cache(blocks=5, block=64).reaches == (64,)


def test_blocks_are_taken_as_sequences_grow_and_given_back():
    kv = cache(blocks=4)
    a, b = kv.join(), kv.join()
    assert kv.free_blocks == 4
    kv.feed({a: [1] * 7})
    assert kv.free_blocks == 3
    batch = kv.feed({a: [1] * 2, b: [1] * 3})  # a goes on in a second block
    assert kv.free_blocks == 1
    assert batch.blocks.tolist() == [[0, 2], [1, 1], [0, 0]] or batch.blocks.tolist() == [[0, 1], [2, 2], [0, 0]]
    first, second = batch.blocks[a]
    assert batch.slots[a].tolist() == [first * 8 + 7, second * 8, 32, 32]
    assert "1 of 4 blocks of 8 tokens free" in repr(kv)
    # If there are too few blocks for the whole batch, nothing is fed.
    with pytest.raises(ow.BoundsError, match=r"take 2 more blocks of 8 tokens, and of the cache's 4 blocks 1 are free"):
        kv.feed({a: [1] * 8, b: [1] * 6})
    assert kv.lengths.tolist() == [9, 3, 0]
    assert kv.free_blocks == 1
    kv.truncate(a, 8)
    assert kv.free_blocks == 2
    kv.release(b)
    assert kv.free_blocks == 3
    c = kv.join()
    assert set(kv.feed({c: [1] * 17}).blocks[0].tolist()) == set(range(4)) - {int(first)}
    kv.clear()
    assert kv.free_blocks == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("jrft"), st.integers(0, 2), st.integers(1, 12)), max_size=30))
def test_no_two_sequences_share_a_block(actions):
    kv = cache(layers=1, blocks=5)
    texts: dict[int, int] = {}
    held: dict[int, list[int]] = {}
    for action, sequence, count in actions:
        try:
            if action == "j":
                sequence = kv.join()
                texts[sequence], held[sequence] = 0, []
            elif action == "r":
                kv.release(sequence)
                del texts[sequence], held[sequence]
            elif action == "t":
                kv.truncate(sequence, count)
                texts[sequence], held[sequence] = count, held[sequence][: -(-count // 8)]
            else:
                batch = kv.feed({sequence: [1] * count})
                texts[sequence] += count
                blocks = batch.blocks[0, : -(-texts[sequence] // 8)].tolist()
                assert blocks[: len(held[sequence])] == held[sequence], "blocks that hold tokens stay"
                held[sequence] = blocks
                at = np.arange(texts[sequence] - count, texts[sequence])
                assert batch.slots[0, :count].tolist() == [blocks[i // 8] * 8 + i % 8 for i in at]
                assert (batch.slots[0, count:] == 40).all()
        except ow.BoundsError:
            pass
        taken = [block for blocks in held.values() for block in blocks]
        assert len(set(taken)) == len(taken) == 5 - kv.free_blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("jrft"), st.integers(0, 3), st.integers(0, 12)), max_size=30))
def test_lengths_and_positions_follow_what_is_fed(actions):
    kv, model = cache(sequences=2), {}
    for action, sequence, count in actions:
        before = kv.lengths.tolist()
        try:
            if action == "j":
                model[kv.join()] = 0
            elif action == "r":
                kv.release(sequence)
                del model[sequence]
            elif action == "t":
                kv.truncate(sequence, count)
                model[sequence] = count
            else:
                batch = kv.feed({sequence: [1] * count})
                row = batch.positions[batch.rows[sequence]]
                assert row[:count].tolist() == list(range(model[sequence], model[sequence] + count))
                assert (row[count:] == 20).all()
                model[sequence] += count
                assert model[sequence] <= batch.reach
        except (ow.BoundsError, ow.ShapeError):
            assert kv.lengths.tolist() == before
        assert kv.lengths.tolist() == [model.get(i, 0) for i in range(2)]


@pytest.mark.parametrize("blocks", [None, 6])
def test_padding_changes_no_sequence(blocks):
    kv = cache(layers=1, sequences=2, blocks=blocks)
    tokens = 4

    @ow.compile(devices="cpu")
    def step(k, slots, blocks, reach):
        return kv.update(0, k, -k, slots, blocks, reach)

    a, b = kv.join(), kv.join()
    first = np.random.default_rng(0).standard_normal((2, 2, tokens, 4)).astype(np.float32)
    batch = kv.feed({a: [1, 1, 1], b: [1] * tokens})
    keys, values = step(first, batch.slots, batch.blocks, batch.reach)
    np.testing.assert_array_equal(keys[0, :, :3], first[0, :, :3])
    np.testing.assert_array_equal(keys[1, :, :4], first[1])
    np.testing.assert_array_equal(values, -keys)
    assert not keys[0, :, 3:].any()
    # A full sequence, and one that waits, stay as they are.
    kv.feed({b: [1] * 16})
    before = ow.read(kv.keys[0])
    batch = kv.feed({a: [1]})
    step(np.full((1, 2, 1, 4), np.nan, np.float32), batch.slots, batch.blocks, batch.reach)
    after = ow.read(kv.keys[0])
    changed = np.flatnonzero((after != before).any((1, 2)))
    assert changed.tolist() == batch.slots[0].tolist()
    # Truncated and released tokens become 0.
    kv.truncate(a, 3)
    np.testing.assert_array_equal(ow.read(kv.keys[0])[:-1], before[:-1])
    kv.release(a)
    kv.release(b)
    assert not ow.read(kv.keys[0])[:-1].any()
    assert not ow.read(kv.values[0])[:-1].any()
    kv.clear()
    assert not ow.read(kv.keys[0]).any()
    assert kv.lengths.tolist() == [0, 0]


def test_the_mask_shows_positions_up_to_a_tokens_own():
    kv = cache(dtype="f16")
    positions = ow.input("positions", (2, 3), "i64")
    got = ow.compile(kv.mask(positions, 8), devices="host")(np.array([[0, 1, 2], [7, 20, 3]]))
    assert got.shape == (2, 1, 3, 8)
    assert got.dtype == np.bool_
    visible = np.array([[1, 2, 3], [8, 8, 4]])
    np.testing.assert_array_equal(got[:, 0], np.arange(8) < visible[..., None])
    assert kv.mask(positions, 8) is kv.mask(positions, 8)


def test_layers_lie_on_their_devices():
    kv = cache(layers=3, device=["cpu", None, "host"], dtype="f16")
    assert [k.leaf.placement and k.leaf.placement.buffer.device.name for k in kv.keys] == ["cpu", None, "host"]
    assert {k.dtype.name for k in (*kv.keys, *kv.values)} == {"f16"}
    assert [k.name for k in kv.values] == ["cache.0.values", "cache.1.values", "cache.2.values"]
    assert "3 layers of 2 x 4 f16, 0 of 3 sequences" in repr(kv)


def with_one(act):
    def run():
        kv = cache()
        kv.join()
        act(kv)

    return run


Q = ow.input("q", (1, 2, 1, 4))
SLOTS, TABLE = ow.input("slots", (1, 1), "i64"), ow.input("blocks", (1, 1), "i64")


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: cache(layers=0), ow.ShapeError, "layers is a number from 1 on, not 0"),
        (lambda: cache(block=True), ow.ShapeError, "block is a number from 1 on, not True"),
        (lambda: cache(blocks=0), ow.ShapeError, "blocks is a number from 1 on, not 0"),
        (lambda: cache(dtype="i32"), ow.DTypeError, "f32, f16, bf16, f64 or q4_0, .*, not i32"),
        (lambda: cache(dtype="iq1_s"), ow.DTypeError, "or q4_0, .*, not iq1_s"),
        (lambda: cache(size=40, dtype="q8_0"), ow.LayoutError, "multiple of its block of 32"),
        (lambda: cache(device=["cpu"]), ow.ShapeError, "1 devices for 2 layers"),
        (with_one(lambda kv: [kv.join() for _ in range(3)]), ow.BoundsError, "all 3 sequences .* are in use; release"),
        (with_one(lambda kv: kv.release(1)), ow.BoundsError, r"sequence 1 is not in use \(in use: \[0\]\)"),
        (with_one(lambda kv: kv.release("a")), ow.BoundsError, "a sequence is a number that join"),
        (with_one(lambda kv: kv.truncate(0, 1)), ow.BoundsError, "has 0 tokens; it cannot be cut to 1"),
        (with_one(lambda kv: kv.truncate(0, 0.0)), ow.BoundsError, "it cannot be cut to 0.0"),
        (with_one(lambda kv: kv.feed({})), ow.ShapeError, "at least one sequence"),
        (with_one(lambda kv: kv.feed({0: []})), ow.ShapeError, "next tokens of sequence 0 are a list of ids"),
        (with_one(lambda kv: kv.feed({0: [1.5]})), ow.DTypeError, "tokens are integers; sequence 0 got float64"),
        (with_one(lambda kv: kv.feed({0: [1] * 21})), ow.BoundsError, "0 tokens and gets 21; the cache takes up to 20"),
        (lambda: cache().update(2, Q, Q, SLOTS, TABLE, 8), ow.BoundsError, "there is no layer 2; there are 2"),
        (lambda: cache().update(0, Q, Q, SLOTS, TABLE, 21), ow.BoundsError, r"reach is one of \(8, 16, 20\), not 21"),
        (lambda: cache().update(0, Q, Q[:, :1], SLOTS, TABLE, 8), ow.ShapeError, "needs k and v"),
        (lambda: cache().update(0, Q, Q, SLOTS[0], TABLE, 8), ow.ShapeError, "needs k and v"),
        (lambda: cache(blocks=4).update(0, Q, Q, SLOTS, TABLE, 16), ow.ShapeError, r"blocks \(n, 2\)"),
    ],
)
def test_what_is_wrong_is_said(act, error, message):
    with pytest.raises(error, match=message):
        act()


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("blocks", [None, 8])
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
@pytest.mark.parametrize("device", ["host", "cpu", "opencl", "torch"])
def test_a_quantized_cache_holds_what_was_rounded(device, dtype, blocks):
    """Attention over a cache of blocks is that over the values of the blocks, wherever they lie."""
    try:
        where = ow.device(device)
    except (ow.UnknownNameError, ow.PluginError) as missing:
        pytest.skip(str(missing))
    kv = cache(layers=1, sequences=2, capacity=32, size=64, dtype=dtype, blocks=blocks, device=where)
    assert kv.keys[0].nbytes == kv.keys[0].shape[0] * 2 * ow.as_dtype(dtype).row_bytes(64)

    @ow.compile(devices=where)
    def step(q, k, v, positions, slots, table, reach):
        return kv.attend(0, q, k, v, positions, slots, table, reach)

    def rounded(x):
        return ow.dequantize(ow.quantize(x, dtype)).astype(np.float64)

    rng = np.random.default_rng(0)
    seen: dict[int, list[Any]] = {kv.join(): [], kv.join(): []}
    for fed in ({0: 5}, {1: 9}, {0: 1, 1: 1}, {1: 4}, {0: 12, 1: 1}):
        batch = kv.feed({sequence: [1] * count for sequence, count in fed.items()})
        n, tokens = batch.slots.shape
        q, k, v = (rng.standard_normal((n, heads, tokens, 64)).astype(np.float32) for heads in (4, 2, 2))
        got = step(q, k, v, batch.positions, batch.slots, batch.blocks, batch.reach)
        for sequence, count in fed.items():
            row = batch.rows[sequence]
            seen[sequence].append((k[row, :, :count], v[row, :, :count]))
            keys, values = (np.repeat(rounded(np.concatenate(x, 1)), 2, 0) for x in zip(*seen[sequence], strict=True))
            scores = q[row, :, :count] @ keys.swapaxes(1, 2) / 8
            last = np.arange(keys.shape[1] - count, keys.shape[1])[:, None]
            want = softmax(np.where(np.arange(keys.shape[1]) > last, -np.inf, scores)) @ values
            np.testing.assert_allclose(got[row, :, :count], want, rtol=1e-3, atol=1e-3)
    kv.truncate(0, 3)
    free = np.setdiff1d(np.arange(kv.keys[0].shape[0] - 1), _slots(kv, {0: 3, 1: 15}))
    assert not ow.read(kv.keys[0])[free].any()
    assert ow.read(kv.keys[0]).any()
    kv.clear()
    assert not ow.read(kv.values[0]).any()


def _slots(kv, lengths):
    """The rows of the states that hold the tokens of sequences."""
    return np.concatenate([
        np.array(kv._tables[s])[np.arange(n) // kv._room] * kv._room + np.arange(n) % kv._room
        for s, n in lengths.items()
    ])  # fmt: skip
