"""What kernels do where the reference and other devices could differ: sizes of products, ties, indices out of range."""

from __future__ import annotations

import math

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave_conformance.values import SCALES
from opweave_opencl.kernels import KERNELS


def bound(device, array):
    """An operand with the values of ``array``, behind 256 bytes of something else."""
    buffer = device.alloc(256 + array.nbytes)
    buffer.upload(256, np.ascontiguousarray(array))
    return Arg(buffer, 256, as_dtype(array.dtype), array.shape, array.strides)


def read(arg):
    return arg.buffer.read(arg.offset).view(arg.dtype.numpy)[: arg.size].reshape(arg.shape)


def run(stream, op, out, *arrays, **attrs):
    target = bound(stream.device, out)
    stream.run([Step(op, target, tuple(bound(stream.device, a) for a in arrays), attrs)])
    stream.synchronize()
    return read(target)


@pytest.fixture
def unchecked(device):
    """A stream that does not check indices."""
    with device.open(check_indices=False) as opened:
        yield opened


def floats(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("tiled", [False, True], ids=["panel", "tile"])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (5, 1, 17), (5, 300, 16), (127, 257, 33), (129, 513, 65), (520, 40, 20)]
)
def test_products_of_odd_sizes(stream, monkeypatch, tiled, m, k, n):
    monkeypatch.setattr(stream.target, "tuning", stream.target.tuning._replace(tiled=tiled))
    a, b = floats(m, k), floats(k, n)
    got = run(stream, "matmul", np.zeros((m, n), np.float32), a, b)
    np.testing.assert_allclose(got, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)
    bias = floats(n)
    got = run(stream, "linear", np.zeros((m, n), np.float32), a, np.ascontiguousarray(b.T), bias)
    np.testing.assert_allclose(got, a.astype(np.float64) @ b + bias, rtol=1e-4, atol=1e-4)


def test_a_long_sum_keeps_small_addends(stream):
    x = np.full(1 << 22, 0.1, np.float32)
    got = run(stream, "sum", np.zeros((), np.float32), x, axes=(0,))
    assert got == pytest.approx(x.astype(np.float64).sum(), rel=2e-5)


def test_max_propagates_nan(stream):
    x = floats(4, 100)
    x[1, 50] = x[2, 99] = np.nan
    got = run(stream, "max", np.zeros(4, np.float32), x, axes=(1,))
    np.testing.assert_array_equal(got, x.max(1))


def test_argmax_takes_the_first_of_equals_and_nan_as_the_largest(stream):
    x = np.array([[1, 3, 3, 2], [np.inf, np.nan, np.nan, 0], [-np.inf] * 4], np.float32)
    got = run(stream, "argmax", np.zeros(3, np.int64), x, axis=1)
    assert got.tolist() == [1, 1, 0]


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_embedding_gives_zeros_for_rows_that_do_not_exist(unchecked, index):
    stream, table = unchecked, floats(5, 7)
    got = run(stream, "embedding", np.ones((4, 7), np.float32), table, np.array([4, -1, 5, 0], index))
    np.testing.assert_array_equal(got[[0, 3]], table[[4, 0]])
    assert not got[[1, 2]].any()


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_index_copy_leaves_out_rows_that_do_not_exist(unchecked, index):
    stream = unchecked
    state, rows = floats(5, 7), floats(4, 7) + 10
    got = run(stream, "index_copy", state, np.array([4, -1, 5, 0], index), rows)
    state[[4, 0]] = rows[[0, 3]]
    np.testing.assert_array_equal(got, state)


def test_of_equal_indices_the_last_row_is_kept(stream):
    rows = floats(300, 3)
    got = run(stream, "index_copy", np.zeros((2, 3), np.float32), np.ones(300, np.int64), rows)
    np.testing.assert_array_equal(got, [[0, 0, 0], rows[-1]])


def test_softmax_of_large_logits(stream):
    x = np.array([[1e4, 1e4 - 1, -1e4]], np.float32)
    got = run(stream, "softmax", np.zeros((1, 3), np.float32), x, scale=1.0)
    np.testing.assert_allclose(got, [[1 / (1 + np.exp(-1)), np.exp(-1) / (1 + np.exp(-1)), 0]], rtol=1e-6)


