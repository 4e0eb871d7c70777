"""Repacked weights: nothing is rounded, and no copies stay but those of sessions."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc

import numpy as np
import onnxruntime
import pytest

import opweave as ow
from opweave.graph.dtypes import QUANTIZED, f32
from opweave.ops.blocks import block_parts, dequantize
from opweave.scheduler.place.support import unbound_step
from opweave_ort import weights
from opweave_ort.model import Model
from opweave_ort.runtime import RUNTIME, allocated
from opweave_ort.sessions import SESSIONS, open_session
from opweave_ort.weights import FOUR_BITS, block_length, pack, pieces

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


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "q8_0"])
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_a_session_takes_what_the_device_says_and_no_copy_of_ours_stays(device, name, precision):
    """The shape is so large that ONNX Runtime's own objects do not count."""
    dtype = next(t for t in QUANTIZED if t.name == name)
    shape = (1 << 14, 512)
    w = ow.weights({"w": ow.Blocks(np.tile(random_blocks(dtype, 1, 512 // dtype.block), (shape[0], 1)), shape, name)})[
        "w"
    ]
    node = ow.linear(ow.input("x", (1, 512)), w)
    step = unbound_step(node.signature.at(precision, frozenset()), device)
    said = device.packed_bytes(step, 1)
    assert device.packed_bytes(step, 0) == 0
    with ow.Scheduler(device, precision=precision) as scheduler:
        scheduler.build(ow.linear(ow.input("x", (1, 64)), ow.weights({"w": np.ones((2, 64), np.float32)})["w"]))
        gc.collect()
        before = allocated()
        program = scheduler.build(node)
        gc.collect()
        taken = allocated() - before
        assert program.memory[device.name].library == said
        if before:
            assert 0.6 * said < taken < 1.1 * said + (1 << 20)


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


def test_explain_counts_repacked_weights_and_they_can_be_declined(device, monkeypatch):
    """8 rows of two blocks of 32: 16 bytes of integers, and three numbers in f32 for each block."""
    dtype = next(t for t in QUANTIZED if t.name == "q4_0")
    w = ow.weights({"w": ow.Blocks(random_blocks(dtype, 8, 2), (8, 64), "q4_0")})
    graph = ow.linear(ow.input("x", (1, 64)), w["w"])
    for repack in (None, False):  # ONNX Runtime has no product with blocks
        with ow.Scheduler(device, repack=repack) as scheduler:
            program = scheduler.build(graph)
            assert "1 step in one session with 448 bytes of repacked weights" in str(program.explain())
            assert program.memory[device.name].library == 8 * 2 * (16 + 3 * 4)
    monkeypatch.setenv("OPWEAVE_ORT_PACK", "0")
    declining = type(device)(device.provider)
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
    session = open_session(model.serialized(), {"w0": value}, ["w0"], device.provider, device.options, 1)
    array[:] = 3
    assert session.run(None, {"in0": np.ones((1, 64), np.float32)})[0][0, 0] == 3 * 64


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


def test_models_hold_no_zero_points_that_nothing_reads(device):
    w = ow.weights({"w": ow.quantize(np.ones((1024, 64), np.float32), "q4_0")})["w"]
    with ow.Scheduler(device) as scheduler:
        before = set(SESSIONS.alive())
        _program = scheduler.build(ow.linear(ow.input("x", (2, 64)), w))
        (session,) = set(SESSIONS.alive()) - before
        assert sum(array.nbytes for array in session.opened.pattern.constants.values()) < 1024


def test_layers_that_differ_in_scales_share_a_session(device):
    rng = np.random.default_rng(0)
    w = ow.weights({name: rng.standard_normal(64).astype(np.float32) for name in "ab"})
    x, made = rng.standard_normal((3, 64)).astype(np.float32), SESSIONS.made
    with ow.Scheduler(device) as scheduler, ow.Scheduler("host") as host:
        graphs = [ow.rms_norm(ow.input("x", x.shape), w[name]) * 2 for name in "ab"]
        programs = [scheduler.build(graph) for graph in graphs]
        assert SESSIONS.made == made + 1
        for program, graph in zip(programs, graphs, strict=True):
            np.testing.assert_allclose(program.run(x=x), host.build(graph).run(x=x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("repack", [0, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_experts_are_read_where_they_lie(device, dtype, repack):
    """Neither a session nor a program holds them in f32, of several layers at a time."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((8, 64, 64)).astype(np.float32) for name in "ab"}
    w = ow.weights({name: array.astype(ow.as_dtype(dtype).numpy) for name, array in arrays.items()}
                   | {"out": np.ones((8, 64), np.float32)})  # fmt: skip
    x, ids = rng.standard_normal((2, 64)).astype(np.float32), np.array([[0, 7], [3, 3]])

    def model():
        y, chosen = ow.input("x", x.shape), ow.input("ids", ids.shape, "i64")
        for name in "ab":
            y = ow.sum(ow.expert_linear(y, w[name], chosen), 1)
        return ow.linear(y, w["out"])

    with ow.Scheduler(device, repack=repack) as scheduler, ow.Scheduler("host") as host:
        program = scheduler.build(model())
        want = host.build(model()).run(x=x, ids=ids)
        use = program.memory[device.name]
        assert use.library + use.temporaries < arrays["a"].nbytes // 8
        np.testing.assert_allclose(program.run(x=x, ids=ids), want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_a_weight_that_is_handed_out_in_another_type_is_not_kept_in_it(device):
    array = np.ones((64, 64), np.float16)
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(ow.cast(ow.weights({"w": array})["w"], "f32"))
        assert program.memory[device.name].library == 0
        assert np.array_equal(program.run(), array)


@pytest.mark.skipif(not allocated(), reason="this C library does not tell what it has allocated")
def test_of_a_state_only_what_is_read_is_cast(device):
    state = ow.state("cache", (1 << 14, 256), "f16")
    with ow.Scheduler(device) as scheduler:
        written = ow.index_copy(state, ow.input("at", (1,), "i64"), ow.input("row", (1, 256), "f16"))
        program = scheduler.build(ow.exp(written[:8]))
        program.run(at=np.array([5]), row=np.ones((1, 256), np.float16))
        assert program.memory[device.name].library < state.nbytes


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
