"""What the conformance cases do not look at: rounding of half types, tails, sizes above one tile, special values."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.errors import BoundsError
from opweave.graph.dtypes import as_dtype
from opweave_cpu import CpuDevice, exponential, tunables
from opweave_cpu.threads import THREADS

Array = np.ndarray[Any, Any]
Apply = Callable[..., Array]
HALVES = [np.float16, ml_dtypes.bfloat16]


def integers(*shape: int, dtype: Any) -> Array:
    """Small integers: sums of their products are exact in f32, so that only the last rounding shows."""
    return np.random.default_rng(0).integers(-9, 10, shape).astype(dtype)


# --- half types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_half_products_are_rounded_once(apply: Apply, dtype: Any) -> None:
    a, b = integers(33, 701, dtype=dtype), integers(701, 45, dtype=dtype)
    got = apply("matmul", np.zeros((33, 45), dtype), a, b)
    np.testing.assert_array_equal(got, (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_linear_is_rounded_once_behind_the_bias(apply: Apply, dtype: Any) -> None:
    # Enough weights for several tiles of converted rows.
    x, w, b = integers(2, 3, 701, dtype=dtype), integers(900, 701, dtype=dtype), integers(900, dtype=dtype)
    got = apply("linear", np.zeros((2, 3, 900), dtype), x, w, b)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64)
    np.testing.assert_array_equal(got, exact.astype(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_half_sums_are_rounded_once(apply: Apply, dtype: Any, op: str) -> None:
    x = integers(5, 1024, dtype=dtype)
    got = apply(op, np.zeros(5, dtype), x, axes=(1,))
    np.testing.assert_array_equal(got, getattr(np, op)(x.astype(np.float64), axis=1).astype(dtype))


# --- accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", [False, True])
def test_powers_of_e_are_right_by_either_way(monkeypatch: pytest.MonkeyPatch, vectors: bool) -> None:
    monkeypatch.setattr(exponential, "has_avx512", lambda: vectors)
    power, factor = exponential.exponential.__wrapped__(as_dtype("f32"))
    x = np.linspace(-87, 88, 5001).astype(np.float32)
    np.testing.assert_allclose(power(np.float32(factor) * x), np.exp(x.astype(np.float64)), rtol=5e-6)


@pytest.mark.parametrize(("dtype", "lowest", "error"), [(np.float32, -12.0, 1e-5), (np.float64, -36.0, 5e-13)])
def test_gelu_keeps_its_digits_far_below_zero(apply: Apply, dtype: Any, lowest: float, error: float) -> None:
    x = np.linspace(lowest, 6, 5001).astype(dtype)
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    got = apply("gelu", np.zeros_like(x), x)
    np.testing.assert_allclose(got, exact, rtol=error, atol=0)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(got, exact, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize(("dtype", "least"), [(np.float32, -20.0), (np.float64, -39.0)])
@pytest.mark.parametrize("length", [1, 100_000])
def test_gelu_is_zero_where_the_normal_distribution_is(apply: Apply, dtype: Any, least: float, length: int) -> None:
    for value in (least, 2 * least, -1e30):
        got = apply("gelu", np.ones(length, dtype), np.full(length, value, dtype))
        assert not got.any(), got[0]


@pytest.mark.parametrize("axis", [(0,), (0, 1)])
def test_long_sums_across_rows_do_not_drift(apply: Apply, axis: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).random((500, 1000, 3), np.float32)
    exact = x.sum(axis, dtype=np.float64)
    got = apply("sum", np.zeros(exact.shape, np.float32), x, axes=axis)
    np.testing.assert_allclose(got, exact, rtol=1e-6)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("n", [127, 128, 129, 300, 2048, 2053, 20_001])
@pytest.mark.parametrize("columns", [1, 3, 1100])
@pytest.mark.parametrize("op", ["sum", "mean", "var"])
def test_sums_in_stages_leave_nothing_out(apply: Apply, op: str, columns: int, n: int, turned: bool) -> None:
    n = n if columns < 1000 else min(n, 2053)
    x = np.random.default_rng(n).random((n, columns), np.float32)
    exact = np.var(x.astype(np.float64), 0, ddof=1) if op == "var" else getattr(np, op)(x, 0, np.float64)
    attrs = {"correction": 1.0} if op == "var" else {}
    if turned:
        got = apply(op, np.zeros(columns, np.float32), x.T, axes=(1,), **attrs)
    else:
        got = apply(op, np.zeros(columns, np.float32), x, axes=(0,), **attrs)
    np.testing.assert_allclose(got, exact, rtol=2e-6)


def test_long_running_sums_do_not_drift(apply: Apply) -> None:
    x = np.random.default_rng(0).random(300_001, np.float32)
    got = apply("cumsum", np.zeros_like(x), x, axis=0)
    np.testing.assert_allclose(got, np.cumsum(x, dtype=np.float64), rtol=2e-6)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize(
    ("axes", "op"), [((1,), "sum"), ((2,), "sum"), ((1, 2), "sum"), ((2,), "max"), ((1, 2), "min")]
)
def test_big_reductions_in_threads(apply: Apply, monkeypatch: pytest.MonkeyPatch, axes: Any, op: str) -> None:
    monkeypatch.setattr(tunables.SPREAD_PASS, "value", 1 << 14)
    x = np.random.default_rng(0).random((1, 400, 307), np.float32)
    exact = getattr(np, op)(x.astype(np.float64), axes)
    got = apply(op, np.zeros(exact.shape, np.float32), x, axes=axes)
    np.testing.assert_allclose(got, exact, rtol=1e-6)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("descending", [False, True])
def test_big_orders(apply: Apply, descending: bool) -> None:
    x = np.random.default_rng(0).integers(-50, 50, (300, 401)).astype(np.float32)
    got = apply("argsort", np.zeros(x.shape, np.int64), x, axis=1, descending=descending, stable=True)
    np.testing.assert_array_equal(got, np.argsort(-x if descending else x, 1, kind="stable"))
    got = apply("top_k", np.zeros((300, 7), np.int64), x, axis=1, k=7)
    np.testing.assert_array_equal(got, np.argsort(-x, 1, kind="stable")[:, :7])


@pytest.mark.parametrize("case", ["distinct", "ties", "equal", "nan", "nan at the end", "infinities"])
def test_the_few_largest_of_long_rows(apply: Apply, case: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4099)).astype(np.float32)
    if case == "ties":
        x = np.round(x, 1)
    elif case == "equal":
        x[1] = 2
    elif case.startswith("nan"):
        x[1, -1 if case.endswith("end") else 77] = np.nan
    elif case == "infinities":
        x[0, 5:3000] = -np.inf
        x[1, [7, 4098]] = np.inf
    got = apply("top_k", np.zeros((3, 9), np.int64), x, axis=1, k=9)
    np.testing.assert_array_equal(got, np.argsort(np.where(np.isnan(x), -np.inf, -x), 1, kind="stable")[:, :9])


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_big_groups(apply: Apply, dtype: Any) -> None:
    x, w = np.random.default_rng(0).random((3, 8, 5000)).astype(dtype), np.arange(8).astype(dtype)
    y = x.astype(np.float64).reshape(3, 4, -1)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    exact = y.reshape(x.shape) * w[:, None] + w[:, None]
    got = apply("group_norm", np.zeros_like(x), x, w, w, groups=4, eps=1e-5)
    np.testing.assert_allclose(got, exact, rtol=16 * np.finfo(dtype).eps, atol=1e-4)


# --- sizes above one tile, in several threads -----------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads on any machine, and sizes that keep the tests short."""
    monkeypatch.setattr(THREADS, "cores", 3)
    monkeypatch.setattr(tunables.SPREAD, "value", 1 << 18)
    monkeypatch.setattr(tunables.SHARED_TILE, "value", 1 << 15)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(("op", "exact"), [("sigmoid", sigmoid), ("silu", lambda x: x * sigmoid(x))])
