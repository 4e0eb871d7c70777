"""Products that threads of a run share, beside NumPy in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.threads import ThreadPool
from opweave_cpu.kernels.matmul import SHARED_PRODUCT
from tests.support.noting import noted_results

Array = np.ndarray[Any, Any]

SHAPES = [(1, 40, 33), (33, 40, 1), (17, 40, 48), (48, 40, 17), (128, 96, 130)]
"""Rows, what is summed over, columns: parts have no, some, and whole units of rows or columns."""


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_product(got: Array, a: Array, b: Array) -> None:
    want = a.astype(np.float64) @ b.astype(np.float64)
    scale = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 8 * np.finfo(got.dtype).eps * scale).all()


@pytest.fixture(params=["compiled", "interpreted", "alone"])
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Programs whose products are shared in compiled code, by threads of Python, or by nobody."""
    limit = 1 if request.param != "alone" else SHARED_PRODUCT.largest
    if request.param == "compiled":
        pytest.importorskip("llvmlite")
        request.getfixturevalue("compiling")
        from opweave_cpu.jit import gemm, walk  # noqa: F401 - as if something had been compiled

        bound = noted_results(monkeypatch, gemm, "bind_gemm")
    elif request.param == "interpreted":
        monkeypatch.setenv("OPWEAVE_CPU_JIT", "0")
    with SHARED_PRODUCT.at(limit), ThreadPool(3) as pool, ow.Scheduler("cpu", threads=pool) as made:
        yield made
    if request.param == "compiled":
        assert bound


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
def test_products(scheduler: ow.Scheduler, dtype: str, shape: tuple[int, int, int], turned: str) -> None:
    m, k, n = shape
    left, right = [((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))]
    name = {"f4": "f32", "f8": "f64"}[dtype]
    a, b = ow.input("product_a", left, name), ow.input("product_b", right, name)
    x, y = numbers(left, dtype, 0), numbers(right, dtype, 1)
    program = scheduler.build((a.T if "a" in turned else a) @ (b.T if "b" in turned else b))
    for _ in range(3):
        got = program.run({a: x, b: y})
    assert_product(got, x.T if "a" in turned else x, y.T if "b" in turned else y)


@pytest.mark.parametrize("rows", [7, 20, 150])
def test_linear_layers(scheduler: ow.Scheduler, rows: int) -> None:
    x, w = numbers((3, rows, 64), "f4", 0), numbers((100, 64), "f4", 1)
    given = ow.input("linear_x", x.shape)
    program = scheduler.build(ow.linear(given, ow.weights({"w": w})["w"]))
    assert_product(program.run({given: x}).reshape(-1, 100), x.reshape(-1, 64), w.T)


@pytest.mark.parametrize("batch", [(2,), (7,), (2, 3)])
@pytest.mark.parametrize("repeated", [False, True])
def test_batches_of_products(scheduler: ow.Scheduler, batch: tuple[int, ...], repeated: bool) -> None:
    scheduler.build(ow.input("unused", (64, 64)) @ ow.input("unused_too", (64, 64)))  # one that is no batch
    x, y = numbers((*batch, 20, 48), "f4", 0), numbers((48, 40) if repeated else (*batch, 48, 40), "f4", 1)
    a, b = ow.input("batch_a", x.shape), ow.input("batch_b", y.shape)
    assert_product(scheduler.build(ow.matmul(a, b)).run({a: x, b: y}), x, y)


@pytest.mark.parametrize("kind", ["f2", "i4"])
def test_other_types(scheduler: ow.Scheduler, kind: str) -> None:
    scheduler.build(ow.input("unused", (64, 64)) @ ow.input("unused_too", (64, 64)))
    rng = np.random.default_rng(0)
    x, y = [rng.integers(-4, 5, shape).astype(kind) for shape in ((50, 40), (40, 60))]
    a, b = [ow.input(f"other_{n}", z.shape, {"f2": "f16", "i4": "i32"}[kind]) for n, z in (("a", x), ("b", y))]
    np.testing.assert_array_equal(scheduler.build(a @ b).run({a: x, b: y}), x.astype(int) @ y.astype(int))
