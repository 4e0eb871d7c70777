"""Repacked weights: nothing is rounded, each is there once."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc

import numpy as np
import onnxruntime
import pytest

import opweave as ow
from opweave.graph.dtypes import QUANTIZED, f32
from opweave.ops.blocks import block_parts, dequantize
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.reservations import RESERVATIONS
from opweave_ort import weights
from opweave_ort.model import Model
from opweave_ort.runtime import RUNTIME, allocated
from opweave_ort.sessions import SESSIONS, Session
from opweave_ort.weights import FOUR_BITS, REVERSIBLE, block_length, pack, pieces

NAMES = [t.name for t in QUANTIZED]


def random_blocks(dtype, rows, count, seed=0):
    """Rows of blocks with any integers and finite scales."""
    rng = np.random.default_rng(seed)
    while True:
        data = rng.integers(0, 256, (rows, count * dtype.itemsize), np.uint8)
        with np.errstate(all="ignore"):
            values = dequantize(data, dtype)
        if np.isfinite(values).all() and np.abs(values).max() < 1e30:
            return data


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_blocks_make_their_values(name):
    dtype = next(t for t in QUANTIZED if t.name == name)
    data = random_blocks(dtype, 2, 1)
    parts = block_parts(data, dtype)
    n = parts.integers.shape[-1] // parts.scales.shape[-1]
    values = parts.integers.astype(np.float32) * np.repeat(parts.scales, n, -1)
    if parts.offsets is not None:
        values = values + np.repeat(parts.offsets, n, -1)
    assert np.array_equal(values, dequantize(data, dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["halves", "bytes"])
def test_a_weight_is_repacked_some_rows_at_a_time(name, form, monkeypatch):
    dtype = next(t for t in QUANTIZED if t.name == name)
    data = random_blocks(dtype, 7, 2)
    whole = pack(data, dtype, form)
    for rows in (1, 2, 6, 7):
        monkeypatch.setattr(weights, "TILE", rows * 2 * dtype.block)
        some = pack(data, dtype, form)
        assert some.keys() == whole.keys()
        for piece, array in whole.items():
            np.testing.assert_array_equal(some[piece], array)


@pytest.mark.parametrize("name", NAMES)
def test_a_repacked_weight_has_the_same_values(name):
    dtype = next(t for t in QUANTIZED if t.name == name)
    data = random_blocks(dtype, 2, 2)
    shape = (2, 2 * dtype.block)
    arrays = pack(data, dtype, "halves")
    assert {n: (a.dtype, a.shape) for n, a in arrays.items()} == {
        p.name: (p.dtype.numpy, p.shape) for p in pieces(dtype, shape, "halves")
    }

    def part(key, scales, zero):
        q = np.stack([arrays[key] & 15, arrays[key] >> 4], -1).reshape(*arrays[key].shape[:-1], -1).astype(np.float64)
        return (q - zero) * arrays[scales][..., None].astype(np.float64)

    signed = "offsets" not in arrays
    if name in FOUR_BITS:
        values = part("low", "scales", 8 * signed)
    else:
        values = part("high", "high_scales", 8 * signed) + part("low", "scales", 0)
    if not signed:
        values = values + arrays["offsets"].T[..., None]
    assert values.shape[-1] == block_length(dtype)
    np.testing.assert_allclose(values.reshape(shape), dequantize(data, dtype), rtol=3e-7, atol=0)


def test_a_repacked_weight_is_there_once_and_goes_with_its_programs(device):
    dtype = next(t for t in QUANTIZED if t.name == "q4_0")
    w = ow.weights({"w": ow.Blocks(random_blocks(dtype, 8, 2), (8, 64), "q4_0")})
    before = RESERVATIONS.reserved
    with ow.Scheduler(device) as scheduler:
        programs = [scheduler.build(ow.linear(ow.input("x", (n, 64)), w["w"])) for n in (1, 3)]
        assert [p.memory[device.name].weights for p in programs] == [8 * 32 + 8 * 2 * 4] * 2
        assert list(w["w"].leaf.copies) == [device.buffer_type("packed")]
        assert RESERVATIONS.reserved - before < 2 * 320 + 2 * 1024, "there is one"
        x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
        want = x @ dequantize(random_blocks(dtype, 8, 2), dtype).T
        np.testing.assert_allclose(programs[1].run(x=x), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    del programs, scheduler
    gc.collect()
    assert RESERVATIONS.reserved == before
    assert list(w["w"].leaf.copies) == []


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_placed_repacked_are_read_back_bit_for_bit(device, name):
    dtype = next(t for t in QUANTIZED if t.name == name)
    data = random_blocks(dtype, 16, 2, seed=3)
    shape = (16, 2 * dtype.block)
    x = np.random.default_rng(0).standard_normal((2, shape[1])).astype(np.float32)
    for short in ("packed", "packed_int8"):
        kind, blocks = device.buffer_type(short), ow.Blocks(data, shape, name)
        if short == "packed_int8" and name in FOUR_BITS:
            with pytest.raises(ow.UnsupportedOpError, match="of 4 bits"):
                ow.weights({"w": blocks}, buffer_type=kind)
            continue
        w = ow.weights({"w": blocks}, buffer_type=kind)["w"]
        assert w.placement.buffer.type is kind
        size = sum(array.nbytes for array in pack(data, dtype, kind.form).values())
        assert kind.alloc_size(w) == size + (0 if name in REVERSIBLE else data.nbytes)
        buffer, offset = w.placement.buffer, w.placement.offset
        assert np.array_equal(buffer.read(offset, w.nbytes), data.ravel())
        assert np.array_equal(buffer.read(offset + 7, 30), data.ravel()[7:37])
        precision = "exact" if short == "packed" else "int8"
        with ow.Scheduler([device, HostDevice()]) as scheduler:
            program = scheduler.build(ow.linear(ow.input("x", x.shape), w), precision=precision)
            assert program.device_of(program.partition.graph.outputs[0]) is device
            assert program.n_copies == 0
            want = x.astype(np.float64) @ dequantize(data, dtype).astype(np.float64).T
            bound = (1e-4 if precision == "exact" else 0.1) * np.abs(want).max()
            np.testing.assert_allclose(program.run(x=x), want, rtol=1e-3, atol=bound)


def test_a_split_that_writes_a_state_reads_them_too(device):
    """Which of its operands it overwrites is told by addresses, and repacked weights have none."""
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    blocks = ow.quantize(w, "q8_0")
    x, total = ow.input("x", (4, 64)), ow.state("total of products", (4, 64))
    v = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(ow.assign(total, total + ow.linear(x, ow.weights({"w": blocks})["w"])))
        for n in (1, 2):
            want = n * v @ ow.dequantize(blocks).T
            np.testing.assert_allclose(program.run(x=v), want, rtol=1e-3, atol=1e-3)


def test_scales_that_are_no_numbers_are_kept_as_they_are(device):
    data = random_blocks(next(t for t in QUANTIZED if t.name == "q8_0"), 4, 2)
    data[1, :2] = 1, 0x7C  # a signalling NaN, which loses a bit when it is converted
    w = ow.weights({"w": ow.Blocks(data, (4, 64), "q8_0")}, buffer_type=device.buffer_type("packed"))["w"]
    assert np.array_equal(w.placement.buffer.read(w.placement.offset, w.nbytes), data.ravel())


def test_explain_counts_repacked_weights_and_they_can_be_declined(device, monkeypatch):
    dtype = next(t for t in QUANTIZED if t.name == "q4_0")
    w = ow.weights({"w": ow.Blocks(random_blocks(dtype, 8, 2), (8, 64), "q4_0")})
    graph = ow.linear(ow.input("x", (1, 64)), w["w"])
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(graph)
        assert "weights in ortdevice.packed" in str(program.explain())
        assert [row.repacked for row in program.explain().nodes] == ["ortdevice.packed"]
        assert program.memory[device.name].weights == 320
    with ow.Scheduler(device, repack=False) as scheduler:  # ONNX Runtime has no product with blocks
        assert "1 step in one session with 320 bytes of repacked weights" in str(scheduler.build(graph).explain())
    monkeypatch.setenv("OPWEAVE_ORT_PACK", "0")
    declining = type(device)(device.provider)
    assert declining.buffer_types == (declining.default_buffer_type,)
    with ow.Scheduler(declining) as scheduler, pytest.raises(ow.UnsupportedOpError, match="OPWEAVE_ORT_PACK=0"):
        scheduler.build(graph)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q8_0", "mxfp4"])
def test_int8_is_computed_where_it_is_allowed_and_stays_within_its_limits(device, name):
    dtype = next(t for t in QUANTIZED if t.name == name)
    blocks = ow.quantize(np.random.default_rng(1).standard_normal((16, 512)).astype(np.float32), name)
    data, w = blocks.data.reshape(16, -1), ow.weights({"w": blocks})
    graph = ow.linear(ow.input("x", (4, 512)), w["w"])
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    want = x.astype(np.float64) @ dequantize(data, dtype).astype(np.float64).T
    with ow.Scheduler(device) as scheduler:
        exact, rough = (scheduler.build(graph, precision=p) for p in ("exact", "int8"))
        assert "in int8" in str(rough.explain())
        assert "in int8" not in str(exact.explain())

        def error(got):
            return float(np.mean((got - want) ** 2) / np.mean(want**2))

        assert error(exact.run(x=x)) < 1.6e-11
        assert 1e-8 < error(rough.run(x=x)) < 2e-4


def test_a_session_reads_weights_where_they_lie(device, monkeypatch):
    monkeypatch.setenv("OPWEAVE_ORT_PACK", "0")
    model, array = Model(), np.full((64, 64), 2, np.float32)
    weight = model.weight("w0", f32, array.shape)
    model.output(model("MatMul", model.input("in0", f32, (1, 64)), weight), f32, (1, 64))
    value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    session = Session(model.serialized(), {"w0": value}, ["w0"], device.provider, device.options, 1)
    array[:] = 3
    assert session.native.run(None, {"in0": np.ones((1, 64), np.float32)})[0][0, 0] == 3 * 64


JOINED = {
    "where": (lambda w, x, z: ow.where(w, x, z), np.where, bool),
    "where between": (lambda w, x, z: ow.where(x > z, w, z), lambda w, x, z: np.where(x > z, w, z), np.float32),
    "add": (lambda w, x, z: (x + w) * z, lambda w, x, z: (x + w) * z, np.float32),
    "maximum": (lambda w, x, z: ow.maximum(ow.maximum(x, w), z), lambda w, x, z: np.maximum(np.maximum(x, w), z),
                np.float32),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 3), (3, 1), (1, 3), (3,), (3, 3, 3), (1, 3, 3), (3, 1, 3)], ids=str)
@pytest.mark.parametrize("joined", JOINED)
def test_a_weight_beside_transposed_values_keeps_its_axes(device, joined, shape):
    """ONNX Runtime moves the transposition behind the operator and transposes the weight instead."""
    ours, truth, kind = JOINED[joined]
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((2, 3, 3)).astype(np.float32)
    w = (rng.standard_normal(shape) > 0) if kind is bool else rng.standard_normal(shape).astype(kind)
    with ow.Scheduler(device) as scheduler:
        values = ow.input("x", (3, 3)).T, ow.input("z", (3, 3)).T
        program = scheduler.build(ours(ow.weights({"w": w})["w"], *values))
        assert np.array_equal(program.run(x=x, z=z), truth(w, x.T, z.T))


def test_sizes_that_share_a_session_have_results_without_axes(device):
    """The number that the sum is divided by differs, so that it becomes an input of the session for both."""
    with ow.Scheduler(device) as scheduler:
        programs = [scheduler.build(ow.var(ow.input("x", (n, n)).T)) for n in (3, 2)]
        for n, program in zip((3, 2), programs, strict=True):
            x = np.arange(n * n, dtype=np.float32).reshape(n, n)
            assert program.run(x=x).shape == ()
            np.testing.assert_allclose(program.run(x=x), x.var(ddof=1), rtol=1e-6)


def test_copies_that_onnx_runtime_packs_are_counted_once_a_session_and_can_be_declined(device, monkeypatch):
    arrays = {"w": np.ones((96, 64), np.float32)}

    def program(scheduler, rows, w):
        return scheduler.build(ow.linear(ow.input("x", (rows, 64)), w))

    with ow.Scheduler(device) as scheduler:
        w = ow.weights(arrays)["w"]
        made = SESSIONS.made
        programs = [program(scheduler, rows, w) for rows in (2, 3, 4, 5)]
        assert SESSIONS.made == made + 2
        assert {p.memory[device.name].library for p in programs} == {96 * 64 * 4}
    monkeypatch.setenv("OPWEAVE_ORT_PACK", "0")
    with ow.Scheduler(type(device)(device.provider)) as scheduler:
        made = program(scheduler, 2, ow.weights(arrays)["w"])
        assert [use.library for use in made.memory.values()] == [0]
        x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
        np.testing.assert_allclose(made.run(x=x), x.sum(1, keepdims=True).repeat(96, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not allocated(), reason="this C library does not tell what it has allocated")
def test_what_the_arena_takes_is_counted_when_a_program_first_runs(device):
    x = ow.input("x", (1 << 10, 1 << 12))
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(ow.sum(ow.exp(ow.tanh(x).T) @ ow.exp(x[:, :2])))
        assert program.memory[device.name].library == 0
        before, needed = RUNTIME.arena, 1 << 24
        program.run(x=np.zeros(x.shape, np.float32))
        taken = program.memory[device.name].library
        assert needed <= taken <= 8 * needed
        assert RUNTIME.arena - before == taken
        program.run(x=np.zeros(x.shape, np.float32))
        assert program.memory[device.name].library == taken
