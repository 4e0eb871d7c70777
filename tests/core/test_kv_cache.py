"""The cache's bookkeeping: places, positions and padding of ragged batches, and what is refused.

That attention over it is right is shown by the decoder in `examples`, in ``tests/examples``.
"""

from __future__ import annotations

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
    assert batch.slots.tolist() == [0, 1, 2]
    assert batch.last.tolist() == [0, 4, 10]
    assert batch.reach == 8
    assert batch.rows == {0: 0, 1: 1, 2: 2}
    assert kv.lengths.tolist() == [3, 0, 3]
    assert all(array.dtype == np.int64 for array in batch[:4])


def test_one_sequence_alone_is_one_row():
    kv = cache()
    kv.join()
    b = kv.join()
    batch = kv.feed({b: range(9)})
    assert batch.tokens.shape == (1, 16)
    assert (batch.slots.tolist(), batch.last.tolist(), batch.reach, batch.rows) == ([1], [8], 16, {1: 0})


def test_reaches_are_doubled_blocks_up_to_the_capacity():
    assert cache().reaches == (8, 16, 20)
    assert cache(block=64).reaches == (20,)
    assert cache(capacity=32).reaches == (8, 16, 32)
    assert cache(capacity=1).reaches == (1,)


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


def test_what_padding_writes_is_seen_by_nobody():
    kv = cache(layers=1, sequences=2)
    tokens = 4

    @ow.compile(devices="cpu")
    def step(k, positions, slots, reach):
        return kv.update(0, k, -k, positions, slots, reach)

    a, b = kv.join(), kv.join()
    first = np.random.default_rng(0).standard_normal((2, 2, tokens, 4)).astype(np.float32)
    batch = kv.feed({a: [1, 1, 1], b: [1] * tokens})
    keys, values = step(first, batch.positions, batch.slots, batch.reach)
    np.testing.assert_array_equal(keys[0, :, :3], first[0, :, :3])
    np.testing.assert_array_equal(keys[1, :, :4], first[1])
    np.testing.assert_array_equal(values, -keys)
    assert not keys[0, :, 3:].any()
    # A full sequence, and one that waits, stay as they are.
    kv.feed({b: [1] * 16})
    batch = kv.feed({a: [1], b: [1]}) if kv.lengths[b] < 20 else kv.feed({a: [1]})
    before = ow.read(kv.keys[0])[1]
    step(np.full((1, 2, 1, 4), np.nan, np.float32), batch.positions, batch.slots, batch.reach)
    np.testing.assert_array_equal(ow.read(kv.keys[0])[1], before)
    kv.clear()
    assert not ow.read(kv.keys[0]).any()
    assert kv.lengths.tolist() == [0, 0]


def test_the_mask_shows_positions_up_to_a_tokens_own():
    kv = cache(dtype="f16")
    positions = ow.input("positions", (2, 3), "i64")
    got = ow.compile(kv.mask(positions, 8), devices="host")(np.array([[0, 1, 2], [7, 20, 3]]))
    assert got.shape == (2, 1, 3, 8)
    assert got.dtype == np.float16
    visible = np.array([[1, 2, 3], [8, 8, 4]])
    np.testing.assert_array_equal(got[:, 0] == 0, np.arange(8) < visible[..., None])
    assert np.isneginf(got[got != 0]).all()
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
AT, SLOTS = ow.input("at", (1, 1), "i64"), ow.input("slots", (1,), "i64")


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: cache(layers=0), ow.ShapeError, "layers is a number from 1 on, not 0"),
        (lambda: cache(block=True), ow.ShapeError, "block is a number from 1 on, not True"),
        (lambda: cache(dtype="i32"), ow.DTypeError, "f32, f16, bf16 or f64, not i32"),
        (lambda: cache(dtype="q8_0"), ow.DTypeError, "f32, f16, bf16 or f64, not q8_0"),
        (lambda: cache(device=["cpu"]), ow.ShapeError, "1 devices for 2 layers"),
        (with_one(lambda kv: [kv.join() for _ in range(3)]), ow.BoundsError, "all 3 sequences .* are in use; release"),
        (with_one(lambda kv: kv.release(1)), ow.BoundsError, r"sequence 1 is not in use \(in use: \[0\]\)"),
        (with_one(lambda kv: kv.release("a")), ow.BoundsError, "a sequence is a number that join"),
        (with_one(lambda kv: kv.truncate(0, 1)), ow.BoundsError, "has 0 tokens; it cannot be cut to 1"),
        (with_one(lambda kv: kv.feed({})), ow.ShapeError, "at least one sequence"),
        (with_one(lambda kv: kv.feed({0: []})), ow.ShapeError, "next tokens of sequence 0 are a list of ids"),
        (with_one(lambda kv: kv.feed({0: [1.5]})), ow.DTypeError, "tokens are integers; sequence 0 got float64"),
        (with_one(lambda kv: kv.feed({0: [1] * 21})), ow.BoundsError, "0 tokens and gets 21; the cache takes up to 20"),
        (lambda: cache().update(2, Q, Q, AT, SLOTS, 8), ow.BoundsError, "there is no layer 2; there are 2"),
        (lambda: cache().update(0, Q, Q, AT, SLOTS, 21), ow.BoundsError, "reach is a number from 1 to 20, not 21"),
        (lambda: cache().update(0, Q, Q[:, :1], AT, SLOTS, 8), ow.ShapeError, "needs k and v"),
        (lambda: cache().update(0, Q, Q, AT[0], SLOTS, 8), ow.ShapeError, "needs k and v"),
    ],
)
def test_what_is_wrong_is_said(act, error, message):
    with pytest.raises(error, match=message):
        act()
