"""Minimum, maximum, clamp, step and where, against torch and NumPy."""

import math

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.dtypes import DTYPES
from opweave.graph.opdef import OPS
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(13)
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.5], np.float32)


def value(tensor):
    return evaluate(tensor, {})


# --- minimum and maximum --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minimum", "maximum"])
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "i64", "i32", "i16", "i8", "u8", "bool"])
def test_extremes_agree_with_torch(name, dtype):
    a, b = (RNG.integers(0, 2 if dtype == "bool" else 100, (2, 60)) - 0.0).astype(DTYPES[dtype].numpy)
    got = value(getattr(ow, name)(ow.constant(a), ow.constant(b)))
    assert got.dtype == a.dtype
    np.testing.assert_array_equal(got, getattr(torch, name)(torch.from_numpy(a), torch.from_numpy(b)).numpy())


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_nan_on_either_side_stays(name):
    a, b = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    got = value(getattr(ow, name)(ow.constant(a), ow.constant(b)))
    np.testing.assert_array_equal(got, getattr(torch, name)(torch.from_numpy(a), torch.from_numpy(b)).numpy())


def test_operands_are_promoted_and_broadcast():
    node = ow.minimum(ow.input("a", (3, 1), "i32"), ow.input("b", (4,), "f16"))
    assert (node.shape, node.dtype.name) == ((3, 4), "f16")
    with pytest.raises(ow.ShapeError, match=r"maximum: shapes \(3,\) and \(4,\) do not broadcast"):
        ow.maximum(ow.input("a", (3,)), ow.input("b", (4,)))


def test_a_number_and_a_float_tensor_become_clamp():
    x, i = ow.input("x", (3,)), ow.input("i", (3,), "i32")
    assert ow.minimum(x, 6) is ow.minimum(6.0, x) is ow.clamp(x, max=6)
    assert ow.maximum(x, 0) is ow.maximum(0, x) is ow.clamp(x, min=0)
    assert ow.minimum(i, 6).dtype.name == "i32"
    assert ow.minimum(i, 6.5).dtype.name == "f32"


# --- clamp ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [{"min": -0.5}, {"max": 0.25}, {"min": -0.5, "max": 0.25}, {"min": 1, "max": -1}])
def test_clamp_agrees_with_torch_and_numpy(bounds):
    x = np.concatenate([RNG.standard_normal(50).astype(np.float32), SPECIAL])
    got = value(ow.clamp(ow.constant(x), **bounds))
    np.testing.assert_array_equal(got, torch.clamp(torch.from_numpy(x), **bounds).numpy())
    np.testing.assert_array_equal(got, np.clip(x, bounds.get("min"), bounds.get("max")))


@pytest.mark.parametrize("dtype", ["i64", "i32", "i16", "i8", "u8"])
@pytest.mark.parametrize("bounds", [{"min": 3}, {"max": 40}, {"min": 3, "max": 40}])
def test_integers_stay_integers_between_integers(dtype, bounds):
    x = RNG.integers(0, 100, 50).astype(DTYPES[dtype].numpy)
    got = value(ow.clamp(ow.constant(x), **bounds))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, torch.clamp(torch.from_numpy(x), **bounds).numpy())


def test_integers_beyond_what_floats_hold_are_clamped_exactly():
    x = np.array([2**60, 2**60 + 1, 2**60 + 3], np.int64)
    got = value(ow.clamp(ow.constant(x), 2**60 + 1, 2**60 + 2))
    assert got.tolist() == [2**60 + 1, 2**60 + 1, 2**60 + 2]


def test_an_integer_with_a_float_bound_becomes_f32():
    got = value(ow.clamp(ow.constant(np.array([1, 5], np.int8)), max=2.5))
    assert (got.dtype, got.tolist()) == (np.float32, [1, 2.5])


def test_bounds_may_be_tensors():
    x, low, high = RNG.standard_normal((4, 5)), RNG.standard_normal(5), RNG.standard_normal((4, 1))
    got = value(ow.clamp(ow.constant(x), ow.constant(low), ow.constant(high)))
    np.testing.assert_array_equal(got, np.clip(x, low, high))
    np.testing.assert_array_equal(value(ow.clamp(ow.constant(x), -0.5, high)), np.clip(x, -0.5, high))


