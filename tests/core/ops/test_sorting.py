"""Orders and running sums against torch and NumPy."""

import ml_dtypes
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.graph import Graph
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(17)


def value(tensor):
    return evaluate(tensor, {})


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_cumsum_is_numpys(axis):
    x = RNG.standard_normal((3, 4, 5))
    np.testing.assert_allclose(value(ow.cumsum(ow.constant(x), axis)), np.cumsum(x, axis), rtol=1e-13)
    want = torch.cumsum(torch.from_numpy(x), axis)
    np.testing.assert_allclose(value(ow.cumsum(ow.constant(x), axis)), want.numpy(), rtol=1e-13)


def test_cumsum_of_integers_is_exact_i64_and_of_halves_rounded_once():
    got = ow.cumsum(ow.constant(np.full(5, 100, np.int8)))
    assert got.dtype.name == "i64"
    assert value(got).tolist() == [100, 200, 300, 400, 500]
    x = np.ones(5000, np.float16)
    np.testing.assert_array_equal(value(ow.cumsum(ow.constant(x))), np.arange(1, 5001).astype(np.float16))
    assert ow.cumsum(ow.constant(x)).dtype.name == "f16"


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int8, np.uint8])
def test_argsort_is_torchs(dtype, descending, axis):
    x = RNG.integers(0, 5, (7, 9)).astype(dtype)
    got = ow.argsort(ow.constant(x), axis, descending, stable=True)
    want = torch.argsort(torch.from_numpy(x), dim=axis, descending=descending, stable=True)
    assert got.dtype.name == "i64"
    np.testing.assert_array_equal(value(got), want.numpy())


@pytest.mark.parametrize("descending", [False, True])
def test_nan_is_the_largest_and_zeros_are_equal(descending):
    x = np.array([0.0, np.nan, -np.inf, -0.0, np.inf, -np.nan, 0.0, 1.0], np.float32)
    got = value(ow.argsort(ow.constant(x), descending=descending, stable=True))
    want = torch.argsort(torch.from_numpy(x), descending=descending, stable=True).numpy()
    np.testing.assert_array_equal(got, want)


def test_argsort_of_half_types():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert value(ow.argsort(ow.constant(np.array([2, -1, 0.5]).astype(dtype)))).tolist() == [1, 2, 0]


@pytest.mark.parametrize(("axis", "k"), [(-1, 1), (-1, 5), (0, 4), (1, 3), (-1, 9), (0, 0)])
def test_top_k_is_torchs(axis, k):
    x = RNG.permutation(7 * 9).reshape(7, 9).astype(np.float32)
    values, indices = ow.top_k(ow.constant(x), k, axis)
    want = torch.topk(torch.from_numpy(x), k, dim=axis)
    assert indices.dtype.name == "i64"
    assert values.dtype.name == "f32"
    np.testing.assert_array_equal(value(values), want.values.numpy())
    np.testing.assert_array_equal(value(indices), want.indices.numpy())


def test_top_k_takes_the_lower_index_among_equals():
    _, indices = ow.top_k(ow.constant(np.array([1, 3, 3, 0, 3], np.int32)), 4)
    assert value(indices).tolist() == [1, 2, 4, 0]


def test_top_k_is_two_nodes_and_its_values_may_be_left_out():
    values, indices = ow.top_k(ow.input("x", (2, 8)), 3)
    assert [t.name for t in Graph((values, indices)).nodes] == ["top_k", "take_along_axis"]
    assert [t.name for t in Graph(indices).nodes] == ["top_k"]
    assert ow.top_k(ow.input("x", (2, 8)), np.int64(3))[1] is indices  # type: ignore[arg-type]


def test_what_is_refused():
    x = ow.input("x", (2, 8))
    with pytest.raises(ow.BoundsError, match=r"top_k: k = 9 is outside of 0 \.\. 8, axis 1 of the operand input 'x'"):
        ow.top_k(x, 9)
    with pytest.raises(ow.ShapeError, match=r"k is an integer, not 2\.0"):
        ow.top_k(x, 2.0)  # type: ignore[arg-type]
    for function in (ow.cumsum, ow.argsort, lambda x, axis: ow.top_k(x, 1, axis)):
        with pytest.raises(ow.BoundsError, match="axis 2 is out of range for 2 axes"):
            function(x, 2)
        with pytest.raises(ow.DTypeError, match="does not take q4_0"):
            function(ow.input("q", (2, 32), "q4_0"), 1)
    with pytest.raises(ow.BoundsError):
        ow.argsort(ow.input("n", ()))


def test_nodes_are_normalised():
    x = ow.input("x", (2, 8))
    assert ow.argsort(x).attrs == {"axis": 1, "descending": False, "stable": True}
    assert ow.cumsum(x) is ow.cumsum(x, 1)
    assert ow.top_k(x, 2)[1].attrs == {"k": 2, "axis": 1}
