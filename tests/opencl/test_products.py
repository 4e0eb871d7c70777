"""Products and what is built on them, in every form that kernels have: for processors, for little local memory, and for
devices whose work-items share tiles (which every driver runs, only not as fast)."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.ops.blocks import dequantize
from opweave_conformance import CASES
from opweave_opencl.indices import VARIABLE
from opweave_opencl.kernels import convolution
from opweave_opencl.stream import OpenCLStream
from opweave_opencl.tuning import Tuning
from tests.support.kernels import assert_right, by_operation
from tests.support.opencl import anew, as_gpu

FORMS = {
    "processor": None,
    "little": Tuning(16, 64, 16, 1, tiled=False, local=1 << 15, units=2),
    "tiles": Tuning(4, 64, 1, 64, tiled=True, local=1 << 15, units=2),
    "large-tiles": Tuning(4, 64, 1, 64, tiled=True, local=1 << 16, units=0),
}
SHAPES = [(1, 1, 1), (1, 300, 70), (5, 1, 17), (129, 513, 65), (130, 40, 200), (16, 128, 33), (17, 129, 32)]


@pytest.fixture(scope="module", params=FORMS)
def formed(request, device):
    """A device whose kernels are built and launched in one of the forms."""
    tuning = FORMS[request.param]
    if tuning is not None and tuning.tiled:
        return as_gpu(device, tuning)
    found = anew(device)
    found.tuning = tuning or found.tuning
    return found


def floats(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def run(device, tensor):
    with ow.Scheduler(device) as scheduler:
        return np.array(scheduler.build(tensor).run())


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_of_any_size_and_either_order_of_axes(formed, m, k, n):
    a, b, bias = floats(m, k), floats(k, n), floats(n)
    turned = {"at": np.ascontiguousarray(a.T), "bt": np.ascontiguousarray(b.T)}
    leaves = ow.weights({"a": a, "b": b, "bias": bias, **turned})
    want = a.astype(np.float64) @ b
    flipped = leaves["at"].T
    close(run(formed, leaves["a"] @ leaves["b"]), want)
    close(run(formed, flipped @ leaves["b"]), want)
    close(run(formed, ow.linear(leaves["a"], leaves["bt"], leaves["bias"])), want + bias)
    close(run(formed, ow.linear(flipped, leaves["bt"])), want)


def noted(device, monkeypatch):
    """The names of the kernels that are launched from now on, on a processor."""
    if device.tuning.tiled:
        pytest.skip("work-items share tiles there")
    names: list[str] = []
    launch = OpenCLStream.launch

    def noting(self, program, name, *rest):
        names.append(name)
        return launch(self, program, name, *rest)

    monkeypatch.setattr(OpenCLStream, "launch", noting)
    return names


def test_short_sums_of_rows_without_gaps_are_taken_from_panels(device, monkeypatch):
    """Of many rows; one sum for each element would add up a vector's lanes for a few multiplications each."""
    names = noted(device, monkeypatch)
    for (batch, m, n, k), kernel in {
        (4, 64, 48, 32): "panel", (1, 16, 32, 128): "panel", (1, 64, 48, 129): "dots", (2, 15, 48, 32): "dots",
        (2, 64, 31, 32): "dots",
    }.items():  # fmt: skip
        names.clear()
        q, keys = floats(batch, m, k), floats(batch, n, k)
        leaves = ow.weights({"short.q": q, "short.k": keys})
        close(run(device, leaves["short.q"] @ leaves["short.k"].swapaxes(1, 2)), q @ keys.swapaxes(1, 2))
        assert names == [kernel], (batch, m, n, k)


