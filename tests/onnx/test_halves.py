"""Operators that are built of several operations, in half types: results are those of the definition in f64, rounded
once, also where powers and sums within are beyond f16."""

from __future__ import annotations

import numpy as np
import pytest

import opweave_onnx
from opweave.graph.dtypes import as_dtype
from tests.support.onnx_models import model, node, value

RNG = np.random.default_rng(35)
LARGE = RNG.uniform(100, 1000, (2, 4, 9, 11))
"""Squares of these, and sums of them, are beyond f16."""
SMALL = RNG.uniform(-4, 4, (2, 4, 9, 11))
LONG = RNG.uniform(100, 1000, (2, 10_000))


def mean_variance(x):
    return (x - x.mean((0, 2, 3), keepdims=True)) / (x.std((0, 2, 3), keepdims=True) + 1e-9)


def windows(x):
    """All windows of 2 x 2 side by side but the last row and column: (2, 4, 4, 5, 4)."""
    return np.stack([x[:, :, i : i + 7 : 2, j : j + 9 : 2] for i in range(2) for j in range(2)], -1)


def lrn(x):
    squares = np.pad(np.square(x), ((0, 0), (1, 1), (0, 0), (0, 0)))
    return x / (1 + 1e-4 / 3 * sum(squares[:, i : i + 4] for i in range(3))) ** 0.75


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)


def batch_norm(x):
    return (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_sum_exp(x):
    return np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)


