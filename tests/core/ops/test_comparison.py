"""Comparisons against NumPy, and what == and != mean."""

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import DTYPES
from opweave.graph.dtypes import PLAIN as COMPUTED
from tests.support.evaluate import evaluate

NAMES = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
PLAIN = COMPUTED.split()
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.5], np.float32)


def value(tensor):
    return evaluate(tensor, {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", PLAIN)
def test_comparisons_are_numpys(name, dtype):
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 3, (2, 4, 30)).astype(DTYPES[dtype].numpy)
    got = value(getattr(ow, name)(ow.constant(a), ow.constant(b)))
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, getattr(np, name)(a, b))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_nan_infinities_and_zeros_compare_as_in_numpy(name, dtype):
    a, b = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    x, y = (ow.constant(v.astype(DTYPES[dtype].numpy)) for v in (a, b))
    result = getattr(ow, name)(x, y)
    np.testing.assert_array_equal(value(result), getattr(np, name)(a, b))
    np.testing.assert_array_equal(ow.compile(result, devices=["cpu"])(), getattr(np, name)(a, b))


@pytest.mark.parametrize("name", NAMES)
def test_operands_are_promoted_and_broadcast(name):
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 4, (3, 1)).astype(np.int32), rng.integers(0, 4, 5).astype(np.float16)
    np.testing.assert_array_equal(value(getattr(ow, name)(ow.constant(a), b)), getattr(np, name)(a, b))
    np.testing.assert_array_equal(value(getattr(ow, name)(ow.constant(a), 1.5)), getattr(np, name)(a, 1.5))
    with pytest.raises(ow.ShapeError, match=rf"{name}: shapes \(3,\) and \(4,\) do not broadcast"):
        getattr(ow, name)(ow.input("a", (3,)), ow.input("b", (4,)))
    with pytest.raises(ow.DTypeError, match=f"{name}: 300 does not fit into u8"):
        getattr(ow, name)(ow.input("u", (3,), "u8"), 300)
    with pytest.raises(ow.DTypeError, match="q8_0"):
        getattr(ow, name)(ow.weights({"w": ow.Spec((2, 32), DTYPES["q8_0"])})["w"], 1.0)


def test_operators_are_the_functions():
    x, y = ow.input("x", (3,)), ow.input("y", (3,))
    assert (x < y) is ow.less(x, y)
    assert (x <= y) is ow.less_equal(x, y)
    assert (x > y) is ow.greater(x, y) is ow.less(y, x)
    assert (x >= y) is ow.greater_equal(x, y) is ow.less_equal(y, x)
    assert (x > 2.0) is ow.greater(x, 2.0)
    array: Any = np.ones(3, np.float32)  # Any: NumPy's annotations do not have the operators that defer to tensors
    assert (array < x).op is (x > array).op is ow.less(x, y).op
    with pytest.raises(ow.DTypeError, match="no truth value"):
        assert 0 < x < 1


@pytest.mark.parametrize("other", [0, 0.5, True, 1j, np.float32(1), np.ones(3), np.ones((), np.int8)], ids=repr)
def test_equality_with_values_raises_on_either_side(other):
    x = ow.input("x", (3,))
    for compare in (lambda: x == other, lambda: x != other, lambda: other == x, lambda: other != x):
        with pytest.raises(ow.DTypeError, match=r"use ow\.equal and ow\.not_equal"):
            compare()


def test_equality_of_tensors_and_of_what_is_no_value_is_identity():
    x, y = ow.input("x", (3,)), ow.input("y", (3,))
    assert x == x
    assert x != y
    assert x != None  # noqa: E711
    assert x != "x"
    assert y in [x, None, y]
    assert y not in (x, None, "y")
    assert {x: 1, y: 2}[y] == 2
    assert len({x, y, ow.input("x", (3,))}) == 2
    assert [x, y].index(y) == 1


@pytest.mark.parametrize("device", ["host", "cpu", "torch:cpu", "opencl"])
def test_a_comparison_runs_and_chooses_on_every_device(device):
    x = np.array([-2.0, np.nan, 0.5, 3.0], np.float32)
    values = ow.input("values", (4,))
    run = ow.compile(ow.where(values > 0.5, values, ow.where(ow.equal(values, 0.5), 7.0, -1.0)), devices=[device])
    np.testing.assert_array_equal(run(x), [-1, -1, 7, 3])
