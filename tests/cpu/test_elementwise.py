"""Elementwise kernels beyond the conformance cases: sizes above one tile, in several threads, in place, and memory."""

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS
from opweave_cpu import CpuDevice, tunables
from opweave_cpu.kernels import elementwise
from opweave_cpu.threads import THREADS

Array = np.ndarray[Any, Any]
Apply = Callable[..., Array]

STEPS: list[tuple[str, int, dict[str, Any]]] = [
    ("abs", 1, {}),
    ("square", 1, {}),
    ("rsqrt", 1, {}),
    ("expm1", 1, {}),
    ("pow", 2, {}),
    ("round", 1, {}),
    ("minimum", 2, {}),
    ("clamp", 1, {"min": -0.5, "max": 0.75}),
    ("clamp", 1, {"min": -0.5, "max": math.inf}),
    ("clamp", 1, {"min": -math.inf, "max": 0.75}),
    ("step", 1, {}),
    ("relu", 1, {}),
    ("leaky_relu", 1, {"negative_slope": 0.2}),
    ("elu", 1, {"alpha": 0.5}),
    ("softplus", 1, {}),
    ("hardswish", 1, {}),
    ("gelu_tanh", 1, {}),
    ("gelu_quick", 1, {}),
    ("erf", 1, {}),
    ("atan", 1, {}),
    ("reglu", 2, {}),
    ("geglu", 2, {"approximate": "none"}),
    ("geglu", 2, {"approximate": "tanh"}),
    ("swiglu", 2, {}),
    ("swiglu_oai", 2, {"alpha": 1.702, "limit": 1.5}),
]
IDS = [f"{op}-{'-'.join(map(str, attrs.values()))}".rstrip("-") for op, _, attrs in STEPS]


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads on any machine, and sizes that keep the tests short."""
    monkeypatch.setattr(THREADS, "cores", 3)
    monkeypatch.setattr(tunables.SPREAD, "value", 1 << 16)
    monkeypatch.setattr(tunables.SHARED_TILE, "value", 1 << 14)
    monkeypatch.setattr(tunables.TILE, "value", 1 << 13)
    monkeypatch.setattr(tunables.SPREAD_PASS, "value", 1 << 16)


def operands(count: int, dtype: Any, *shape: int) -> list[Array]:
    return [np.random.default_rng(i).standard_normal(shape).astype(dtype) for i in range(count)]


def exact(op: str, srcs: list[Array], attrs: dict[str, Any]) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(OPS[op].reference(*srcs, **attrs)).astype(srcs[-1].dtype)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize(("op", "count", "attrs"), STEPS, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_big_steps(apply: Apply, op: str, count: int, attrs: dict[str, Any], dtype: Any, turned: bool) -> None:
    srcs = operands(count, dtype, 7, 61, 103)
    if turned:
        srcs = [x.swapaxes(1, 2) for x in srcs]
    got = apply(op, np.zeros(srcs[0].shape, dtype), *srcs, **attrs)
    eps = float(ml_dtypes.finfo(dtype).eps)
    want = exact(op, srcs, attrs).astype(np.float64)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=8 * eps, atol=8 * eps)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize(("op", "count", "attrs"), STEPS, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_big_steps_in_place_over_each_source(
    device: CpuDevice, apply: Apply, op: str, count: int, attrs: dict[str, Any], dtype: Any
) -> None:
    srcs = operands(count, dtype, 70, 601)
    want = apply(op, np.zeros_like(srcs[0]), *srcs, **attrs)
    for over in range(count):
        args = [placed(device, x) for x in srcs]
        device.open().run([Step(op, args[over], tuple(args), attrs)])
        np.testing.assert_array_equal(args[over].view, want)


def placed(device: CpuDevice, x: Array) -> Arg:
    buffer = device.alloc(x.nbytes)
    buffer.upload(0, x)
    return Arg(buffer, 0, as_dtype(x.dtype), x.shape, x.strides)


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.bool_])
def test_big_choices_keep_every_bit(device: CpuDevice, apply: Apply, dtype: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (2, 33, 999 * np.dtype(dtype).itemsize), np.uint8)
    a, b = (bits & 1 if dtype is np.bool_ else bits).view(dtype)
    condition = np.random.default_rng(1).random(a.shape) < 0.5
    want = np.where(condition, a, b)
    got = apply("where", np.zeros_like(a), condition, a, b)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    for over in (1, 2):
        args = [placed(device, x) for x in (condition, a, b)]
        device.open().run([Step("where", args[over], tuple(args), {})])
        np.testing.assert_array_equal(args[over].view.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_clamped_at_the_nearest_bound_they_hold(apply: Apply, dtype: Any) -> None:
    x = np.array([-1, 0, 1], dtype)
    got = apply("clamp", np.zeros_like(x), x, min=-0.1, max=0.1)
    np.testing.assert_array_equal(got, np.array([-0.1, 0, 0.1], dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_near_their_limits_keep_their_digits(apply: Apply, dtype: Any) -> None:
    x = np.array([-80, -20, -6, -1e-3, 1e-3, 6, 20, 80], dtype)
    for op in ("softplus", "gelu_tanh", "gelu_quick", "silu", "elu"):
        attrs = {"alpha": 1.0} if op == "elu" else {}
        got, want = apply(op, np.zeros_like(x), x, **attrs), exact(op, [x], attrs)
        # The argument of exp is rounded: its error grows with its size, up to a few hundred here.
        np.testing.assert_allclose(got, want, rtol=400 * np.finfo(dtype).eps, err_msg=op)


@pytest.mark.parametrize(("op", "count", "attrs"), STEPS, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_running_takes_no_memory_beyond_the_planned_workspace(
    device: CpuDevice, op: str, count: int, attrs: dict[str, Any], dtype: Any
) -> None:
    args = [placed(device, x) for x in operands(count + 1, dtype, 300, 1001)]
    stream = device.open()
    (group,) = stream.fuse([Step(op, args[0], tuple(args[1:]), attrs)])
    if group.workspace:
        group = group._replace(scratch=placed(device, np.zeros(group.workspace, np.uint8)))
    plan = stream.compile([group])
    plan.run()
    tracemalloc.start()
    plan.run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # NumPy converts through buffers of 8192 elements; an operand has 300 thousand.
    assert peak < 200_000


@pytest.mark.parametrize("op", ["exp", "expm1", "log1p", "sin", "cos", "tanh"])
@pytest.mark.parametrize("vectors", [False, True])
def test_functions_of_halves_are_right_with_and_without_vectors_for_them(
    monkeypatch: pytest.MonkeyPatch, apply: Apply, op: str, vectors: bool
) -> None:
    monkeypatch.setattr(elementwise, "has_avx512", lambda: vectors)
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_allclose(apply(op, np.zeros_like(x), x), exact(op, [x], {}), rtol=1e-3, atol=6e-8)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_relu_of_every_half(apply: Apply, dtype: Any) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    got, want = (v.astype(np.float32) for v in (apply("relu", np.zeros_like(x), x), exact("relu", [x], {})))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 4e-7), (np.float64, 1e-15)])
def test_erf_keeps_its_digits_near_zero_and_at_its_joint(apply: Apply, dtype: Any, rtol: float) -> None:
    ends = 10.0 ** np.linspace(-30, 0, 300)
    joint = 1 + np.linspace(-1e-5, 1e-5, 101)
    x = np.concatenate([np.linspace(-7, 7, 4001), ends, -ends, joint, -joint]).astype(dtype)
    np.testing.assert_allclose(apply("erf", np.zeros_like(x), x), [math.erf(float(v)) for v in x], rtol=rtol, atol=0)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], dtype)
    got = apply("erf", np.zeros_like(special), special)
    np.testing.assert_array_equal(got, np.array([np.nan, 1, -1, 0, -0.0], dtype))
    assert np.signbit(got[4])
