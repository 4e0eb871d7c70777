"""Compiled chains and rows compute what NumPy and the references do; when they are compiled, and from where loaded."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from math import erf, log10

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides
from opweave.leaf_memory import place
from opweave.ops.movement import after
from opweave.runtime.host.cache import FileCache
from opweave_conformance import CASES
from opweave_cpu import CpuDevice

pytest.importorskip("llvmlite")

from opweave_cpu.jit import compiler
from opweave_cpu.jit.blocks import DECODERS
from opweave_cpu.jit.compiler import FirstRun
from opweave_cpu.jit.formulas import FORMULAS
from opweave_cpu.jit.pointwise import is_worth_compiling
from opweave_cpu.jit.rows import FORMS
from opweave_cpu.jit.sequence import FEWEST
from opweave_cpu.jit.stream import CompilingStream
from opweave_cpu.jit.supported import BLOCKS, ROWS
from opweave_cpu.jit.walk import SHARED_WORK
from opweave_cpu.jit.writer import Writer
from opweave_cpu.threads import THREADS
from opweave_cpu.tunables import COMPILED_WORK
from tests.support.interrupts import interrupted, needs_timer
from tests.support.kernels import assert_right_where_accepted, by_operation

pytestmark = pytest.mark.usefixtures("compiling")

TYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
EPS = {"f32": 2e-7, "f64": 1e-15, "f16": 1e-3, "bf16": 8e-3}


def calls_of(program):
    return [call for run_list in program.run_lists for plan in run_list.plans for call in plan.calls]


# --- chains ---------------------------------------------------------------------------------------------------------

UNARY = ["neg", "abs", "square", "relu", "hardswish", "floor", "leaky_relu", "step"]
NARROW = ["exp", "expm1", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "softplus", "elu", "log1p"]
BINARY = ["add", "sub", "mul", "minimum", "maximum", "reglu"]


@st.composite
def chains(draw):
    """A type, a shape, how two inputs lie, and steps: an operation with the numbers of the values that it takes."""
    name = draw(st.sampled_from(sorted(TYPES)))
    shape = (*draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)), draw(st.sampled_from([1, 3, 16, 37])))
    layout = draw(st.sampled_from(["dense", "transposed", "row", "column", "cut"]))
    unary = UNARY + (NARROW if name != "f64" else [])
    steps = []
    for number in range(2, draw(st.integers(4, 12))):
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(unary)), (draw(st.integers(0, number - 1)),)))
        else:
            steps.append((draw(st.sampled_from(BINARY)), tuple(draw(st.integers(0, number - 1)) for _ in range(2))))
    return name, shape, layout, steps


def laid_out(tensor_shape, layout, dtype):
    """A leaf and the view of it that has ``tensor_shape``."""
    if layout == "transposed":
        leaf = ow.input("jit_b", (*tensor_shape[:-2], tensor_shape[-1], tensor_shape[-2]), dtype)
        return leaf, leaf.transpose(*range(len(tensor_shape) - 2), -1, -2)
    if layout == "row":
        leaf = ow.input("jit_b", tensor_shape[-1:], dtype)
        return leaf, leaf
    if layout == "column":
        leaf = ow.input("jit_b", (*tensor_shape[:-1], 1), dtype)
        return leaf, leaf
    if layout == "cut":
        leaf = ow.input("jit_b", (*tensor_shape[:-1], 2 * tensor_shape[-1] + 1), dtype)
        return leaf, leaf[..., 1::2]
    leaf = ow.input("jit_b", tensor_shape, dtype)
    return leaf, leaf


@settings(max_examples=25, deadline=None)
@given(chains(), st.integers(0, 2**16))
def test_a_chain_computes_what_its_steps_do_one_by_one(chain, seed):
    name, shape, layout, steps = chain
    rng = np.random.default_rng(seed)
    first = ow.input("jit_a", shape, name)
    leaf, second = laid_out(shape, layout, name)
    values = [first, ow.broadcast_to(second, shape)]
    for op, sources in steps:
        values.append(getattr(ow, op)(*[values[i] for i in sources]))
    outputs = [values[-1], values[len(values) // 2] + values[0] - values[1]]
    feed = {t: rng.uniform(-2, 2, t.shape).astype(TYPES[name]) for t in (first, leaf)}
    got = ow.Scheduler("cpu").build(outputs).run(feed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWEAVE_CPU_JIT", "0")
        want = ow.Scheduler("cpu").build(outputs).run(feed)
    for g, w in zip(got, want, strict=True):
        g, w = g.astype(np.float64), w.astype(np.float64)
        scale = np.abs(w[np.isfinite(w)]).max(initial=1.0)
        both = np.isfinite(g) & np.isfinite(w)
        # Each step may differ by a unit in the last place, and steps such as floor make a whole one of that.
        differences = np.abs(np.subtract(g, w, where=both, out=np.zeros_like(g)))
        wrong = differences > 64 * EPS[name] * scale
        if any(op in ("floor", "step") for op, _ in steps):
            assert wrong.mean() < 0.2
        else:
            assert not wrong.any()
            np.testing.assert_array_equal(np.isnan(g), np.isnan(w))


def test_arithmetic_is_that_of_numpy_bit_by_bit():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 777)).astype(np.float32)
    x, y = ow.input("bits_a", a.shape), ow.input("bits_b", b.shape)
    out = ((x * y + x) / (y - 0.5) - ow.sqrt(ow.abs(x))) * 3.0 + 1.0
    f = np.float32
    want = ((a * b + a) / (b - f(0.5)) - np.sqrt(np.abs(a))) * f(3) + f(1)
    np.testing.assert_array_equal(ow.Scheduler("cpu").build(out).run({x: a, y: b}), want)


def test_values_inside_of_a_chain_are_rounded_to_their_type():
    x = ow.input("rounded_a", (40,), "bf16")
    a = np.linspace(1, 2, 40).astype(ml_dtypes.bfloat16)
    got = ow.Scheduler("cpu").build((x + 0.003) - x).run({x: a})
    bf16 = ml_dtypes.bfloat16
    want = ((a.astype(np.float32) + np.float32(0.003)).astype(bf16).astype(np.float32) - a.astype(np.float32)).astype(
        bf16
    )
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_comparisons_and_bool_stay_in_registers():
    x = ow.input("bool_a", (3, 21))
    a = np.random.default_rng(1).standard_normal((3, 21)).astype(np.float32)
    a[0, 0] = np.nan
    flag = x > 0.25
    program = ow.Scheduler("cpu").build([ow.where(flag, x * 2.0, -x), ow.cast(flag, "f32"), flag])
    got = program.run({x: a})
    np.testing.assert_array_equal(got[0], np.where(a > 0.25, a * 2, -a))
    np.testing.assert_array_equal(got[1], (a > 0.25).astype(np.float32))
    np.testing.assert_array_equal(got[2], a > 0.25)


@pytest.mark.parametrize("dtype", ["bool", "i8", "u8", "i16", "i32", "i64", "f32", "f64"])
def test_numbers_are_compared_as_numpy_compares_them(dtype):
    """In passes long enough to be compiled: true is above false, and 200 above 100 also in one byte."""
    rng, kind = np.random.default_rng(0), as_dtype(dtype).numpy
    low, high = (0, 2) if dtype == "bool" else (0, 256) if dtype == "u8" else (-128, 128)
    values = [rng.integers(low, high, 1 << 18).astype(kind) for _ in range(2)]
    a, b = (ow.input(name, (1 << 18,), dtype) for name in "ab")
    with ow.Scheduler("cpu") as scheduler:
        for name in ("less", "less_equal", "equal", "not_equal", "minimum", "maximum"):
            got = scheduler.build(getattr(ow, name)(a, b)).run(a=values[0], b=values[1])
            np.testing.assert_array_equal(got, getattr(np, name)(*values), err_msg=name)


def test_a_chain_is_one_call_and_its_inner_values_have_no_memory():
    x = ow.input("one_call_a", (1 << 16,))
    program = ow.Scheduler("cpu").build(ow.exp(x * 0.5) * ow.tanh(x) - x)
    assert len(calls_of(program)) == 1
    assert program.memory["cpu"].temporaries == 2 * 4 * x.size  # the input and the result


@pytest.mark.parametrize("name", sorted(TYPES))
def test_writing_states_is_a_part_of_a_chain(name):
    rng = np.random.default_rng(3)
    x, sum_, last = ow.input("chain_x", (7, 37), name), ow.state("sum_", (7, 37), name), ow.state("last", (9, 37), name)
    total = ow.accumulate(sum_, ow.square(x) - sum_)
    kept = ow.assign(last[1:8], total * 0.5)
    program = ow.Scheduler("cpu").build([after(total - x, [kept])])
    assert len(calls_of(program)) == 1
    assert program.memory["cpu"].temporaries == ow.Scheduler("cpu").build(x - 1.0).memory["cpu"].temporaries
    old, value = [rng.standard_normal((7, 37)).astype(TYPES[name]) for _ in range(2)]
    ow.write(sum_, old)
    (got,) = program.run({x: value})
    change = (value * value).astype(TYPES[name]) - old
    want = old + change
    for found, truth in ((got, want - value), (ow.read(sum_), want), (ow.read(last)[1:8], want * TYPES[name](0.5))):
        np.testing.assert_allclose(np.float64(found), np.float64(truth), rtol=4 * EPS[name], atol=4 * EPS[name])
    np.testing.assert_array_equal(ow.read(last)[[0, 8]], 0)


def test_a_state_is_not_written_beside_a_reader_of_the_same_bytes_elsewhere():
    memory = ow.device("cpu").alloc(4 * 80)
    whole, inside = ow.state("same_whole", (64,)), ow.state("same_inside", (64,))
    place(whole, memory, 0)
    place(inside, memory, 64)
    ow.write(whole, np.arange(64, dtype=np.float32))
    written = ow.assign(inside, ow.input("same_x", (64,)) - 1.0)
    program = ow.Scheduler("cpu").build([after(whole * 2.0, [written])])
    (got,) = program.run({"same_x": np.zeros(64, np.float32)})
    np.testing.assert_array_equal(got, 2.0 * np.arange(64))


def test_threads_compute_parts_of_one_chain():
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((1025, 1027)).astype(np.float32), rng.standard_normal((1025, 1)).astype(np.float32)
    x, y = ow.input("threads_a", a.shape), ow.input("threads_b", b.shape)
    out = ow.gelu(x * y) + y
    one, two = (ow.Scheduler(ow.open_device(f"cpu?threads={n}")).build(out).run({x: a, y: b}) for n in (1, 2))
    np.testing.assert_array_equal(one, two)


# --- every formula --------------------------------------------------------------------------------------------------


def _compiled_cases():
    """Of each operation that is compiled every fourth case; with ``OPWEAVE_TEST_ALL`` every one."""
    cases = [case for case in CASES if case.op in ROWS or case.op in {op.split()[0] for op in FORMULAS}]
    return cases if os.environ.get("OPWEAVE_TEST_ALL") else cases[::4]


@pytest.mark.parametrize("cases", by_operation(_compiled_cases()))
def test_compiled_steps_are_within_the_limits_of_their_operations(cases):
    assert_right_where_accepted(CpuDevice(), cases)


# --- functions ------------------------------------------------------------------------------------------------------

SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, np.inf, -np.inf, np.nan, 88.72, 88.73, -87.4, -103.9, -104.5], np.float32
)


def grid(low, high):
    """Numbers of all magnitudes between two, of both signs where the first is negative."""
    some = np.logspace(-30, log10(high), 20001).astype(np.float32)
    signs = [some, -some[some <= -low]] if low < 0 else [some]
    return np.concatenate([*signs, np.linspace(low, high, 20001, dtype=np.float32), SPECIAL])


def softplus(x):
    return np.logaddexp(x, 0)


@pytest.mark.parametrize(
    ("op", "truth", "span", "units"),
    [
        ("exp", np.exp, (-104, 89), 2.5),
        ("expm1", np.expm1, (-30, 89), 3),
        ("log", np.log, (1e-37, 3e38), 3),
        ("log1p", np.log1p, (-0.999, 3e38), 4),
        ("tanh", np.tanh, (-12, 12), 5),
        ("erf", np.vectorize(erf), (-6, 6), 3),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), (-80, 80), 5),
        ("softplus", softplus, (-80, 80), 6),
        ("silu", lambda x: x / (1 + np.exp(-x)), (-80, 80), 5),
    ],
)
def test_functions_are_accurate_to_a_few_units_in_the_last_place(op, truth, span, units):
    a = grid(*span)
    x = ow.input(f"{op}_grid", a.shape)
    got = ow.Scheduler("cpu").build(getattr(ow, op)(x)).run({x: a})
    with np.errstate(all="ignore"):
        want = truth(a.astype(np.float64))
        near = want.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(near))
        np.testing.assert_array_equal(got[np.isinf(near)], near[np.isinf(near)])
        fine = np.isfinite(near)
        unit = np.spacing(np.maximum(np.abs(near[fine]), np.float32(1.2e-38))).astype(np.float64)
        # Far below zero e**-x is infinite, and silu becomes 0 where it still has a subnormal value.
        error = np.maximum(np.abs(got[fine] - want[fine]) - (1.2e-38 if op == "silu" else 0), 0)
        assert np.max(error / unit) <= units


# --- rows -----------------------------------------------------------------------------------------------------------


def _norm(x, w, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("n", [8, 17, 64, 100, 4099])
def test_rows(name, n):
    rng = np.random.default_rng(n)
    a = (rng.standard_normal((7, n)) * 3).astype(TYPES[name])
    w, b = (rng.standard_normal(n).astype(TYPES[name]) for _ in range(2))
    x, u, v = (ow.input(f"rows_{i}", t.shape, name) for i, t in enumerate((a, w, b)))
    program = ow.Scheduler("cpu").build([ow.softmax(x), ow.layer_norm(x, u, v), ow.log_softmax(x), ow.rms_norm(x)])
    got = program.run({x: a, u: w, v: b})
    a, w, b = (t.astype(np.float64) for t in (a, w, b))
    want = [_softmax(a), _norm(a, w, b), np.log(_softmax(a)), a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6)]
    for g, t in zip(got, want, strict=True):
        np.testing.assert_allclose(g.astype(np.float64), t, rtol=4 * EPS[name], atol=4 * EPS[name] * np.abs(t).max())


def test_a_row_with_nan_is_nan_and_masked_ones_are_zero():
    a = np.zeros((3, 40), np.float32)
    a[0, 39], a[1, 5:] = np.nan, -np.inf
    x = ow.input("nan_rows", a.shape)
    got = ow.Scheduler("cpu").build(ow.softmax(x)).run({x: a})
    assert np.isnan(got[0]).all()
    np.testing.assert_allclose(got[1], [0.2] * 5 + [0] * 35, rtol=1e-6)


# --- products -------------------------------------------------------------------------------------------------------


def random_blocks(name, outputs, inputs, rng):
    """Blocks of weights, shape (outputs, bytes of a row), all of whose f16 numbers are finite."""
    dtype = as_dtype(name)
    data = rng.integers(0, 256, (outputs, inputs // dtype.block, dtype.itemsize)).astype(np.uint8)
    for at in (0, 2, 208) if name == "q6_k" else (0, 2):
        data[..., at + 1 : at + 2] &= 0x3F
    return data.reshape(outputs, -1)


@pytest.mark.parametrize("name", sorted(BLOCKS))
@pytest.mark.parametrize("rows", [1, 3, 16, 20])
def test_products_with_quantized_weights(name, rows):
    rng = np.random.default_rng(rows)
    outputs = 37 + rows % 3
    data = random_blocks(name, outputs, 512, rng)
    a, b = rng.standard_normal((rows, 512)).astype(np.float32), rng.standard_normal(outputs).astype(np.float32)
    x, bias = ow.input("blocks_a", a.shape), ow.input("blocks_b", b.shape)
    w = ow.weights({"w": ow.Blocks(data, (outputs, 512), name)})["w"]
    program = ow.Scheduler("cpu").build(ow.linear(x, w, bias))
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]).astype(np.float64)
    want = a @ values.T + b
    limit = 1e-6 * (np.abs(a) @ np.abs(values.T))
    assert (np.abs(program.run({x: a, bias: b}) - want) <= limit + 1e-6).all()
    assert program.memory["cpu"].weights < 2 * data.nbytes  # and no decoded copy


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_decoded_values_are_those_of_gguf_to_the_bit(name):
    data = random_blocks(name, 16, 512, np.random.default_rng(5))
    device = CpuDevice()
    stream = device.open()
    dtype = as_dtype(name)
    source, target = device.alloc(data.nbytes), device.alloc(16 * 512 * 4)
    source.upload(0, data)
    w = Arg(source, 0, dtype, (16, 512), dense_strides((16, 512), dtype))
    values = Arg(target, 0, as_dtype("f32"), (16, 512), (2048, 4))
    assert isinstance(stream, CompilingStream)
    call = stream.decode_rows(w, slice(0, 16), values)
    assert call is not None
    call()
    np.testing.assert_array_equal(values.view, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]))


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("outputs", [20, 21, 22])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 48), (2, 48), (8, 48), (13, 48), (17, 48), (3, 50)])
def test_products_of_few_rows(name, rows, inputs, outputs):
    rng = np.random.default_rng(rows)
    a, v = (rng.standard_normal((n, inputs)).astype(TYPES[name]) for n in (rows, outputs))
    x, w = ow.input("few_a", a.shape, name), ow.weights({"w": v})["w"]
    got = ow.Scheduler("cpu").build(ow.linear(x, w)).run({x: a}).astype(np.float64)
    want = a.astype(np.float64) @ v.astype(np.float64).T
    np.testing.assert_allclose(got, want, rtol=2 * EPS[name], atol=20 * 2e-7)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (8, 512), (21, 1408), (40, 15), (40, 17), (64, 4096)])
def test_a_single_row_is_multiplied_by_compiled_functions_unless_vectors_would_be_cut(
    outputs, inputs, threads, biased, monkeypatch
):
    monkeypatch.setattr(THREADS, "cores", threads)
    rng = np.random.default_rng(inputs)
    shapes = (1, inputs), (outputs, inputs), (outputs,)
    a, v, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    device, x, weights = CpuDevice(), ow.input("single_row", a.shape), ow.weights({"w": v, "b": b})
    with SHARED_WORK.at(1), COMPILED_WORK.at(1), ow.Scheduler([device]) as scheduler:
        got = scheduler.build(ow.linear(x, weights["w"], *[weights["b"]] * biased)).run({x: a})
    assert ("product" in {key[0] for *_, key in device.artefacts}) == (inputs % 16 == 0)
    want = a.astype(np.float64) @ v.astype(np.float64).T + (b if biased else 0)
    assert (np.abs(got - want) <= 2e-7 * (np.abs(a) @ np.abs(v.T) + np.abs(b))).all()


def test_errors_of_a_single_row_stay_small_in_long_sums():
    rng = np.random.default_rng(0)
    a, v = rng.random((1, 16384), np.float32), rng.random((8, 16384), np.float32)
    x, w = ow.input("long_row", a.shape), ow.weights({"w": v})["w"]
    got = ow.Scheduler("cpu").build(ow.linear(x, w)).run({x: a})
    np.testing.assert_allclose(got, a.astype(np.float64) @ v.astype(np.float64).T, rtol=1e-6)


@pytest.mark.parametrize("products", [1, 2])
def test_a_router_of_one_row_is_called_with_its_neighbours_if_these_are_enough(products):
    rng = np.random.default_rng(0)
    a, v = rng.standard_normal((1, 512)).astype(np.float32), rng.standard_normal((8, 512)).astype(np.float32)
    x, weights = ow.input("routed", a.shape), ow.weights({"first": np.eye(512, dtype=np.float32), "w": v})
    y = ow.rms_norm(x)
    y = ow.linear(y, weights["first"]) if products == 2 else y
    program = ow.Scheduler("cpu").build(ow.softmax(ow.linear(y, weights["w"])))
    (plan,), made = program.run_lists[0].plans, program.run_lists[0].calls
    assert plan.n_calls == products + 2
    assert len(made.calls) == (1 if plan.n_calls >= FEWEST.value else plan.n_calls)
    normed = a / np.sqrt((a.astype(np.float64) ** 2).mean() + 1e-6)
    np.testing.assert_allclose(program.run({x: a}), _softmax(normed @ v.T.astype(np.float64)), rtol=1e-4, atol=1e-7)


# --- compiling ------------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_where_it_is_declined(monkeypatch):
    assert isinstance(CpuDevice().open(), CompilingStream)
    monkeypatch.setenv("OPWEAVE_CPU_JIT", "0")
    assert not isinstance(CpuDevice().open(), CompilingStream)
    assert "OPWEAVE_CPU_JIT" in (compiler.why_not() or "")


def test_warming_compiles_what_the_first_run_would(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler.target(), "cache", FileCache("", "", tmp_path, checked=True))
    x = ow.input("warmed", (19, 3))
    program = ow.Scheduler("cpu").build(ow.exp(x * 0.123) * ow.tanh(x) - ow.silu(x + 7.0) * ow.sqrt(x))
    (call,) = calls_of(program)
    assert isinstance(call, FirstRun)
    program.warm()
    assert list(tmp_path.iterdir())
    monkeypatch.setattr(compiler.target(), "compile", None)
    program.run({x: np.ones((19, 3), np.float32)})


def test_the_files_of_other_processes_are_searched_once_for_a_function(monkeypatch):
    sought = []

    class Empty:
        def load(self, name):
            sought.append(name)

    monkeypatch.setattr(compiler.target(), "cache", Empty())
    code = compiler.MachineCode("no such function")
    assert not any(code.load(compiling=False) for _ in range(3))
    assert len(sought) == 1


def test_functions_on_disk_are_found_without_writing_them_again(monkeypatch, tmp_path):
    """Unless the code that writes them, or a limit that it reads, is another one."""
    monkeypatch.setattr(compiler.target(), "cache", FileCache("", "", tmp_path, checked=True))
    written, end = [], Writer.end

    def counted(writer):
        written.append(writer)
        return end(writer)

    monkeypatch.setattr(Writer, "end", counted)
    x, rows = ow.input("again", (300, 40)), np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32)
    y = ow.softmax(ow.gelu(x) * 3) + ow.linear(x[:4], ow.constant(rows[:40].astype(np.float16)))[:1]
    want = None

    def functions():
        nonlocal want
        written.clear()
        with ow.Scheduler([CpuDevice()]) as scheduler:  # which has bound none of them before
            got = scheduler.build(y).run({x: rows})
        want = got if want is None else want
        np.testing.assert_array_equal(got, want)
        return len(written)

    first = functions()
    assert first >= 2
    assert functions() == 0
    limits = {one.name: one for one in CpuDevice().limits}
    monkeypatch.setattr(limits["prefetched_bytes"], "value", limits["prefetched_bytes"].value * 2)
    assert functions() == first
    assert functions() == 0
    monkeypatch.setattr(compiler, "_sources", lambda: "another version")
    assert functions() == first


def test_keys_without_a_value_of_their_own_are_not_looked_for(monkeypatch):
    monkeypatch.setattr(compiler.target(), "cache", None)
    assert compiler.recall(("prepared", object()), lambda: 5) == 5


def test_the_largest_chain_compiles_in_less_than_a_second(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler.target(), "cache", FileCache("", "", tmp_path, checked=True))
    x = ow.input("largest", (64,), "bf16")
    y = x
    for _ in range(32):
        y = ow.gelu(y)
    program = ow.Scheduler("cpu").build(y)
    (call, *_) = calls_of(program)
    assert isinstance(call, FirstRun)
    start = time.process_time()
    call.compile()
    assert time.process_time() - start < 1


SECOND = """
import json, os, sys
import numpy as np, opweave as ow
from opweave_cpu.jit import compiler
compiled = []
before = compiler.target().compile
compiler.target().compile = lambda text: compiled.append(1) or before(text)
x = ow.input("x", (50,))
got = ow.Scheduler("cpu").build(ow.exp(x) * 2.0 + x).run({x: np.ones(50, np.float32)})
print(json.dumps([len(compiled), float(got[0])]))
"""


def test_another_process_finds_what_was_compiled_and_compiles_what_is_damaged(tmp_path):
    def run():
        env = {**os.environ, "OPWEAVE_CPU_JIT_CACHE": str(tmp_path), "OPWEAVE_BACKENDS": "cpu"}
        done = subprocess.run([sys.executable, "-c", SECOND], env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    assert run() == [1, pytest.approx(2 * np.e + 1, rel=1e-6)]
    assert run()[0] == 0
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert run()[0] == 1


def test_what_is_said_to_be_compiled_is():
    assert set(FORMS) == ROWS
    assert set(DECODERS) == BLOCKS


def test_nobody_loads_llvm_for_a_graph_without_chains():
    code = (
        "import sys, numpy as np, opweave as ow, opweave_cpu; x = ow.input('x', (4, 4));"
        "ow.Scheduler('cpu').build(x @ x).run({x: np.ones((4, 4), np.float32)}); print('llvmlite' in sys.modules)"
    )
    env = {**os.environ, "OPWEAVE_BACKENDS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


FAR = """
import ctypes, mmap, random
from opweave_cpu.jit.compiler import MachineCode

