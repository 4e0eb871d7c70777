"""Many small products that a compiled function computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave_cpu.device import CpuDevice

pytest.importorskip("llvmlite")

from opweave_cpu.jit import batched_products
from tests.support.noting import noted_results

pytestmark = pytest.mark.usefixtures("compiling")

Array = np.ndarray[Any, Any]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whether each product was compiled, in order."""
    return noted_results(monkeypatch, batched_products, "fits")


def _check(product: ow.Tensor, given: dict[Any, Array], left: Array, right: Array) -> None:
    got = ow.Scheduler(CpuDevice()).build(product).run(given)
    a, b = left.astype(np.float64), right.astype(np.float64)
    unit = {np.dtype("f4"): 6e-8, np.dtype("f8"): 2e-16, as_dtype("bf16").numpy: 4e-3}[got.dtype]
    # A sum of k products, added up one by one, has k + 1 roundings at most; far fewer are seen.
    limit = unit * max(4.0, np.sqrt(a.shape[-1])) * (np.abs(a) @ np.abs(b))
    assert got.shape == (a @ b).shape
    assert (np.abs(got.astype(np.float64) - a @ b) <= limit).all()


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((12, 128, 64), (12, 64, 128)),
        ((3, 4, 7, 50), (3, 4, 50, 33)),  # fewer rows than are computed at once, and a column left over
        ((5, 70, 100), (5, 100, 80)),
        ((4, 1, 20), (4, 20, 16)),
        ((2, 19, 1), (2, 1, 65)),
        ((6, 40), (3, 40, 48)),
        ((3, 1, 9, 20), (1, 5, 20, 49)),
    ],
)
def test_products(dtype: str, left: tuple[int, ...], right: tuple[int, ...], compiled: list[Any]) -> None:
    rng = np.random.default_rng(0)
    a, b = [rng.standard_normal(n).astype(as_dtype(dtype).numpy) for n in (left, right)]
    x, y = ow.input("left", left, dtype), ow.input("right", right, dtype)
    _check(x @ y, {x: a, y: b}, a, b)
    assert dtype == "bf16" or compiled == [True]


@pytest.mark.parametrize("tile", [(3, 1), (6, 1), (12, 2), (8, 3)])
def test_tiles_of_other_processors(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    monkeypatch.setattr(batched_products, "_tile", lambda columns, dtype: tile)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 25, 40), np.float32), rng.standard_normal((3, 40, 70), np.float32)
    x, y = ow.input("left", a.shape), ow.input("right", b.shape)
    _check(x @ y, {x: a, y: b}, a, b)
    assert compiled == [True]


def test_products_of_operands_with_gaps(compiled: list[Any]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((9, 4, 50), np.float32), rng.standard_normal((4, 40, 70), np.float32)
    x, y = ow.input("left", a.shape), ow.input("right", b.shape)
    product = ow.transpose(x, (1, 0, 2))[:, :, 5:45] @ y[:, :, 3:60]
    _check(product, {x: a, y: b}, a.transpose(1, 0, 2)[:, :, 5:45], b[:, :, 3:60])
    assert compiled == [True]


def test_a_left_matrix_that_lies_by_columns(compiled: list[Any]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 30, 20), np.float32), rng.standard_normal((3, 30, 64), np.float32)
    x, y = ow.input("left", a.shape), ow.input("right", b.shape)
    _check(ow.transpose(x, (0, 2, 1)) @ y, {x: a, y: b}, a.swapaxes(1, 2), b)
    assert compiled == [True]


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    a, b = np.ones((2, 8, 20), np.float32), np.ones((2, 20, 40), np.float32)
    a[1, 7, 3], b[0, 2, 39] = np.inf, np.nan
    x, y = ow.input("left", a.shape), ow.input("right", b.shape)
    got = ow.Scheduler(CpuDevice()).build(x @ y).run({x: a, y: b})
    with np.errstate(invalid="ignore"):  # some kernels of BLAS compute infinity times zero beside a matrix
        want = a @ b
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((64, 64), (64, 64)),  # a single one
        ((2, 3, 13, 40), (40, 48)),  # likewise, of more rows
        ((2, 512, 512), (2, 512, 512)),  # large ones
        ((2, 64, 64), (2, 64, 8)),  # with few columns
        ((2, 64, 2000), (2, 2000, 16)),  # with long sums
    ],
)
def test_others_are_computed_by_blas(left: tuple[int, ...], right: tuple[int, ...], compiled: list[Any]) -> None:
    rng = np.random.default_rng(0)
    a, b = [rng.standard_normal(n, np.float32) for n in (left, right)]
    x, y = ow.input("left", left), ow.input("right", right)
    _check(x @ y, {x: a, y: b}, a, b)
    assert not any(compiled)


def test_a_right_matrix_that_lies_by_columns_is_multiplied_by_blas(compiled: list[Any]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 30, 20), np.float32), rng.standard_normal((3, 64, 20), np.float32)
    x, y = ow.input("left", a.shape), ow.input("right", b.shape)
    _check(x @ ow.transpose(y, (0, 2, 1)), {x: a, y: b}, a, b.swapaxes(1, 2))
    assert not any(compiled)