def test_without_bounds_it_is_the_tensor():
    x = ow.input("x", (3,))
    assert ow.clamp(x) is x


def test_what_is_no_bound_is_refused():
    x = ow.input("x", (3,))
    with pytest.raises(ow.DTypeError, match="clamp: NaN bounds nothing"):
        ow.maximum(ow.input("x", (3,)), float("nan"))
    with pytest.raises(ow.DTypeError, match="clamp: 300 does not fit into u8"):
        ow.clamp(ow.input("u", (3,), "u8"), max=300)
    with pytest.raises(ow.DTypeError, match="maximum: "):
        ow.clamp(x, min="low")
    with pytest.raises(ow.DTypeError, match="clamp: bool has no bounds; cast first"):
        ow.clamp(ow.input("flag", (3,), "bool"), 0, 1)


# --- step -----------------------------------------------------------------------------------------------------------


def test_step_is_one_above_zero_only():
    got = value(ow.step(ow.constant(SPECIAL)))
    assert (got.dtype, got.tolist()) == (np.float32, [0, 1, 0, 0, 0, 1, 0])
    finite = RNG.standard_normal(50).astype(np.float32)
    want = torch.heaviside(torch.from_numpy(finite), torch.tensor(0.0)).numpy()
    np.testing.assert_array_equal(value(ow.step(ow.constant(finite))), want)


def test_step_keeps_integers_and_makes_i32_of_bool():
    assert value(ow.step(ow.constant(np.array([-3, 0, 7], np.int8)))).tolist() == [0, 0, 1]
    assert ow.step(ow.input("i", (2,), "i8")).dtype.name == "i8"
    assert ow.step(ow.input("b", (2,), "bool")).dtype.name == "i32"


# --- where ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [((5,), (5,), (5,)), ((4, 1), (5,), (1, 5)), ((5,), (), (3, 5)), ((2, 3), (1,), ())])
def test_where_broadcasts_as_numpy_and_torch(shapes):
    c, a, b = RNG.random(shapes[0]) < 0.5, RNG.standard_normal(shapes[1]), RNG.standard_normal(shapes[2])
    node = ow.where(ow.constant(c), ow.constant(a), ow.constant(b))
    np.testing.assert_array_equal(value(node), np.where(c, a, b))
    np.testing.assert_array_equal(value(node), torch.where(*(torch.from_numpy(np.asarray(x)) for x in (c, a, b))))
    assert [s.shape for s in node.srcs] == [node.shape] * 3
    assert [s.dtype.name for s in node.srcs] == ["bool", "f64", "f64"]


def test_nan_that_is_not_chosen_does_not_show():
    got = value(ow.where(ow.constant(np.array([True, False])), ow.constant(np.array([1, np.nan])), 2.0))
    assert got.tolist() == [1, 2]


def test_a_condition_of_another_type_is_whether_it_is_not_zero():
    got = value(ow.where(ow.constant(np.array([0.0, 0.5, -1, np.nan])), 1, 0))
    assert got.tolist() == [0, 1, 1, 1]


def test_numbers_take_the_dtype_of_the_other_side():
    c, x = ow.input("c", (3,), "bool"), ow.input("x", (3,), "bf16")
    assert ow.where(c, x, -math.inf).dtype.name == "bf16"
    assert ow.where(c, -math.inf, x).dtype.name == "bf16"
    assert ow.where(c, x, ow.input("i", (3,), "i32")).dtype.name == "bf16"


def test_shapes_that_do_not_broadcast_name_the_operands():
    with pytest.raises(ow.ShapeError, match=r"where: .*\(2,\) and \(3,\) do not broadcast.*'c' bool\[2\]"):
        ow.where(ow.input("c", (2,), "bool"), ow.input("a", (3,)), 0.0)
    with pytest.raises(ow.DTypeError, match="where does not take q4_0"):
        ow.where(ow.input("c", (32,), "bool"), ow.input("w", (32,), "q4_0"), 0.0)


def test_definitions_say_what_may_be_overwritten():
    assert OPS["where"].inplace == (1, 2)
    assert OPS["minimum"].inplace == OPS["maximum"].inplace == (0, 1)
    assert all(OPS[name].pointwise for name in ("minimum", "maximum", "clamp", "step", "where"))
