"""Rows whose elements belong together are computed whole, however long they are and however many threads there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest

import opweave as ow
from opweave_cpu.tunables import COMPILED_WORK, SPREAD, SPREAD_PASS

Truth = Callable[[Any], Any]


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


OPERATIONS: Final[Mapping[str, tuple[Callable[[ow.Tensor], ow.Tensor], Truth]]] = {
    "softmax": (ow.softmax, softmax),
    "log_softmax": (ow.log_softmax, lambda x: np.log(softmax(x))),
    "rms_norm": (lambda x: ow.rms_norm(x, eps=1e-5), lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)),
    "layer_norm": (lambda x: ow.layer_norm(x, eps=1e-5), layer_norm),
    "cumsum": (lambda x: ow.cumsum(x, -1), lambda x: np.cumsum(x, -1)),
    "sum": (lambda x: ow.sum(x, -1), lambda x: x.sum(-1)),
    "mean": (lambda x: ow.mean(x, -1), lambda x: x.mean(-1)),
    "max": (lambda x: ow.max(x, -1), lambda x: x.max(-1)),
    "argmax": (lambda x: ow.argmax(x, -1), lambda x: x.argmax(-1)),
    "relu": (ow.relu, lambda x: np.maximum(x, 0)),
}
"""By name: the graph, and the same in NumPy."""

LENGTHS: Final = (2, 63, 64, 65, 1023, 8191, 25999, 26213, 32768, 32769, 65536, 65537, 131071)
"""On both sides of vectors, of the longest rows that are compiled, and of the work from which on threads take part."""

ERRORS: Final = {"f64": 1e-12, "f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}

TINY: Final = {"f64": 1e-300, "f32": 1e-38, "f16": 6.2e-5, "bf16": 1e-38}
"""Of smaller numbers a dtype has fewer digits."""


@pytest.fixture(params=[None, 1], ids=["as it is", "threads from the first element on"])
def limits(request, monkeypatch):
    if request.param is not None:
        for limit in (COMPILED_WORK, SPREAD, SPREAD_PASS):
            monkeypatch.setattr(limit, "value", request.param)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.usefixtures("limits")
def test_of_one_row_or_few(name, dtype):
    build, truth = OPERATIONS[name]
    rng = np.random.default_rng(0)
    kind = ow.as_dtype(dtype).numpy
    with ow.Scheduler(ow.open_device("cpu?threads=2")) as scheduler:
        for n in LENGTHS:
            for shape in ((n,), (1, n), (1, 1, n), (2, n), (n, 1), (n // 2 or 1, 2)):
                x = rng.standard_normal(shape)
                if name == "layer_norm":  # of two elements that are nearly equal no digit is right
                    x = 0.2 * x + np.arange(shape[-1]) % 2
                x = x.astype(kind)
                want = truth(x.astype(np.float64))
                got = scheduler.build(build(ow.input("x", shape, dtype))).run(x=x)
                if name == "argmax":
                    np.testing.assert_array_equal(got, want)
                    continue
                scale = np.sqrt(np.mean(np.square(want))) + np.abs(want) + TINY[dtype]
                error = np.max(np.abs(got.astype(np.float64) - want) / scale)
                assert error <= ERRORS[dtype], (shape, error)


def test_the_loss_of_one_row_over_a_large_vocabulary(monkeypatch):
    rng = np.random.default_rng(0)
    for work in (COMPILED_WORK.value, 1):
        monkeypatch.setattr(COMPILED_WORK, "value", work)
        for n in (1000, 30000, 151936):
            logits = rng.standard_normal((1, n)).astype(np.float32)
            graph = ow.cross_entropy(ow.input("logits", (1, n)), ow.input("label", (1,), "i32"))
            got = ow.Scheduler(ow.open_device("cpu?threads=2")).build(graph).run(logits=logits, label=[7])
            assert got == pytest.approx(-np.log(softmax(logits.astype(np.float64)))[0, 7], rel=1e-5)


@pytest.mark.parametrize("n", [1000, 1 << 18, 1 << 21])
def test_of_integers_and_truth_values_however_many(n):
    rng = np.random.default_rng(0)
    for dtype in ("bool", "u8", "i8", "i16", "i32", "i64"):
        kind = ow.as_dtype(dtype).numpy
        a, b = (rng.integers(0, 2 if dtype == "bool" else 120, n).astype(kind) for _ in range(2))
        if dtype not in ("bool", "u8"):
            a -= np.array(60, kind)
        x, y = ow.input("x", (n,), dtype), ow.input("y", (n,), dtype)
        pairs = [(x < y, a < b), (x <= y, a <= b), (x > y, a > b), (ow.equal(x, y), a == b),
                 (ow.minimum(x, y), np.minimum(a, b)), (ow.maximum(x, y), np.maximum(a, b))]  # fmt: skip
        if dtype != "bool":
            pairs += [(ow.relu(x), np.maximum(a, 0)), (ow.clamp(x, min=5), np.maximum(a, 5)),
                      (ow.clamp(x, max=5), np.minimum(a, 5)),
                      (ow.clamp(x, min=3, max=9), np.clip(a, 3, 9))]  # fmt: skip
        for graph, want in pairs:
            got = ow.compile(graph, devices=["cpu"])(**{"x": a, "y": b} if graph.srcs[1:] else {"x": a})
            np.testing.assert_array_equal(got, want, str(graph))
