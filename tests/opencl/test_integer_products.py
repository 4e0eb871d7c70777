"""Products with quantized weights at ``int8``: against the blocks of the `gguf` package and rows rounded by NumPy; and
whether a device takes them, by measured times."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype, f32
from opweave.graph.layout import dense_strides
from opweave_conformance import CASES
from opweave_opencl import integer_rates
from opweave_opencl.caching import BinaryCache
from opweave_opencl.integer_rates import VARIABLE, IntegerRates, Seconds
from opweave_opencl.kernels.integer_products import INTEGERS
from opweave_opencl.tuning import Tuning
from tests.support.kernels import assert_right
from tests.support.opencl import anew

gguf = pytest.importorskip("gguf")

LITTLE = Tuning(16, 64, 16, 1, tiled=False, local=1 << 15, units=2)
F16S = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "q4_0": (0,), "q5_0": (0,), "q8_0": (0,)}
"""Where in a block its f16 numbers lie; of the other types at 0 and 2."""


@pytest.fixture
def always(device, monkeypatch):
    """A device that takes every product in int8 for which it has a kernel."""
    if device.tuning.tiled:
        pytest.skip("integers are multiplied on processors")
    monkeypatch.setenv(VARIABLE, "1")
    return anew(device)


def random_blocks(name, outputs, inputs):
    """Blocks of any bits but for finite scales, and the weights that they are by gguf."""
    dtype = as_dtype(name)
    raw = np.random.default_rng(3).integers(0, 256, (outputs, inputs // dtype.block, dtype.itemsize)).astype(np.uint8)
    for at in F16S.get(name, (0, 2)):
        raw[..., at + 1] &= 0x3F
    raw = raw.reshape(outputs, -1)
    weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    return ow.Blocks(raw, (outputs, inputs), dtype), weights.astype(np.float64)


def rounded(x):
    """Rows as bytes and a factor for each 32, and back."""
    groups = x.astype(np.float32).reshape(-1, 32)
    scale = np.abs(groups).max(1, keepdims=True) / np.float32(127)
    levels = np.rint(np.divide(groups, scale, where=scale > 0, out=np.zeros_like(groups)))
    return (levels.astype(np.float64) * scale).reshape(x.shape)


def rows(count, inputs):
    x = np.random.default_rng(4).standard_normal((count, inputs)).astype(np.float32)
    x[0, :32], x[0, 32:64], x[-1, 64] = 0, 3e4, -700
    return x


@pytest.mark.parametrize(("name", "little"), [*[(name, False) for name in INTEGERS.split()], ("q4_k", True)])
def test_rows_are_rounded_in_groups_of_32_and_multiplied_by_the_blocks_as_they_lie(always, name, little):
    if little:
        always.tuning = LITTLE
    blocks, weights = random_blocks(name, 37, 1280)
    bias = np.linspace(-3, 3, 37, dtype=np.float32)
    leaves = ow.weights({"int8.w": blocks, "int8.b": bias})
    with ow.Scheduler(always) as scheduler:
        for count in (1,) if name == "q8_0" else (1, 3, 21):
            x = rows(count, 1280)
            graph = ow.linear(ow.input("int8.x", x.shape), leaves["int8.w"], leaves["int8.b"])
            program = scheduler.build(graph, precision="int8")
            assert "in int8" in str(program.explain())
            want = rounded(x) @ weights.T
            size = np.abs(rounded(x)) @ np.abs(weights.T)
            assert (np.abs(np.array(program.run(**{"int8.x": x})) - want - bias) <= 4e-6 * size + 1e-6).all()


def test_the_largest_integers_do_not_overflow(always):
    """Weights of the largest size with rows of 127s, whose sums fill the lanes of 16 bits."""
    with ow.Scheduler(always) as scheduler:
        for name in INTEGERS.split():
            dtype = as_dtype(name)
            for byte in (0, 255):
                raw = np.full((16, 512 // dtype.block, dtype.itemsize), byte, np.uint8)
                for at in F16S.get(name, (0, 2)):
                    raw[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
                raw = raw.reshape(16, -1)
                weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()]).astype(np.float64)
                x = np.full((1 if name == "q8_0" else 4, 512), 127, np.float32)
                x[:, ::3] = -127 if byte else 127
                leaf = ow.weights({"int8.large": ow.Blocks(raw, (16, 512), dtype)})["int8.large"]
                program = scheduler.build(ow.linear(ow.input("int8.rows", x.shape), leaf), precision="int8")
                got = np.array(program.run(**{"int8.rows": x}))
                np.testing.assert_allclose(got, x @ weights.T, rtol=1e-5, atol=1e-2, err_msg=name)


@pytest.mark.parametrize(("dtype", "count"), [("f16", 1), ("bf16", 3)])
def test_rows_of_half_precision(always, dtype, count):
    blocks, weights = random_blocks("q4_k", 24, 512)
    x = np.random.default_rng(4).standard_normal((count, 512)).astype(np.float32)
    leaves = ow.weights({"int8.half": blocks})
    graph = ow.linear(ow.cast(ow.input("int8.x", x.shape), dtype), leaves["int8.half"])
    with ow.Scheduler(always) as scheduler:
        program = scheduler.build(ow.cast(graph, "f32"), precision="int8")
        assert "in int8" in str(program.explain())
        got = np.array(program.run(**{"int8.x": x}))
    want = x @ weights.T
    assert ((got - want) ** 2).sum() <= 2e-4 * (want**2).sum()


def test_what_is_not_a_number_stays_so(always):
    blocks, _ = random_blocks("q4_0", 16, 64)
    x = np.ones((2, 64), np.float32)
    x[0, 5] = np.nan
    leaf = ow.weights({"int8.nan": blocks})["int8.nan"]
    with ow.Scheduler(always) as scheduler:
        got = np.array(
            scheduler.build(ow.linear(ow.input("int8.x", x.shape), leaf), precision="int8").run(**{"int8.x": x})
        )
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


def test_conformance_judges_them(always):
    def judged(case):
        types = {x.dtype for x in case.operands}
        return case.op == "linear" and types & {"q4_0", "q6_k"} and types <= {"f32", "q4_0", "q6_k"}

    results = assert_right(always, [case for case in CASES if judged(case)])
    assert results
    assert [f"{r.id}: {r.reason}" for r in results if r.status != "passed"] == []


# --- which is taken -------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(device, monkeypatch, tmp_path):
    """A device with no known times, and the times that measuring it yields, by type and rows."""
    if device.tuning.tiled:
        pytest.skip("integers are multiplied on processors")
    monkeypatch.delenv(VARIABLE, raising=False)
    found = anew(device)
    times: dict[str, Seconds] = {}
    monkeypatch.setattr(found.integers, "_answers", BinaryCache(tmp_path))
    asked = []

    def measure(device, dtype, rows):
        asked.append((dtype.name, rows))
        return times[dtype.name]

    monkeypatch.setattr(integer_rates, "_measured", measure)
    return found, times, asked


def product(name, count, side=1024):
    dtype = as_dtype(name)

    def arg(dtype, *shape):
        return Arg(None, 0, dtype, shape, dense_strides(shape, dtype))

    out, x, w = arg(f32, count, side), arg(f32, count, side), arg(dtype, side, side)
    return Step("linear", out, (x, w), {"blocks": dtype}, precision="int8")


def test_the_faster_one_is_taken_and_the_other_explained(measured):
    device, times, asked = measured
    times |= {"q4_0": Seconds(1.0, 2.0), "q4_k": Seconds(3.0, 2.0)}
    assert device.precision(product("q4_0", 40)) == "int8"
    assert device.precision(product("q4_k", 3)) == "exact"
    assert asked == [("q4_0", 32), ("q4_k", 2)]
    blocks, _ = random_blocks("q4_k", 512, 512)
    leaf = ow.weights({"int8.slow": blocks})["int8.slow"]
    with ow.Scheduler(device) as scheduler:
        text = str(scheduler.build(ow.linear(ow.input("int8.x", (3, 512)), leaf), precision="int8").explain())
    assert "in int8 were measured to take 1.50 times as long as exact ones, at 2 rows" in text


def test_times_are_kept_for_other_processes(measured):
    device, times, asked = measured
    times |= {"q4_0": Seconds(1.0, 2.0)}
    first = device.integers.seconds(as_dtype("q4_0"), 1)
    again = IntegerRates(device, device.integers._answers).seconds(as_dtype("q4_0"), 1)
    assert first == again == Seconds(1.0, 2.0)
    assert asked == [("q4_0", 1)]


def test_small_weights_are_not_measured(measured):
    device, _, asked = measured
    assert device.precision(product("q4_0", 1, side=256)) == "exact"
    assert asked == []


def test_the_variable_decides_without_measuring(measured, monkeypatch):
    device, _, asked = measured
    monkeypatch.setenv(VARIABLE, "0")
    assert device.precision(product("q4_0", 1)) == "exact"
    monkeypatch.setenv(VARIABLE, "1")
    assert device.precision(product("q4_0", 1, side=64)) == "int8"
    assert device.precision(product("q8_0", 2)) == "exact"
    assert asked == []


def test_both_are_timed(device, tmp_path):
    if device.tuning.tiled:
        pytest.skip("integers are multiplied on processors")
    seconds = IntegerRates(device, BinaryCache(tmp_path)).seconds(as_dtype("q4_0"), 1)
    assert seconds is not None
    assert 0 < seconds.integer < 1
    assert 0 < seconds.exact < 1
