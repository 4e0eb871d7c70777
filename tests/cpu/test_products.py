"""Products with few rows, which are computed the other way round: at both ends of where that begins, in every form."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from opweave.graph.dtypes import as_dtype
from opweave_cpu.hardware import has_openblas
from opweave_cpu.kernels.matmul import is_turned
from opweave_cpu.tunables import TURNED_ROWS

Array = np.ndarray[Any, Any]
Apply = Callable[..., Array]
ROWS = [1, 2, 3, 4, 7, TURNED_ROWS.value, TURNED_ROWS.value + 1]
ERROR = {np.float32: 1e-6, np.float64: 1e-14, np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3}
"""Of one rounding in each type, relative to the largest element."""


def random(*shape: int, seed: int, dtype: Any) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_close(got: Array, want: Array) -> None:
    limit = ERROR[got.dtype.type] * np.abs(want).max()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=limit)


def test_rows_on_both_sides_of_the_border_are_tried() -> None:
    # Transposed products are known to be faster with OpenBLAS only; other libraries get them as they are.
    assert {is_turned(rows, 768, 1040, as_dtype("f32")) for rows in ROWS} == {False, has_openblas()}
    assert not any(is_turned(rows, 768, 1040, as_dtype("f64")) for rows in ROWS)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ERROR)
def test_linear(apply: Apply, dtype: Any, rows: int, biased: bool) -> None:
    x, w = random(rows, 768, seed=1, dtype=dtype), random(1040, 768, seed=2, dtype=dtype)
    bias = [random(1040, seed=3, dtype=dtype)] if biased else []
    got = apply("linear", np.zeros((rows, 1040), dtype), x, w, *bias)
    want = x.astype(np.float64) @ w.astype(np.float64).T
    assert_close(got, want + bias[0].astype(np.float64) if biased else want)


@pytest.mark.parametrize("dtype", ERROR)
def test_linear_over_more_axes(apply: Apply, dtype: Any) -> None:
    x, w, b = (random(*s, seed=i, dtype=dtype) for i, s in enumerate([(2, 3, 4, 256), (700, 256), (700,)]))
    got = apply("linear", np.zeros((2, 3, 4, 700), dtype), x, w, b)
    assert_close(got, x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ERROR)
def test_matmul_by_a_transposed_matrix(apply: Apply, dtype: Any, rows: int) -> None:
    x, w = random(rows, 768, seed=1, dtype=dtype), random(1040, 768, seed=2, dtype=dtype)
    got = apply("matmul", np.zeros((rows, 1040), dtype), x, w.T)
    assert_close(got, x.astype(np.float64) @ w.astype(np.float64).T)


@pytest.mark.parametrize("dtype", ERROR)
def test_experts_with_one_row_some_rows_and_many(apply: Apply, dtype: Any) -> None:
    counts = [1, 0, 5, 30, 60]
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(5), counts)).reshape(-1, 1)
    x, w = random(96, 1, 256, seed=1, dtype=dtype), random(5, 300, 256, seed=2, dtype=dtype)
    got = apply("expert_linear", np.zeros((96, 1, 300), dtype), x, w, ids)
    want = np.einsum("tui,tuoi->tuo", x.astype(np.float64), w.astype(np.float64)[ids])
    assert_close(got, want)
