"""Sums, products, means, variances, extrema and where they are, against NumPy and torch."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.dtypes import as_dtype
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(5)


def value(tensor):
    return evaluate(tensor, {})


AXES = [None, 0, 1, -1, (0, 2), (1, -1), (0, 1, 2), ()]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod"])
def test_reductions_are_numpys(name, axis, keepdims):
    x = RNG.standard_normal((2, 3, 5))
    got = value(getattr(ow, name)(ow.constant(x), axis, keepdims))
    want = getattr(np, name)(x, axis=axis, keepdims=keepdims)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_argmax_is_numpys(axis, keepdims):
    x = RNG.integers(0, 4, (6, 3, 5)).astype(np.float32)
    x[2, 1, 1] = x[5, 0, 0] = np.nan
    got = ow.argmax(ow.constant(x), axis, keepdims)
    assert got.dtype.name == "i64"
    np.testing.assert_array_equal(value(got), np.argmax(x, axis=axis, keepdims=keepdims))


def test_argmax_takes_the_lowest_index_among_equals_in_every_type():
    for dtype in (np.float16, ml_dtypes.bfloat16, np.int8, np.bool_):
        x = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0]]).astype(dtype)
        assert value(ow.argmax(ow.constant(x), 1)).tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "u8", "bool"])
def test_sums_of_integers_are_exact_i64(dtype):
    x = np.full(1000, 1 if dtype == "bool" else 100, as_dtype(dtype).numpy)
    got = ow.sum(ow.constant(x))
    assert got.dtype.name == "i64"
    assert value(got) == x.astype(np.int64).sum()
    assert ow.sum(ow.constant(x), ()).dtype.name == "i64"


def test_means_of_integers_are_f32():
    got = ow.mean(ow.constant(np.array([1, 2, 4], np.int32)))
    assert got.dtype.name == "f32"
    assert value(got) == np.float32(7 / 3)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sums_of_half_types_do_not_stop_growing(dtype):
    x = np.ones(5000, as_dtype(dtype).numpy)
    got = ow.sum(ow.constant(x))
    assert got.dtype.name == dtype
    assert value(got) == np.float32(5000).astype(as_dtype(dtype).numpy)


def test_max_keeps_the_type_and_gives_nan_where_there_is_one():
    assert value(ow.max(ow.constant(np.array([3, -7], np.int8)))) == 3
    assert ow.max(ow.constant(np.array([3, -7], np.int8))).dtype.name == "i8"
    x = np.array([[1, np.nan], [2, 3]], np.float32)
    np.testing.assert_array_equal(value(ow.max(ow.constant(x), 1)), torch.amax(torch.from_numpy(x), 1).numpy())


def test_large_i64_values_are_not_rounded():
    x = np.array([2**53 + 1, 2**53], np.int64)
    assert value(ow.max(ow.constant(x))) == 2**53 + 1
    assert value(ow.argmax(ow.constant(x))) == 0
    assert value(ow.sum(ow.constant(x))) == 2**54 + 1


def test_over_no_elements():
    x = ow.constant(np.zeros((0, 3), np.float32))
    assert value(ow.sum(x, 0)).tolist() == [0, 0, 0]
    assert np.isnan(value(ow.mean(x, 0))).all()
    assert value(ow.max(x, 1)).shape == (0,)
    with pytest.raises(ow.ShapeError, match=r"max: of no elements there is none; .* f32\[0, 3\]"):
        ow.max(x, 0)
    with pytest.raises(ow.ShapeError, match=r"min: of no elements there is none; .* f32\[0, 3\]"):
        ow.min(x, 0)
    assert value(ow.prod(x, 0)).tolist() == [1, 1, 1]
    assert value(ow.count_equal(x, x)) == 0
    with pytest.raises(ow.ShapeError, match="argmax: of no elements"):
        ow.argmax(x, 0)
    with pytest.raises(ow.ShapeError, match="argmax: of no elements"):
        ow.argmax(x)


def test_nodes_are_normalised():
    x = ow.input("x", (2, 3, 5))
    assert ow.sum(x).attrs == {"axes": (0, 1, 2)}
    assert ow.sum(x, (-1, 0)) is ow.sum(x, [0, 2])
    assert ow.sum(x, 1, keepdims=True).root is ow.sum(x, 1)
    assert ow.argmax(x, -1).attrs == {"axis": 2}
    assert ow.argmax(x).attrs == {"axis": 0}
    assert x.sum(1) is ow.sum(x, 1)
    assert x.max() is ow.max(x)
    assert x.mean(0, True) is ow.mean(x, 0, keepdims=True)
    assert x.argmax(0) is ow.argmax(x, 0)
    assert ow.max(x, ()) is x
    assert ow.sum(ow.input("n", ())) is ow.input("n", ())


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod"])
def test_axes_that_do_not_exist(name):
    x = ow.input("x", (2, 3))
    with pytest.raises(ow.BoundsError, match=f"{name}: axis 2 is out of range for 2 axes; the operand is input 'x'"):
        getattr(ow, name)(x, 2)
    with pytest.raises(ow.ShapeError, match="name an axis twice"):
        getattr(ow, name)(x, (0, -2))
    with pytest.raises(ow.ShapeError, match="axis is an integer"):
        getattr(ow, name)(x, "rows")
    with pytest.raises(ow.BoundsError, match="argmax: axis -3"):
        ow.argmax(x, -3)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("correction", [0, 1, 0.5, 3])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)], ids=str)
def test_var_is_torchs(axis, correction, keepdims):
    x = RNG.standard_normal((2, 3, 5))
    got = value(ow.var(ow.constant(x), axis, correction, keepdims))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where the degrees of freedom are not positive
        want = torch.var(torch.from_numpy(x), axis, correction=correction, keepdim=keepdims).numpy()
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_var_takes_bessels_correction_by_default_and_numpys_is_none():
    x = RNG.standard_normal((4, 5))
    np.testing.assert_allclose(value(ow.var(ow.constant(x), 1)), np.var(x, 1, ddof=1), rtol=1e-13)
    np.testing.assert_allclose(value(ow.var(ow.constant(x), 1, 0)), np.var(x, 1), rtol=1e-13)


def test_var_of_one_element_and_of_nothing():
    x = ow.constant(np.array([[1.0], [5.0]]))
    assert np.isnan(value(ow.var(x, 1))).all()
    assert value(ow.var(x, 1, 0)).tolist() == [0, 0]
    assert np.isinf(value(ow.var(x, 0, 2)))
    assert value(ow.var(ow.constant(np.ones(3)), (), 0)).tolist() == [0, 0, 0]
    assert ow.var(ow.input("i", (3,), "i32")).dtype.name == "f32"
    with pytest.raises(ow.DTypeError, match="correction is a number"):
        ow.var(x, correction="bessel")  # type: ignore[arg-type]


def test_var_does_not_cancel():
    x = 1e8 + np.array([1.0, 2.0, 3.0])
    assert value(ow.var(ow.constant(x))) == 1


def test_products_of_integers_are_exact_i64():
    got = ow.prod(ow.constant(np.array([100, 100, 100], np.int8)))
    assert got.dtype.name == "i64"
    assert value(got) == 10**6
    assert value(ow.prod(ow.constant(np.array([True, False])))) == 0


def test_min_gives_nan_where_there_is_one():
    x = np.array([[1, np.nan], [2, 3]], np.float32)
    np.testing.assert_array_equal(value(ow.min(ow.constant(x), 1)), torch.amin(torch.from_numpy(x), 1).numpy())


def test_count_equal_counts_places():
    a, b = RNG.integers(0, 3, (4, 5)), RNG.integers(0, 3, (4, 5))
    got = ow.count_equal(ow.constant(a), ow.constant(b))
    assert (got.shape, got.dtype.name) == ((), "i64")
    assert value(got) == (a == b).sum()
    assert value(ow.count_equal(ow.constant(a), ow.constant(b[0]))) == (a == b[0]).sum()
    assert value(ow.count_equal(ow.constant(a), ow.constant(b.astype(np.float32)))) == (a == b).sum()
    x = ow.constant([np.nan, np.inf, 0.0])
    assert value(ow.count_equal(x, ow.constant([np.nan, np.inf, -0.0]))) == 2
    with pytest.raises(ow.ShapeError, match="count_equal"):
        ow.count_equal(ow.input("a", (3,)), ow.input("b", (4,)))