def test_log_softmax_of_large_logits(stream):
    x = np.full((1, 4), 1e6, np.float32)
    got = run(stream, "log_softmax", np.zeros((1, 4), np.float32), x)
    np.testing.assert_allclose(got, np.full((1, 4), -np.log(4)), rtol=1e-6)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", [name for name in SCALES if name != "mxfp4"])
def test_products_with_blocks_whose_scale_is_no_number_are_no_number(stream, name, rows, scale):
    blocks = as_dtype(name)
    raw = np.random.default_rng(3).integers(0, 256, (3, 2 * blocks.itemsize), np.uint8)
    for at in SCALES[name]:
        for block in (0, blocks.itemsize):
            raw[:, block + at : block + at + 2] = np.array([0.01], np.float16).view(np.uint8)
    raw[1, SCALES[name][0] :][:2] = np.array([scale], np.float16).view(np.uint8)
    source = bound(stream.device, raw)
    w = Arg(source.buffer, source.offset, blocks, (3, 2 * blocks.block), (raw.shape[1], blocks.itemsize))
    target = bound(stream.device, np.zeros((rows, 3), np.float32))
    x = bound(stream.device, floats(rows, 2 * blocks.block))
    stream.run([Step("linear", target, (x, w), {"blocks": blocks})])
    stream.synchronize()
    assert np.isfinite(read(target)[:, [0, 2]]).all()
    assert not np.isfinite(read(target)[:, 1]).any()


def test_an_unsupported_dtype_is_refused_by_name(device):
    whole = Arg(None, 0, as_dtype("i32"), (4,), (4,))
    assert device.why_not(Step("exp", whole, (whole,), {})) == "the output is i32, not bf16 f16 f32 f64"


def test_without_double_precision_f64_is_moved_only():
    double = Arg(None, 0, as_dtype("f64"), (4,), (8,))
    table = KERNELS.without_f64
    assert table.why_not(Step("add", double, (double, double), {})) is not None
    assert table.why_not(Step("contiguous", double, (double,), {})) is None


@pytest.mark.parametrize(("shape", "axes"), [((1 << 20,), (0,)), ((3, 1 << 18), (1,)), ((1 << 17, 5), (0,))])
def test_large_reductions_are_made_in_parts(stream, shape, axes):
    x = floats(*shape)
    for op, want in (("sum", x.astype(np.float64).sum(axes)), ("max", x.max(axes)), ("min", x.min(axes))):
        got = run(stream, op, np.zeros(want.shape, np.float32), x, axes=axes)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-3)
    got = run(stream, "var", np.zeros(want.shape, np.float32), x, axes=axes, correction=1.0)
    np.testing.assert_allclose(got, x.astype(np.float64).var(axes, ddof=1), rtol=2e-5)


@pytest.mark.parametrize("n", [65, 1000, 5000])
def test_orders_of_long_axes_are_stable(stream, n):
    x = np.random.default_rng(1).integers(0, 50, (3, n)).astype(np.float32)
    attrs = {"axis": 1, "stable": True}
    got = run(stream, "argsort", np.zeros((3, n), np.int64), x, descending=False, **attrs)
    np.testing.assert_array_equal(got, np.argsort(x, 1, kind="stable"))
    got = run(stream, "argsort", np.zeros((3, n), np.int64), x, descending=True, **attrs)
    np.testing.assert_array_equal(got, np.argsort(-x, 1, kind="stable"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 64), (65, 1), (500, 64), (500, 65)])
