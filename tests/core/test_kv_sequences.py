"""What a cache computes, against attention of each whole sequence in NumPy: windows in rings, layers of several shapes
and types, forks, saved sequences, masks of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from tests.core.test_kv_cache import cache, softmax

DEVICES = ["host", "cpu", "opencl", "torch", "ort"]


def found(name):
    try:
        return ow.device(name)
    except (ow.UnknownNameError, ow.PluginError) as missing:
        pytest.skip(str(missing))


def with_host(where):
    return [where] if where.name == "host" else [where, "host"]


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", "2")
    registry = ow.Registry()
    return [registry.device(f"cpu:{i}") for i in range(2)]


class Decoder:
    """A cache whose layers all get the same queries, keys and values, and the truth beside it."""

    def __init__(self, where: Any, **options: Any) -> None:
        self.kv = ow.KVCache(**{"sequences": 3, "capacity": 40, "groups": 2, "size": 8, "block": 8, **options})
        self.windows = options.get("window") or [None] * options["layers"]
        self.rng = np.random.default_rng(0)
        self.seen: dict[int, tuple[Any, Any]] = {}
        sizes = {(k.shape[2], v.shape[2]) for k, v in zip(self.kv.keys, self.kv.values, strict=True)}
        self.size, self.out = max(sizes)

        @ow.compile(devices=where)
        def step(q, k, v, positions, slots, blocks, reach):
            mixed = []
            for i, (keys, values) in enumerate(zip(self.kv.keys, self.kv.values, strict=True)):
                groups, size, out = keys.shape[1], keys.shape[2], values.shape[2]
                mixed.append(self.kv.attend(i, q[:, :4, :, :size], k[:, :groups, :, :size], v[:, :groups, :, :out],
                                            positions, slots, blocks, reach))  # fmt: skip
            return mixed

        self.step = step

    def feed(self, counts, tolerance=1e-4):
        batch = self.kv.feed({sequence: [1] * count for sequence, count in counts.items()})
        n, tokens = batch.slots.shape
        q = self.rng.standard_normal((n, 4, tokens, self.size)).astype(np.float32)
        k = self.rng.standard_normal((n, 4, tokens, self.size)).astype(np.float32)
        v = self.rng.standard_normal((n, 4, tokens, self.out)).astype(np.float32)
        got = self.step(q, k, v, batch.positions, batch.slots, batch.blocks, batch.reach)
        for sequence, count in counts.items():
            row = batch.rows[sequence]
            old = self.seen.get(sequence, (k[row, :, :0], v[row, :, :0]))
            keys, values = (np.concatenate([a, b[row, :, :count]], 1) for a, b in zip(old, (k, v), strict=True))
            self.seen[sequence] = keys, values
            assert self.kv.lengths[sequence] == keys.shape[1]
            for i, window in enumerate(self.windows):
                want = self.truth(i, q[row, :, :count], keys, values, window)
                np.testing.assert_allclose(got[i][row, :, :count], want, rtol=tolerance, atol=tolerance)

    def truth(self, i, q, keys, values, window):
        groups, size, out = self.kv.keys[i].shape[1], self.kv.keys[i].shape[2], self.kv.values[i].shape[2]
        keys, values = (np.repeat(x[:groups, :, :m], 4 // groups, 0) for x, m in ((keys, size), (values, out)))
        scores = q[:, :, :size].astype(np.float64) @ keys.swapaxes(1, 2) / np.sqrt(size)
        at, own = np.arange(keys.shape[1]), np.arange(keys.shape[1] - q.shape[1], keys.shape[1])[:, None]
        hidden = (at > own) | (at <= own - (window or keys.shape[1]))
        return softmax(np.where(hidden, -np.inf, scores)) @ values

    def forget(self, sequence, length):
        self.kv.truncate(sequence, length)
        self.seen[sequence] = tuple(x[:, :length] for x in self.seen[sequence])


FEEDS = [{0: 3}, {1: 7, 0: 1}, {1: 12}, {2: 20}, {0: 1, 1: 1, 2: 1}, {1: 1}, {0: 8, 1: 2}, {2: 1, 0: 1}]  # fmt: skip


@pytest.mark.parametrize("blocks", [None, 12])
@pytest.mark.parametrize("device", DEVICES)
def test_a_window_sees_the_last_tokens_and_stores_no_others(device, blocks):
    where = found(device)
    decoder = Decoder(with_host(where), layers=3, window=[None, 6, 64], blocks=blocks, device=where)
    kv = decoder.kv
    assert [k.shape[0] for k in kv.keys] == [(12 * 8 if blocks else 3 * 40) + 1, 3 * 6 + 1, kv.keys[0].shape[0]]
    for _ in range(3):
        kv.join()
    for counts in FEEDS:
        decoder.feed(counts)
    decoder.forget(1, int(kv.lengths[1]) - 1)
    decoder.feed({1: 3})
    with pytest.raises(ow.BoundsError, match="windows keep the last 6"):
        kv.truncate(1, 9)
    decoder.forget(1, 0)
    decoder.feed({1: 4, 2: 1})
    kv.clear()
    assert not any(ow.read(each).any() for each in (*kv.keys, *kv.values))


def test_layers_over_two_devices_with_memories_of_their_own(two_cpus):
    decoder = Decoder([*two_cpus, "host"], layers=2, window=[6, None], device=list(two_cpus), sequences=2)
    decoder.kv.join()
    decoder.kv.join()
    for counts in [{0: 3}, {1: 7, 0: 1}, {0: 1, 1: 1}, {1: 12}, {0: 9, 1: 2}]:
        decoder.feed(counts)


@pytest.mark.parametrize("device", DEVICES)
def test_each_layer_has_its_shape_and_types(device):
    where = found(device)
    decoder = Decoder(with_host(where), layers=3, groups=[1, 2, 4], size=[8, 32, 32], value_size=[4, 8, 32],
                      dtype=["f32", "f16", "q8_0"], value_dtype=["f32", "f32", "f16"], window=[None, 5, 7],
                      device=where)  # fmt: skip
    assert [(k.shape[1:], k.dtype.name) for k in decoder.kv.keys] == [
        ((1, 8), "f32"), ((2, 32), "f16"), ((4, 32), "q8_0")
    ]  # fmt: skip
    assert [(v.shape[1:], v.dtype.name) for v in decoder.kv.values] == [
        ((1, 4), "f32"), ((2, 8), "f32"), ((4, 32), "f16")
    ]  # fmt: skip
    assert "1 x 8 f32 or 2 x 32 f16 or 4 x 32 q8_0" in repr(decoder.kv)
    for _ in range(3):
        decoder.kv.join()
    for counts in FEEDS[:8]:
        decoder.feed(counts, 0.03)


def begun(device, blocks, window, tokens):
    """A decoder of a layer that sees all and one with a window, its cache, and a sequence of so many tokens."""
    where = found(device)
    decoder = Decoder(with_host(where), layers=2, window=[None, window], blocks=blocks, device=where)
    first = decoder.kv.join()
    decoder.feed({first: tokens})
    return decoder, decoder.kv, first


@pytest.mark.parametrize("blocks", [None, 9])
@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_begins_as_its_origin_and_goes_on_alone(device, blocks):
    decoder, kv, first = begun(device, blocks, window=6, tokens=19)
    other = kv.fork(first)
    decoder.seen[other] = decoder.seen[first]
    assert kv.lengths.tolist() == [19, 19, 0]
    if blocks:
        assert kv.free_blocks == 5, "two blocks are shared, the third one is copied"
    decoder.feed({first: 1, other: 1})
    decoder.feed({other: 9})
    kv.release(first)
    decoder.feed({other: 1})
    if blocks:
        assert kv.free_blocks == 5
        third = kv.fork(other)
        assert kv.free_blocks == 4
        kv.truncate(third, 0)
        assert kv.free_blocks == 5
    decoder.feed({other: 1})


@pytest.mark.parametrize("blocks", [None, 9])
@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_begins_with_the_first_tokens_of_its_origin(device, blocks):
    decoder, kv, first = begun(device, blocks, window=12, tokens=11)
    for length in (8, 9, 10):
        other = kv.fork(first, length)
        decoder.seen[other] = tuple(x[:, :length] for x in decoder.seen[first])
        assert kv.tokens(other) == [1] * length
        assert kv.free_sequences == 1
        assert kv.free_blocks == (0 if blocks is None else 7 if length == 8 else 6)
        decoder.feed({other: 1})
        decoder.feed({other: 7})
        kv.release(other)
    decoder.feed({first: 4})
    other = kv.fork(first, 14)
    decoder.seen[other] = tuple(x[:, :14] for x in decoder.seen[first])
    decoder.feed({other: 1, first: 1})
    for length, message in ((5, "windows keep the last 12"), (17, "cannot be cut to 17"), (-1, "cannot be cut")):
        with pytest.raises(ow.BoundsError, match=message):
            kv.fork(first, length)
    assert kv.free_sequences == 1


def test_a_ring_that_was_cut_has_forgotten_what_a_second_cut_would_need(tmp_path):
    """Also in forks, and in what is restored: the token before the window was overwritten."""
    decoder = Decoder(["host"], layers=2, window=[6, None], sequences=3)
    kv = decoder.kv
    first = kv.join()
    decoder.feed({first: 12})
    assert kv.shortest(first) == 11
    decoder.forget(first, 11)
    other = kv.fork(first)
    kv.save(first, tmp_path / "sequence")
    third = kv.restore(tmp_path / "sequence")
    decoder.seen |= dict.fromkeys((other, third), decoder.seen[first])
    for sequence in (first, other, third):
        assert kv.shortest(sequence) == 11
        for call in (kv.truncate, kv.fork):
            with pytest.raises(ow.BoundsError, match="had 12 tokens, of which windows keep the last 6"):
                call(sequence, 10)
        decoder.feed({sequence: 1})
        decoder.forget(sequence, 11)
        decoder.feed({sequence: 4})
        assert kv.shortest(sequence) == 14
    decoder.forget(third, 0)
    decoder.feed({third: 6})
    assert kv.shortest(third) == 0
    decoder.forget(third, 2)
    decoder.feed({third: 5})


def test_a_shared_block_is_copied_before_it_is_cut():
    decoder = Decoder(["host"], layers=1, blocks=6)
    kv = decoder.kv
    first = kv.join()
    decoder.feed({first: 16})
    other = kv.fork(first)
    decoder.seen[other] = decoder.seen[first]
    assert kv.free_blocks == 4
    decoder.forget(other, 11)
    assert kv.free_blocks == 3
    decoder.feed({other: 3})
    decoder.feed({first: 1, other: 1})
    third = kv.fork(other)
    decoder.seen[third] = decoder.seen[other]
    assert kv.free_blocks == 1
    decoder.forget(first, 16)
    decoder.feed({third: 9})
    assert kv.free_blocks == 1
    with pytest.raises(ow.BoundsError, match="in use"):
        kv.fork(third)
    kv.release(first)
    decoder.feed({third: 1, other: 2})
    kv.truncate(other, 16)
    before = kv.free_blocks
    again = kv.fork(other)
    kv.feed({other: [1] * 8 * before})
    with pytest.raises(ow.BoundsError, match="none is free for a copy"):
        kv.truncate(again, 12)
    assert kv.lengths[again] == 16


@pytest.mark.parametrize("blocks", [None, 12])
@pytest.mark.parametrize("device", ["host", "cpu", "opencl"])
def test_a_sequence_is_saved_and_restored_elsewhere(device, blocks, tmp_path):
    where = found(device)
    options: dict[str, Any] = {"layers": 2, "window": [None, 6], "size": 32, "dtype": ["f16", "q8_0"]}
    here, there = (Decoder(["host"], **options), Decoder(with_host(where), **options, blocks=blocks, device=where))
    a = here.kv.join()
    here.feed({a: 17}, 0.05)
    here.kv.save(a, tmp_path / "a")
    there.kv.join()
    there.feed({0: 5}, 0.05)
    b = there.kv.restore(tmp_path / "a")
    assert (b, there.kv.lengths.tolist()) == (1, [5, 17, 0])
    assert there.kv.tokens(b) == [1] * 17
    there.seen[b] = here.seen[a]
    there.feed({b: 1, 0: 1}, 0.05)
    there.feed({b: 3}, 0.05)
    there.kv.save(there.kv.join(), tmp_path / "empty")
    there.kv.release(2)
    assert there.kv.lengths[there.kv.restore(tmp_path / "empty")] == 0


def test_files_that_hold_no_such_sequence_are_refused(tmp_path):
    decoder = Decoder(["host"], layers=1)
    kv = decoder.kv
    decoder.feed({kv.join(): 20})
    path = tmp_path / "a"
    kv.save(0, path)
    data = path.read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(60):
        broken = bytearray(data)
        at = int(rng.integers(len(broken)))
        if rng.integers(2):
            broken[at] ^= int(rng.integers(1, 256))
        else:
            del broken[at:]
        path.write_bytes(broken)
        try:
            again = kv.restore(path)
        except (ow.FormatError, ow.ShapeError):
            refused += 1
            continue
        assert len(broken) == len(data), "only padding changes nothing"
        keys = ow.read(kv.keys[0])
        np.testing.assert_array_equal(keys[40 * again :][:20], keys[:20])
        kv.release(again)
    assert refused > 50
    path.write_bytes(ow.Graph(ow.input("x", (2,)) + 1.0).to_bytes())
    with pytest.raises(ow.FormatError, match="no saved sequence"):
        kv.restore(path)
    path.write_bytes(data)
    with pytest.raises(ow.FormatError, match="label '', not 'another model'"):
        kv.restore(path, "another model")
    for other, error, message in (
        ({"size": 4}, ow.ShapeError, "other layers"), ({"window": 5}, ow.ShapeError, "other layers"),
        ({"capacity": 16}, ow.BoundsError, "20 tokens, and a sequence here up to 16"),
        ({"blocks": 2}, ow.BoundsError, "take 3 more blocks"),
    ):  # fmt: skip
        small = Decoder(["host"], **{"layers": 1, **other}).kv
        with pytest.raises(error, match=message):
            small.restore(path)
        assert [small.join() for _ in range(3)] == [0, 1, 2], "the refused file took no sequence"
    with pytest.raises(FileNotFoundError):
        kv.restore(tmp_path / "nothing")


@pytest.mark.parametrize("device", ["host", "cpu", "opencl"])
def test_a_mask_of_ones_own_hides_more(device):
    where = found(device)
    kv = ow.KVCache(1, 1, 32, 1, 4, device=where)
    kv.join()

    @ow.compile(devices=with_host(where))
    def step(q, seen, positions, slots, blocks, reach):
        return kv.attend(0, q, q, q, positions, slots, blocks, reach, mask=seen)

    batch = kv.feed({0: [1] * 8})
    q = np.random.default_rng(0).standard_normal((1, 1, 8, 4)).astype(np.float32)
    seen = np.ones((1, 1, 8, 32), np.bool_)
    seen[..., 2:5] = False
    seen[..., 0] = True
    got = step(q, seen, batch.positions, batch.slots, batch.blocks, batch.reach)
    scores = q[0, 0] @ q[0, 0].T / 2
    hidden = (np.arange(8) > np.arange(8)[:, None]) | ~seen[0, 0, :, :8]
    np.testing.assert_allclose(got[0, 0], softmax(np.where(hidden, -np.inf, scores)) @ q[0, 0], rtol=1e-5, atol=1e-5)


def test_masks_windows_and_lengths_that_are_not_possible():
    q = ow.input("q", (1, 1, 1, 4))
    at, table = ow.input("at", (1, 1), "i64"), ow.input("table", (1, 1), "i64")

    def attend(kv, **options):
        return kv.attend(0, q, q, q, at, at, table, 32, **options)

    plain, ringed = ow.KVCache(1, 1, 32, 1, 4), ow.KVCache(1, 1, 32, 1, 4, window=8)
    with pytest.raises(ow.DTypeError, match="a mask is a bool tensor"):
        attend(plain, mask=np.ones((1, 1, 1, 32), np.bool_))
    with pytest.raises(ow.DTypeError, match="a mask is a bool tensor"):
        attend(plain, mask=ow.input("m", (1, 1, 1, 32)))
    with pytest.raises(ow.ShapeError):
        attend(plain, mask=ow.input("m", (1, 1, 1, 31), "bool"))
    with pytest.raises(ow.LayoutError, match="keeps its window in a ring"):
        attend(ringed, mask=ow.input("m", (1, 1, 1, 32), "bool"))
    with pytest.raises(ow.DTypeError, match="no option causal"):
        attend(plain, causal=True)
    with pytest.raises(ow.ShapeError, match="has a window of 8; it needs the positions"):
        ringed.update(0, q, q, at, table, 32)
    for wrong in ({"window": 0}, {"window": [8, 8]}, {"groups": [1, 2]}, {"value_size": True}):
        with pytest.raises(ow.ShapeError, match="KVCache"):
            cache(**{"layers": 1, **wrong})
    with pytest.raises(ValueError, match="read-only"):
        plain.lengths[0] = 3