def test_big_activations(apply: Apply, dtype: Any, op: str, exact: Callable[[Array], Array]) -> None:
    x = (3 * np.random.default_rng(0).standard_normal((3, 5, 40_007))).astype(dtype)
    got = apply(op, np.zeros_like(x), x)
    np.testing.assert_allclose(got, exact(x.astype(np.float64)), rtol=4 * np.finfo(dtype).eps, atol=1e-7)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_big_softmax(apply: Apply, dtype: Any, transposed: bool) -> None:
    x = (3 * np.random.default_rng(0).standard_normal((70, 150, 61))).astype(dtype)
    x = x.swapaxes(1, 2) if transposed else x
    got = apply("softmax", np.zeros(x.shape, dtype), x, scale=1.0)
    np.testing.assert_allclose(got, softmax(x.astype(np.float64)), rtol=8 * np.finfo(dtype).eps, atol=1e-7)


@pytest.mark.usefixtures("three_cores")
def test_a_big_operand_that_is_not_contiguous(apply: Apply) -> None:
    x = np.random.default_rng(0).standard_normal((40, 30, 7, 41)).astype(np.float32).swapaxes(2, 3)
    got = apply("sigmoid", np.zeros(x.shape, np.float32), x)
    np.testing.assert_allclose(got, sigmoid(x.astype(np.float64)), rtol=1e-6)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize(("op", "attrs"), [("gelu", {}), ("softmax", {"scale": 2.0}), ("layer_norm", {"eps": 1e-5})])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_big_steps_in_place_give_what_they_give_elsewhere(
    device: CpuDevice, apply: Apply, dtype: Any, op: str, attrs: dict[str, float]
) -> None:
    x = np.random.default_rng(0).standard_normal((700, 301)).astype(dtype)
    buffer = device.alloc(x.nbytes)
    buffer.upload(0, x)
    arg = Arg(buffer, 0, as_dtype(dtype), x.shape, x.strides)
    device.open().run([Step(op, arg, (arg,), attrs)])
    np.testing.assert_array_equal(arg.view, apply(op, np.zeros_like(x), x, **attrs))


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_big_norms(apply: Apply, op: str) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((9, 70, 301)).astype(np.float32) + 1, rng.standard_normal(301).astype(np.float32)
    exact = x.astype(np.float64)
    exact -= exact.mean(-1, keepdims=True) if op == "layer_norm" else 0
    exact *= weight / np.sqrt(np.square(exact).mean(-1, keepdims=True) + 1e-5)
    got = apply(op, np.zeros_like(x), x, weight, eps=1e-5)
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("three_cores")
def test_a_row_longer_than_a_tile(apply: Apply) -> None:
    x = np.random.default_rng(0).standard_normal((4, 100_003)).astype(np.float32)
    got = apply("softmax", np.zeros_like(x), x, scale=1.0)
    np.testing.assert_allclose(got, softmax(x.astype(np.float64)), rtol=1e-5)


