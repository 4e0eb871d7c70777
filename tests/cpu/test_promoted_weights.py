"""Products of a few rows in f32 with weights of half types, and those of experts in plain types: compared with NumPy in
f64, on both sides of the limit of rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave_cpu import CpuDevice

pytest.importorskip("llvmlite")

pytestmark = pytest.mark.usefixtures("compiling")

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def made(shape, dtype="f32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def run(outputs, **feeds):
    """The results on a device of its own, the kernels that it compiled, and the bytes of temporaries."""
    device = CpuDevice()
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(outputs)
        nbytes = program.memory[device.name].temporaries
        program.run({name: np.full_like(data, 0 if data.dtype.kind == "i" else np.nan) for name, data in feeds.items()})
        return program.run(feeds), {key[0] for *_, key in device.artefacts}, nbytes


def assert_product(got, x, w, b=None):
    x, w = x.astype(np.float64), w.astype(np.float64)
    want = x @ w.T + (0 if b is None else b.astype(np.float64))
    np.testing.assert_allclose(got, want, atol=2e-6 * (np.abs(x) @ np.abs(w.T)).max())


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "inputs", "direct"), [(1, 64, True), (2, 48, True), (16, 64, True), (17, 64, False), (1, 40, False)]
)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_weights_of_half_types_are_read_as_they_lie(dtype, rows, inputs, direct, biased):
    x, w, b = made((rows, inputs)), made((513, inputs), dtype, 1), made(513, dtype, 2)
    weights = ow.weights({"w": w, "b": b})
    y = ow.linear(ow.input("x", x.shape), weights["w"], *[weights["b"]] * biased)
    got, _, nbytes = run(y, x=x)
    assert_product(got, x, w, b if biased else None)
    assert (nbytes < w.size * 4) == direct, "converted weights take memory"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_infinities_and_nan_among_weights_stay_in_their_column(dtype):
    x, w = made((2, 32)), made((20, 32), dtype, 1)
    w[3, 4], w[7, 8], w[9, 1] = np.inf, np.nan, -np.inf
    got, _, _ = run(ow.linear(ow.input("x", x.shape), ow.weights({"w": w})["w"]), x=x)
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("other", ["product", "sum", "output", "experts"])
def test_what_is_converted_for_another_reader_too_is_right_for_both(other):
    x, w = made((2, 64)), made((48, 64), "f16", 1)
    wide = ow.weights({"w": w})["w"].astype("f32")
    given = ow.input("x", x.shape)
    others = {
        "product": lambda: ow.linear(given * 2, wide),
        "sum": lambda: ow.sum(wide, 0),
        "output": lambda: wide,
        "experts": lambda: ow.expert_linear(given, wide.reshape(2, 24, 64), np.array([[0], [1]], np.int32)),
    }
    (got, more), _, _ = run([ow.linear(given, wide), others[other]()], x=x)
    assert_product(got, x, w)
    want = {
        "product": lambda: 2 * x @ w.astype("f").T,
        "sum": lambda: w.astype("f").sum(0),
        "output": lambda: w.astype("f"),
        "experts": lambda: np.stack([x[:1] @ w[:24].astype("f").T, x[1:] @ w[24:].astype("f").T]),
    }[other]()
    np.testing.assert_allclose(more, want, atol=1e-4)


@pytest.mark.parametrize("part", [slice(0, 24), slice(24, 48), slice(1, None, 2)], ids=str)
def test_a_part_of_what_is_converted_is_that_part(part):
    x, w = made((2, 64)), made((48, 64), "f16", 1)
    y = ow.linear(ow.input("x", x.shape), ow.weights({"w": w})["w"].astype("f32")[part])
    assert_product(run(y, x=x)[0], x, w[part])


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(("tokens", "inputs", "direct"), [(1, 32, True), (8, 48, True), (9, 48, False), (1, 40, False)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("of", ["f32", "same"])
def test_experts(of, dtype, tokens, inputs, direct, shared, index):
    kind = "f32" if of == "f32" else dtype
    x = made((tokens, inputs) if shared else (tokens, 2, inputs), kind)
    w = made((5, 37, inputs), dtype, 1)
    ids = np.random.default_rng(2).integers(0, 5, (tokens, 2)).astype(np.int32 if index == "i32" else np.int64)
    node = ow.expert_linear(ow.input("x", x.shape, kind), ow.weights({"w": w})["w"], ow.input("ids", ids.shape, index))
    got, compiled, _ = run(node, x=x, ids=ids)
    assert ("expert product" in compiled) == direct
    rows = np.repeat(x[:, None], 2, 1) if shared else x
    want = np.einsum("tui,tuoi->tuo", rows.astype(np.float64), w[ids].astype(np.float64))
    rounding = {"f32": 1e-5, "f16": 2e-2, "bf16": 1e-1}[kind]
    np.testing.assert_allclose(got.astype(np.float64), want, atol=rounding)


def test_experts_that_do_not_exist_are_an_error():
    x, w = made((1, 32)), made((5, 37, 32), "f16", 1)
    node = ow.expert_linear(ow.input("x", x.shape), ow.weights({"w": w})["w"], ow.input("ids", (1, 2), "i32"))
    with ow.Scheduler([CpuDevice()]) as scheduler:
        program = scheduler.build(node)
        for wrong in (5, -1):
            with pytest.raises(ow.ExecutionError, match="expert_linear"):
                program.run(x=x, ids=np.array([[0, wrong]], np.int32))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_was_converted_before_a_state_is_written_is_not_read_again(dtype):
    x = made((2, 64))
    state, given = ow.state("weights", (48, 64), dtype, fill=0.5), ow.input("x", x.shape)
    before = state.astype("f32")
    written = ow.assign(state, state * 0)
    y = ow.linear(given + written[:2].astype("f32"), before)
    with ow.Scheduler([CpuDevice()]) as scheduler:
        program = scheduler.build([y, written])
        assert_product(program.run(x=x)[0], x, np.full(state.shape, 0.5))
        np.testing.assert_array_equal(program.run(x=x)[0], 0)