@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
@pytest.mark.parametrize("m", [1, 3, 61])
def test_quantized_weights(formed, name, m):
    dtype = ow.as_dtype(name)
    raw = np.random.default_rng(3).integers(0, 100, (70, 512 // dtype.block * dtype.itemsize), np.uint8)
    x = floats(m, 512)
    leaves = ow.weights({"x": x, "w": ow.Blocks(raw, (70, 512), dtype)})
    want = x.astype(np.float64) @ dequantize(raw, dtype).astype(np.float64).T
    got = run(formed, ow.linear(leaves["x"], leaves["w"]))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_rows_of_more_blocks_than_are_unpacked_at_once(device, name):
    dtype = ow.as_dtype(name)
    raw = np.random.default_rng(3).integers(0, 100, (40, 9 * dtype.itemsize), np.uint8)
    x = floats(1, 9 * dtype.block)
    leaves = ow.weights({"x": x, "w": ow.Blocks(raw, (40, 9 * dtype.block), dtype)})
    want = x.astype(np.float64) @ dequantize(raw, dtype).astype(np.float64).T
    got = run(device, ow.linear(leaves["x"], leaves["w"]))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("wide", [False, True], ids=["column", "pair"])
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q4_k", "q6_k", "iq3_s"])
def test_one_row_times_one_or_two_columns_at_once(device, wide, name):
    """Also where a work-item's last column has no other one beside it."""
    found = anew(device)
    found.tuning = found.tuning._replace(wide_registers=wide)
    dtype = ow.as_dtype(name)
    for columns in (1, 2, 101):
        raw = np.random.default_rng(3).integers(0, 100, (columns, 512 // dtype.block * dtype.itemsize), np.uint8)
        x = floats(1, 512)
        leaves = ow.weights({"x": x, "w": ow.Blocks(raw, (columns, 512), dtype), "b": floats(columns)})
        want = x.astype(np.float64) @ dequantize(raw, dtype).astype(np.float64).T
        got = run(found, ow.linear(leaves["x"], leaves["w"], leaves["b"]))
        np.testing.assert_allclose(got, want + floats(columns), rtol=1e-4, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("tokens", [2, 50])
def test_rows_of_experts_that_do_not_exist_are_zeros_where_nobody_checks(formed, monkeypatch, tokens, index):
    monkeypatch.setenv(VARIABLE, "0")
    x, w = floats(tokens, 2, 33), floats(3, 17, 33)
    ids = np.random.default_rng(5).integers(0, 3, (tokens, 2)).astype(index)
    ids[0, 1], ids[-1, 0] = -1, 3
    leaves = ow.weights({"x": x, "w": w, "ids": ids})
    there = (ids >= 0) & (ids < 3)
    want = np.einsum("tui,tuoi->tuo", x, w[np.where(there, ids, 0)]) * there[..., None]
    close(run(formed, ow.expert_linear(leaves["x"], leaves["w"], leaves["ids"])), want)


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_rows_of_a_quantized_table_that_do_not_exist_are_zeros_where_nobody_checks(device, monkeypatch, index):
    monkeypatch.setenv(VARIABLE, "0")
    dtype = ow.as_dtype("q8_0")
    raw = np.random.default_rng(3).integers(0, 100, (5, 2 * dtype.itemsize), np.uint8)
    leaves = ow.weights({"w": ow.Blocks(raw, (5, 64), dtype), "ids": np.array([4, -1, 5, 0], index)})
    got = run(device, ow.embedding(leaves["w"], leaves["ids"]))
    np.testing.assert_array_equal(got[[0, 3]], dequantize(raw, dtype)[[4, 0]])
    assert not got[[1, 2]].any()


SPATIAL = [
    case
    for case in CASES
    if case.op in ("attention", "conv2d", "conv_transpose2d") and {x.dtype for x in case.operands} == {"f32"}
][::12]


@pytest.mark.parametrize("cases", by_operation(SPATIAL))
def test_attention_and_convolutions(formed, cases):
    results = assert_right(formed, cases)
    assert [f"{r.id}: {r.reason}" for r in results if r.status != "passed"] == []


def test_rotations_by_positions_that_f32_is_too_coarse_for(device):
    x = floats(3, 64)
    positions = np.array([16_777_217, 1_000_003, 40_000_001], np.int64)
    leaves = ow.weights({"x": x, "positions": positions})
    node = ow.rope(leaves["x"], leaves["positions"])
    want = run("host", node)
    np.testing.assert_allclose(run(device, node), want, rtol=1e-5, atol=1e-5)


def test_pairs_with_an_infinite_factor_do_not_turn(device):
    x, factors = floats(3, 8), np.array([1, np.inf, 2, -np.inf], np.float32)
    leaves = ow.weights({"x": x, "positions": np.array([1, 70, 3]), "factors": factors})
    node = ow.rope(leaves["x"], leaves["positions"], factors=leaves["factors"])
    np.testing.assert_allclose(run(device, node), run("host", node), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("states", [3, 4, 20])
def test_an_infinite_input_of_a_scan_stays_infinite(device, states):
    u, delta = np.abs(floats(1, 2, 3)) + 0.1, np.ones((1, 2, 3), np.float32)
    u[0, 1, 0] = np.inf
    a, b = -np.ones((2, states), np.float32), np.ones((1, states, 3), np.float32)
    leaves = ow.weights({"u": u, "delta": delta, "a": a, "b": b})
    node = ow.selective_scan(leaves["u"], leaves["delta"], leaves["a"], leaves["b"], leaves["b"])
    want = run("host", node)
    assert np.isinf(want[0, 1]).all()
    np.testing.assert_allclose(run(device, node), want, rtol=1e-5)


LANES = [
    (16, 384, 33, "f32"), (23, 70, 48, "f32"), (24, 513, 48, "f32"), (129, 530, 32, "f32"), (40, 600, 17, "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("m", "k", "n", "name"), LANES)
def test_rows_are_lanes_where_most_lanes_have_a_row(device, monkeypatch, m, k, n, name):
    """Of 23 rows more than a quarter of two panels would be idle. Some sums are taken in several parts."""
    names = noted(device, monkeypatch)
    leaves = ow.weights({"x": floats(m, k), "w": floats(n, k), "bias": floats(n)})
    x, w, bias = (ow.cast(leaves[key], name) for key in ("x", "w", "bias"))
    got = run(device, ow.cast(ow.linear(x, w, bias), "f32"))
    assert ("lanes" in names) == (m != 23)
    want = floats(m, k).astype(np.float64) @ floats(n, k).T + floats(n)
    rough = 0.0 if name == "f32" else 2e-2
    np.testing.assert_allclose(got, want, rtol=1e-4 + rough, atol=1e-4 + 15 * rough)


def test_transposed_convolutions_take_some_images_at_a_time(device, monkeypatch):
    names = noted(device, monkeypatch)
    x, w = floats(3, 4, 5, 6), floats(4, 2, 3, 3)
    columns = 4 * 4 * 9 * 30  # bytes of those of an image
    leaves = ow.weights({"x": x, "w": w, "b": floats(4)})
    node = ow.conv_transpose2d(leaves["x"], leaves["w"], leaves["b"], stride=2, padding=1, groups=2)
    want = run("host", node)
    for bytes_, folds in ((3 * columns, 1), (2 * columns, 2), (columns - 1, 0)):
        monkeypatch.setattr(convolution.MOST_COLUMNS, "value", bytes_)
        names.clear()
        close(run(anew(device), node), want)
        assert names.count("fold") == folds