# --- special values -------------------------------------------------------------------------------------------------


def test_overflow_and_undefined_results_are_silent(apply: Apply) -> None:
    """NumPy's warnings are errors in this suite; every device gives infinities and NaN without a word."""
    zero, big = np.zeros(4, np.float32), np.full(4, 3e38, np.float32)
    assert np.isnan(apply("div", zero, zero, zero)).all()
    assert np.isinf(apply("exp", zero, big)).all()
    assert np.isnan(apply("log", zero, -big)).all()
    assert np.isinf(apply("mul", zero, big, big)).all()
    assert np.isinf(apply("cast", zero.astype(np.float16), big, dtype=as_dtype("f16"))).all()
    assert np.isinf(apply("scale", zero, big, scale=1e300, bias=0.0)).all()
    assert (apply("sigmoid", zero, -big) == 0).all()


def test_an_output_beside_a_tile_border_is_not_touched(device: CpuDevice) -> None:
    """Only the bytes of the workspace and the output are written."""
    f16 = as_dtype("f16")
    source, target = device.alloc(2 * 20_000), device.alloc(2 * 20_000 + 128)
    source.fill(0x3C)
    target.fill(0xAB)
    out = Arg(target, 64, f16, (20_000,), (2,))
    device.open().run([Step("gelu", out, (Arg(source, 0, f16, (20_000,), (2,)),), {})])
    raw = target.read()
    assert (raw[:64] == 0xAB).all()
    assert (raw[-64:] == 0xAB).all()


# --- indices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, 5, 1 << 30])
def test_an_index_outside_of_the_table_is_named(apply: Apply, dtype: Any, bad: int) -> None:
    table, ids = np.zeros((5, 3), np.float32), np.array([[0, 4], [bad, 2]], dtype)
    with pytest.raises(Exception, match=f"index {bad} at \\[1, 0\\] is outside of 0 .. 4") as caught:
        apply("embedding", np.zeros((2, 2, 3), np.float32), table, ids)
    assert isinstance(caught.value.__cause__, BoundsError)


def test_nothing_is_written_where_an_index_is_outside(device: CpuDevice) -> None:
    f32, i64 = as_dtype("f32"), as_dtype("i64")
    state, ids, rows = device.alloc(20), device.alloc(16), device.alloc(8)
    state.fill(0)
    rows.fill(1)
    ids.upload(0, np.array([1, -1]))
    srcs = (Arg(ids, 0, i64, (2,), (8,)), Arg(rows, 0, f32, (2, 1), (4, 4)))
    step = Step("index_copy", Arg(state, 0, f32, (5, 1), (4, 4)), srcs, {})
    with pytest.raises(Exception, match="index -1"):
        device.open().run([step])
    assert not state.read().any()


@pytest.mark.parametrize("shape", [(300, 700), (3, 257, 401), (2048, 1100)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "u8", "f64"])
def test_big_transposing_copies_move_every_element(shape, dtype):
    x = np.arange(np.prod(shape)).reshape(shape).astype(ow.as_dtype(dtype).numpy)
    tensor = ow.input("x", shape, dtype)
    run = ow.compile(ow.contiguous(tensor.transpose()), devices=["cpu"])
    np.testing.assert_array_equal(run(x), x.T)