CASES = {
    "l2": (node("ReduceL2", "x last", "l2", keepdims=0), lambda t: np.sqrt(np.square(t["x"]).sum(-1))),
    "l2 long": (node("ReduceL2", "long last", "l2_long"), lambda t: np.sqrt(np.square(t["long"] / 8).sum(-1)) * 8),
    "logsum": (node("ReduceLogSum", "long last", "logsum"), lambda t: np.log(t["long"].sum(-1))),
    "logsumexp": (node("ReduceLogSumExp", "x last", "lse", keepdims=0), lambda t: log_sum_exp(t["x"])),
    "lrn": (node("LRN", "x", "lrn", size=3), lambda t: lrn(t["x"])),
    "lp 2": (node("LpNormalization", "long", "lp2"),
             lambda t: t["long"] / np.sqrt(np.square(t["long"]).sum(-1, keepdims=True))),
    "lp 1": (node("LpNormalization", "long", "lp1", p=1), lambda t: t["long"] / t["long"].sum(-1, keepdims=True)),
    "lp pool": (node("LpPool", "x", "pool", kernel_shape=[2, 2], strides=[2, 2]),
                lambda t: np.sqrt(np.square(windows(t["x"])).sum(-1))),
    "lp pool 3": (node("LpPool", "x", "pool3", kernel_shape=[2, 2], strides=[2, 2], p=3),
                  lambda t: np.cbrt((windows(t["x"]) ** 3).sum(-1))),
    "global lp": (node("GlobalLpPool", "x", "global", p=2), lambda t: np.sqrt(np.square(t["x"]).sum((2, 3)))),
    "mean pool": (node("AveragePool", "x", "mean", kernel_shape=[9, 11], dilations=[1, 1], pads=[0, 0, 1, 1]),
                  lambda t: np.array([[t["x"][:, :, i:, j:].mean((2, 3)) for j in (0, 1)] for i in (0, 1)])
                  .transpose(2, 3, 0, 1)),
    "batch norm": (node("BatchNormalization", "x one zero mu var", "bn"),
                   lambda t: (t["x"] - 500) / np.sqrt(t["var"][0] + 1e-5)),
    "training": (node("BatchNormalization", "x one zero mu var", "bt bt_mean bt_var", training_mode=1),
                 lambda t: batch_norm(t["x"])),
    "moments": (node("MeanVarianceNormalization", "x", "mvn"), lambda t: mean_variance(t["x"])),
    "skip norm": (node("SkipLayerNormalization", "rows more wide", "skip", domain="com.microsoft"),
                  lambda t: layer_norm(t["rows"] + t["more"])),
    "softsign": (node("Softsign", "s", "softsign"), lambda t: t["s"] / (1 + np.abs(t["s"]))),
    "mish": (node("Mish", "s", "mish"), lambda t: t["s"] * np.tanh(np.log1p(np.exp(t["s"])))),
    "quick gelu": (node("QuickGelu", "s", "quick", domain="com.microsoft"),
                   lambda t: t["s"] * sigmoid(1.702 * t["s"])),
    "selu": (node("Selu", "s", "selu"),
             lambda t: 1.0507009873554805 * np.where(t["s"] > 0, t["s"], 1.6732632423543772 * np.expm1(t["s"]))),
    "sum": (node("Sum", "huge huge gone", "sum"), lambda t: t["huge"]),
    "mean": (node("Mean", "huge huge huge", "average"), lambda t: t["huge"]),
    "gemm": (node("Gemm", "long long", "gemm", transB=1, alpha=1e-6), lambda t: 1e-6 * t["long"] @ t["long"].T),
    "einsum": (node("Einsum", "long long little", "ein", equation="ij,kj,ik->i"),
               lambda t: np.einsum("ij,kj,ik->i", t["long"], t["long"], t["little"])),
    "softmax": (node("Softmax", "flat", "even"), lambda t: np.full(t["flat"].shape, 1 / t["flat"].size)),
    "resize": (node("Resize", "x - - sizes", "resized", mode="linear"), None),
}  # fmt: skip
FEEDS = {
    "x": LARGE, "s": SMALL, "long": LONG, "rows": RNG.uniform(-40000, 40000, (1, 3, 64)),
    "more": RNG.uniform(-40000, 40000, (1, 3, 64)), "wide": np.ones(64), "one": np.ones(4), "zero": np.zeros(4),
    "mu": np.full(4, 500.0), "var": np.full(4, 60000.0), "huge": np.full(5, 40000.0), "gone": np.full(5, -40000.0),
    "flat": np.zeros((1, 70_000)), "little": np.full((2, 2), 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["fed", "known statistics"])
@pytest.mark.parametrize(("dtype", "digits"), [("f16", 11), ("bf16", 8)])
def test_results_are_rounded_once(placement, dtype, digits, known):
    kind = as_dtype(dtype).numpy
    feeds = {name: a.astype(kind) for name, a in FEEDS.items()}
    fixed = {name: feeds.pop(name) for name in ("one", "zero", "mu", "var") if known}
    sizes = {"sizes": np.array([2, 4, 18, 22]), "last": np.array([-1])}
    proto = model([made for made, _ in CASES.values()], [value(name, kind, a.shape) for name, a in feeds.items()],
                  [made.output[0] for made, _ in CASES.values()], {**fixed, **sizes}, version=22)  # fmt: skip
    given = {name: a.astype(np.float64) for name, a in {**feeds, **fixed}.items()}
    with opweave_onnx.load(proto, placement) as loaded:
        found = loaded.run(feeds)
    wrong = {}
    for name, (made, truth) in CASES.items():
        result = found[made.output[0]]
        assert result.dtype == kind, name
        got = result.astype(np.float64)
        want = (truth(given) if truth else resized(given["x"])).reshape(got.shape)
        # One rounding is half a unit of the last place; f32 before it adds little.
        limit = 0.52 * 2.0 ** (1 - digits) * np.abs(want) + 2e-6 * np.abs(want).max() + 6e-8
        if not (np.abs(got - want) <= limit).all():
            wrong[name] = float((np.abs(got - want) / limit).max())
    assert not wrong


def resized(x):
    """Both axes twice as long, by linear interpolation between centers."""
    for axis in (2, 3):
        n = x.shape[axis]
        at = np.clip((np.arange(2 * n) + 0.5) / 2 - 0.5, 0, n - 1)
        low = np.minimum(np.floor(at).astype(int), n - 2)
        share = (at - low).reshape([-1 if i == axis else 1 for i in range(4)])
        x = np.take(x, low, axis) * (1 - share) + np.take(x, low + 1, axis) * share
    return x


def test_integer_products_in_half_types(placement):
    """Sums of integers beyond f16, times scales that bring them back."""
    a, b = np.full((2, 1000), 200, np.uint8), np.full((1000, 3), 100, np.int8)
    scales = np.array([2e-4], np.float16), np.array([5e-3], np.float16)
    product = node("MatMulIntegerToFloat", "a b a_scale b_scale", "y", domain="com.microsoft")
    known: dict[str, np.ndarray] = {"b": b, "a_scale": scales[0], "b_scale": scales[1]}
    proto = model([product], [value("a", np.uint8, [2, 1000])], ["y"], known)
    with opweave_onnx.load(proto, placement) as loaded:
        found = loaded.run({"a": a})["y"]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, 2e7 * float(scales[0][0]) * float(scales[1][0]), rtol=6e-4)