def test_the_largest_are_in_the_order_of_a_stable_sort(stream, dtype, n, k):
    """Also of equal values, and of NaN, which counts as the largest; along an axis with gaps."""
    x = np.random.default_rng(2).integers(-20, 20, (n, 3)).astype(dtype)
    if dtype is not np.int64:
        x[n // 2] = np.nan
        x[n // 3, 0] = -np.inf
    got = run(stream, "top_k", np.zeros((k, 3), np.int64), x, k=k, axis=0)
    keys = np.where(np.isnan(x), -np.inf, -x.astype(np.float64))
    np.testing.assert_array_equal(got, np.argsort(keys, 0, kind="stable")[:k])


def test_the_first_positions_of_long_lines_take_one_pass_on_processors(stream, monkeypatch):
    if stream.target.tuning.row_group > 1:
        pytest.skip("groups of work-items share a line there")
    names: list[str] = []
    launch = type(stream).launch

    def noting(self, program, name, *rest):
        names.append(name)
        return launch(self, program, name, *rest)

    monkeypatch.setattr(type(stream), "launch", noting)
    run(stream, "top_k", np.zeros((2, 64), np.int64), floats(2, 5000), k=64, axis=1)
    assert names == ["keep"]
    run(stream, "top_k", np.zeros((2, 65), np.int64), floats(2, 5000), k=65, axis=1)
    assert names[1:3] == ["rank", "merge"]


@pytest.mark.parametrize(
    ("shape", "swapped", "heads"),
    [
        ((2, 3, 7, 10), False, 6),
        ((2, 3, 7, 10), True, 3),
        ((1, 5, 1, 8), False, 5),
        ((1, 1, 4, 8), False, 1),
        ((7, 8), False, 1),
    ],
)
def test_rows_at_the_same_position_are_turned_by_angles_that_are_computed_once(
    stream, monkeypatch, shape, swapped, heads
):
    if stream.target.tuning.row_group > 1:
        pytest.skip("each row has work-items of its own there")
    x, dims = floats(*shape), shape[-1] - 2
    tensor = ow.constant(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) if swapped else ow.constant(x)
    turned = ow.rope(tensor, ow.constant(np.arange(3, 3 + shape[-2])), dims=dims)
    sizes: list[tuple[int, ...]] = []
    launch = type(stream).launch

    def noting(self, program, name, size, *rest):
        sizes.append(size)
        return launch(self, program, name, size, *rest)

    monkeypatch.setattr(type(stream), "launch", noting)
    with ow.Scheduler(stream) as scheduler, ow.Scheduler("host") as host:
        np.testing.assert_allclose(scheduler.build(turned).run(), host.build(turned).run(), rtol=1e-5, atol=1e-6)
    assert sizes[-1] == (shape[-1] - dims // 2, x[..., 0].size // heads, 1)


def test_long_running_sums_keep_small_addends(stream):
    x = np.full(1 << 20, 0.1, np.float32)
    got = run(stream, "cumsum", np.zeros(1 << 20, np.float32), x, axis=0)
    np.testing.assert_allclose(got, np.cumsum(x, dtype=np.float64), rtol=2e-5)


def test_columns_of_wide_matrices(stream):
    x = floats(70, 5003)
    x[[3, 60], 17] = np.nan
    for op, want in (("max", x.max(0)), ("argmax", x.argmax(0)), ("sum", x.astype(np.float64).sum(0))):
        attrs = {"axis": 0} if op == "argmax" else {"axes": (0,)}
        got = run(stream, op, np.zeros(5003, np.int64 if op == "argmax" else np.float32), x, **attrs)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "u8"])
@pytest.mark.parametrize(
    ("shape", "axes"), [((100, 70), (1, 0)), ((3, 37, 5, 130), (0, 3, 2, 1)), ((20, 16, 33), (2, 0, 1))]
)
def test_copies_that_transpose_axes(stream, dtype, shape, axes):
    x = np.abs(floats(*shape) * 50).astype(as_dtype(dtype).numpy, casting="unsafe")
    source = bound(stream.device, x)
    want = x.transpose(axes)
    turned = Arg(source.buffer, source.offset, source.dtype, want.shape, want.strides)
    target = bound(stream.device, np.zeros(want.shape, x.dtype))
    stream.run([Step("contiguous", target, (turned,), {})])
    stream.synchronize()
    np.testing.assert_array_equal(read(target), want)


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        ("exp", math.exp),
        ("expm1", math.expm1),
        ("tanh", math.tanh),
        ("softplus", lambda v: max(v, 0) + math.log1p(math.exp(-abs(v)))),
        ("gelu", lambda v: v * math.erfc(-v / math.sqrt(2)) / 2),
    ],
)
def test_elementary_functions_keep_their_digits(stream, op, formula):
    """Near zero, where results are small, and where they are about to vanish."""
    ends = 10.0 ** np.linspace(-20, 0, 200)
    x = np.concatenate([np.linspace(-13, 13, 4001), ends, -ends]).astype(np.float32)
    got = run(stream, op, np.zeros(x.shape, np.float32), x)
    np.testing.assert_allclose(got, [formula(float(v)) for v in x], rtol=6e-6, atol=0)