# --- ways that only some sizes take ---------------------------------------------------------------------------------


def on(device: str, tensor: ow.Tensor) -> Array:
    with ow.Scheduler([device]) as scheduler:
        return scheduler.build(tensor).run()


def normal(*shape: int, dtype: Any = np.float32) -> ow.Tensor:
    return ow.constant(np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype))


def assert_as_defined(tensor: ow.Tensor, error: float) -> None:
    exact = on("host", tensor)
    np.testing.assert_allclose(on("cpu", tensor), exact, rtol=error, atol=error * np.abs(exact).max())


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 1e-6), (np.float16, 2e-3)])
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_made_a_whole_number_of_times_as_large(mode: Any, factor: int, dtype: Any, error: float) -> None:
    assert_as_defined(ow.interpolate(normal(2, 3, 24, 31, dtype=dtype), scale_factor=factor, mode=mode), error)


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 1e-5), (np.float16, 2e-3)])
@pytest.mark.parametrize(
    "attrs",
    [{}, {"padding": 2, "stride": 2}, {"padding": 1, "dilation": 2, "groups": 2}, {"padding": 3, "stride": (2, 1)}],
    ids=str,
)
@pytest.mark.parametrize("fewest", [1, 64])  # with columns of a row of the kernel used for all of it, and without
def test_columns_of_a_convolution_in_several_parts(
    monkeypatch: pytest.MonkeyPatch, attrs: dict[str, Any], dtype: Any, error: float, fewest: int
) -> None:
    monkeypatch.setattr("opweave_cpu.kernels.convolution.COLUMNS.value", 1 << 15)
    monkeypatch.setattr("opweave_cpu.kernels.convolution.FEWEST_COLUMNS.value", fewest)
    x, w = normal(2, 8, 21, 23, dtype=dtype), normal(6, 8 // attrs.get("groups", 1), 3, 3, dtype=dtype)
    assert_as_defined(ow.conv2d(x, w, normal(6, dtype=dtype), **attrs), error)


@pytest.mark.parametrize("fewest", [1, 64])
def test_columns_of_lines_and_of_volumes(monkeypatch: pytest.MonkeyPatch, fewest: int) -> None:
    monkeypatch.setattr("opweave_cpu.kernels.convolution.COLUMNS.value", 1 << 15)
    monkeypatch.setattr("opweave_cpu.kernels.convolution.FEWEST_COLUMNS.value", fewest)
    line, volume = normal(2, 8, 901, dtype=np.float32), normal(1, 8, 7, 9, 11, dtype=np.float32)
    assert_as_defined(ow.conv1d(line, normal(4, 8, 5, dtype=np.float32), padding=2), 1e-5)
    assert_as_defined(ow.conv3d(volume, normal(6, 8, 2, 3, 3, dtype=np.float32), padding=1), 1e-5)


@pytest.mark.parametrize(
    "attrs", [{"padding": 1}, {"padding": 2, "stride": 2}, {"padding": 3, "stride": 3, "dilation": 2}], ids=str
)
@pytest.mark.parametrize("shape", [(2, 6, 40, 41), (1, 2, 70, 300)], ids=str)
def test_filters_of_single_channels_in_several_tiles(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], attrs: dict[str, int]
) -> None:
    monkeypatch.setattr(tunables.TILE, "value", 1 << 14)
    channels = shape[1]
    x, w = normal(*shape, dtype=np.float32), normal(2 * channels, 1, 3, 3, dtype=np.float32)
    assert_as_defined(ow.conv2d(x, w, normal(2 * channels, dtype=np.float32), groups=channels, **attrs), 1e-5)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 70, 999])
def test_running_sums_are_right_before_an_infinity_or_nan(apply: Apply, value: float, place: int) -> None:
    x = np.random.default_rng(0).random((3, 1000), np.float32)
    x[1, place] = value
    got = apply("cumsum", np.zeros_like(x), x, axis=1)
    np.testing.assert_allclose(got, np.cumsum(x, 1, dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "tokens", "keys"), [(8, 2, 1, 2100), (6, 2, 3, 700), (2, 2, 300, 1500), (3, 1, 600, 600)]
)
def test_attention_over_several_tiles_of_keys(
    heads: int, groups: int, tokens: int, keys: int, with_sinks: bool, causal: bool
) -> None:
    q, k, v = normal(2, heads, tokens, 32), normal(2, groups, keys, 32), normal(2, groups, keys, 24)
    sinks = normal(heads) if with_sinks else None
    assert_as_defined(ow.attention(q, k, v, causal=causal, sinks=sinks), 1e-5)
