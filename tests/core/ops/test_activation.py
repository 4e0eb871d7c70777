"""Activation functions against torch."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import opweave as ow
from opweave.graph.opdef import OPS
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(12)
ACTIVATIONS = {
    "relu": torch.relu,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": functional.hardsigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30], np.float32)


def value(tensor):
    return evaluate(tensor, {})


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_agree_with_torch_in_float64(name):
    x = RNG.standard_normal(300) * 3
    got = value(getattr(ow, name)(ow.constant(x)))
    np.testing.assert_allclose(got, ACTIVATIONS[name](torch.from_numpy(x)).numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"gelu", "gelu_tanh"}))
def test_activations_of_nan_infinities_and_zeros_agree_with_torch(name):
    got = value(getattr(ow, name)(ow.constant(SPECIAL)))
    np.testing.assert_allclose(got, ACTIVATIONS[name](torch.from_numpy(SPECIAL)).numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_of_nan_infinities_and_zeros_is_its_formula(name):
    got = value(getattr(ow, name)(ow.constant(SPECIAL)))
    np.testing.assert_array_equal(got, [np.nan, np.inf, np.nan, 0, 0, np.float32(1e30), 0])


def test_gelus_keep_their_digits_far_below_zero():
    x = ow.constant(np.array([-10.0]))
    assert value(ow.gelu(x))[0] == pytest.approx(-5.0 * math.erfc(10 / math.sqrt(2)), rel=1e-14)
    u = math.sqrt(2 / math.pi) * (-10 - 44.715)
    assert value(ow.gelu_tanh(x))[0] == pytest.approx(-10 * math.exp(2 * u), rel=1e-13)


def test_softplus_neither_overflows_nor_loses_its_tail():
    x = np.array([-700.0, -40.0, 40.0, 800.0])
    assert value(ow.softplus(ow.constant(x))) == pytest.approx([math.exp(-700), math.exp(-40), 40, 800], rel=1e-14)


@pytest.mark.parametrize("slope", [0.2, 1.0, 3.0, -0.5])
def test_leaky_relu_takes_any_slope(slope):
    x = RNG.standard_normal(50)
    got = value(ow.leaky_relu(ow.constant(x), slope))
    np.testing.assert_allclose(got, functional.leaky_relu(torch.from_numpy(x), slope).numpy(), rtol=1e-15)


def test_leaky_relu_without_a_slope_is_relu():
    x = ow.input("x", (3,))
    assert ow.leaky_relu(x, 0) is ow.relu(x)


@pytest.mark.parametrize("alpha", [0.5, 2.0, -1.0])
def test_elu_takes_any_alpha(alpha):
    x = RNG.standard_normal(50)
    got = value(ow.elu(ow.constant(x), alpha))
    np.testing.assert_allclose(got, functional.elu(torch.from_numpy(x), alpha).numpy(), rtol=1e-14)


def test_activations_of_integers_become_f32_but_for_relu():
    x = ow.constant(np.array([-1, 0, 4]))
    for name in set(ACTIVATIONS) - {"relu"}:
        assert getattr(ow, name)(x).dtype.name == "f32", name
    assert value(ow.relu(x)).tolist() == [0, 0, 4]
    assert ow.relu(x).dtype.name == "i64"
    assert ow.relu(ow.input("b", (2,), "bool")).dtype.name == "i32"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantized_tensors_are_refused_with_a_hint(name):
    with pytest.raises(ow.DTypeError, match=rf"{name} does not take q4_0: .*linear\(x, w\).*'w' q4_0\[4, 32\]"):
        getattr(ow, name)(ow.input("w", (4, 32), "q4_0"))


def test_parameters_are_numbers():
    x = ow.input("x", (3,))
    with pytest.raises(ow.DTypeError, match="leaky_relu: negative_slope is a number, not None"):
        ow.leaky_relu(x, None)  # type: ignore[arg-type]
    with pytest.raises(ow.DTypeError, match="elu: alpha is a number, not 'one'"):
        ow.elu(x, "one")  # type: ignore[arg-type]


def test_definitions_say_what_may_be_overwritten_and_their_family():
    for name in ACTIVATIONS:
        op = OPS[name]
        assert (op.family, op.inplace, op.pointwise) == ("activation", (0,), True)
        assert op.flops(ow.input("x", (3, 5))) % 15 == 0