rng, kept = random.Random(1), []
reserved = dict(  # and MAP_NORESERVE, which this version of Python has no name for
    flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
sizes, lengths = (500, 505, 510, 511, 512, 520, 1000, 1023, 1024), (0, 1, 100, 200, 230, 240, 250, 400)  # about a page
for size, stores in ((rng.choice(sizes), rng.choice(lengths)) for _ in range(600)):
    kept.append(mmap.mmap(-1, 3 << 30, **reserved))
    numbers = [rng.getrandbits(62) for _ in range(size)]
    stored = "".join(f"store volatile i64 {k * 123457}, ptr %words\\n" for k in range(stores))
    table = f"[{size} x i64]"
    code = MachineCode(f'''
        @table = private unnamed_addr constant {table} [{", ".join(f"i64 {n}" for n in numbers)}], align 64
        define void @"kernel"(ptr %words) {{
            %i = load i64, ptr %words
            %p = getelementptr {table}, ptr @table, i64 0, i64 %i
            %n = load i64, ptr %p
            {stored}
            store i64 %n, ptr %words
            ret void
        }}
    ''')
    code.load(compiling=True)
    word = ctypes.c_int64(size - 1)
    code.holding(ctypes.byref(word))
    assert word.value == numbers[-1]
print("right")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reserves addresses as Linux does")
def test_functions_reach_their_constants_however_full_the_address_space_is():
    """Code addresses constants by 32 bits. Gigabytes are reserved between one function and the next."""
    env = {**os.environ, "OPWEAVE_CPU_JIT_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", FAR], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr[-2000:]


@needs_timer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_of_a_thread_that_compiles_leave_others_free(monkeypatch):
    """Ctrl-C between taking and releasing a lock of llvmlite would keep it from every other thread."""

    class Nothing:
        """Keeps no files: an interrupt may come between opening one and its ``with`` block."""

        load = store = staticmethod(lambda *args: None)

    monkeypatch.setattr(compiler.target(), "cache", Nothing())
    text = 'define void @"kernel"(ptr %words) {\n ret void\n}\n'
    numbers = iter(range(1 << 30))

    def compiled():
        compiler.MachineCode(f"; {next(numbers)} of a storm\n{text}").load(compiling=True)

    def another_thread_compiles():
        thread = threading.Thread(target=compiled, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    assert interrupted(300, compiled, another_thread_compiles, every=20, longest=3e-3) >= 300


def square(op: str, *strides: tuple[int, int], size: int = 1024, dtype: str = "f32") -> Step:
    """A step of shape (size, size), whose operands have these strides in elements, the result's first."""
    kind = as_dtype(dtype)
    args = [Arg(None, 0, kind, (size, size), tuple(kind.itemsize * n for n in each)) for each in strides]
    return Step(op, args[0], tuple(args[1:]), {})


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_single_passes_are_compiled_where_threads_share_them_or_calls_are_merged(dtype: str) -> None:
    rows = (1024, 1)
    assert is_worth_compiling(square("add", rows, rows, rows, dtype=dtype))
    assert is_worth_compiling(square("add", rows, rows, (0, 1), dtype=dtype))
    # Reading single numbers takes longer.
    assert not is_worth_compiling(square("add", rows, rows, (1, 1024), dtype=dtype))
    small = square("add", *[(16, 1)] * 3, size=16, dtype=dtype)
    assert is_worth_compiling(small) == (dtype == "f32")


# --- memory of compiled functions -----------------------------------------------------------------------------------


def chain_of_its_own(i, n):
    """A chain whose structure no other three digits below 5 have."""
    y = ow.input("x", (n,))
    for digit in i:
        y = ow.tanh((ow.sqrt, ow.abs, ow.neg, ow.square, ow.relu)[int(digit, 5)](y) + float(int(digit)))
    return y


@pytest.mark.parametrize("n", [64, 300_000])
def test_functions_that_no_program_uses_give_their_memory_back(n):
    """Short operands call a function directly, long ones by the threads of a team."""
    device, here = CpuDevice(), compiler.target()
    values = np.linspace(0.5, 1, n, dtype=np.float32)
    chains = [f"{i // 25}{i // 5 % 5}{i % 5}" for i in range(60)]
    gc.collect()
    before, stays = here.loaded, chain_of_its_own("444", n)
    with ow.Scheduler(device) as kept:
        program = kept.build(stays)
        want = program.run(x=values)
        for chain in chains:
            with ow.Scheduler(device) as scheduler:
                scheduler.build(chain_of_its_own(chain, n)).run(x=values)
        # The device keeps the latest. (Functions of other tests may go at any time.)
        assert len(device.artefacts) >= len(chains)
        device.artefacts.clear()
        gc.collect()
        # What is given back goes in sets; those of the first and the latest function stay whole.
        assert here.loaded <= before + 3 * compiler.TOGETHER
        np.testing.assert_array_equal(program.run(x=values), want)
    with ow.Scheduler("host") as host:
        np.testing.assert_allclose(want, host.build(stays).run(x=values), rtol=1e-5)
