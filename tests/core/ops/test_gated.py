"""Gated linear units against the same of torch's functions."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import opweave as ow
from opweave.graph.opdef import OPS
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(14)


def swiglu_oai(x, gate, alpha=1.702, limit=7.0):
    gate = torch.clamp(gate, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (torch.clamp(x, -limit, limit) + 1)


UNITS = {
    "reglu": (ow.reglu, lambda x, gate: x * torch.relu(gate)),
    "geglu": (ow.geglu, lambda x, gate: x * functional.gelu(gate)),
    "geglu_tanh": (
        lambda x, gate=None: ow.geglu(x, gate, approximate="tanh"),
        lambda x, gate: x * functional.gelu(gate, approximate="tanh"),
    ),
    "geglu_quick": (
        lambda x, gate=None: ow.geglu(x, gate, approximate="quick"),
        lambda x, gate: x * gate * torch.sigmoid(1.702 * gate),
    ),
    "swiglu": (ow.swiglu, lambda x, gate: x * functional.silu(gate)),
    "swiglu_oai": (ow.swiglu_oai, swiglu_oai),
}
NAMES = sorted({name.split("_tanh")[0].split("_quick")[0] for name in UNITS})


def value(tensor):
    return evaluate(tensor, {})


@pytest.mark.parametrize("name", UNITS)
def test_units_of_two_operands_agree_with_torch(name):
    ours, torchs = UNITS[name]
    x, gate = RNG.standard_normal((2, 6, 40)) * 4
    got = value(ours(ow.constant(x), ow.constant(gate)))
    np.testing.assert_allclose(got, torchs(torch.from_numpy(x), torch.from_numpy(gate)).numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", UNITS)
def test_one_operand_holds_the_gate_in_its_first_half(name):
    both = ow.input("both", (3, 5, 8))
    ours = UNITS[name][0]
    node = ours(both)
    assert node is ours(both[..., 4:], both[..., :4])
    assert node.shape == (3, 5, 4)
    assert [s.is_view and s.root is both for s in node.srcs] == [True, True]


@pytest.mark.parametrize("attrs", [{"alpha": 1.0}, {"limit": 0.5}, {"alpha": -2.0, "limit": 1.5}])
def test_the_clamped_unit_takes_any_slope_and_limit(attrs):
    x, gate = RNG.standard_normal((2, 100)) * 4
    got = value(ow.swiglu_oai(ow.constant(x), ow.constant(gate), **attrs))
    want = swiglu_oai(torch.from_numpy(x), torch.from_numpy(gate), **attrs).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_columns_that_alternate_are_two_views():
    h = RNG.standard_normal((3, 10)) * 4
    both = ow.constant(h)
    node = ow.swiglu_oai(both[..., 1::2], both[..., ::2])
    want = swiglu_oai(torch.from_numpy(h[:, 1::2].copy()), torch.from_numpy(h[:, ::2].copy()))
    np.testing.assert_allclose(value(node), want.numpy(), rtol=1e-12)


def test_nan_and_infinities_agree_with_torch():
    special = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, -2.0])
    x, gate = (v.ravel() for v in np.meshgrid(special, special))
    for name in ("reglu", "swiglu", "swiglu_oai"):
        ours, torchs = UNITS[name]
        got = value(ours(ow.constant(x), ow.constant(gate)))
        np.testing.assert_allclose(got, torchs(torch.from_numpy(x), torch.from_numpy(gate)).numpy(), rtol=1e-12)


def test_operands_are_promoted_and_broadcast_and_integers_become_f32():
    node = ow.swiglu(ow.input("x", (3, 1), "f16"), ow.input("gate", (4,), "i32"))
    assert (node.shape, node.dtype.name) == ((3, 4), "f16")
    assert ow.reglu(ow.input("i", (6,), "i32")).dtype.name == "f32"
    assert ow.reglu(ow.input("x", (3,), "f16"), 2).dtype.name == "f16"


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_halves_is_refused(name):
    with pytest.raises(ow.ShapeError, match=rf"{name}: .* first half of its last axis, .*'x' f32\[4, 5\]"):
        getattr(ow, name)(ow.input("x", (4, 5)))
    with pytest.raises(ow.ShapeError, match=f"{name}: "):
        getattr(ow, name)(ow.input("scalar", ()))


@pytest.mark.parametrize("name", NAMES)
def test_operands_that_do_not_fit_are_refused(name):
    unit = getattr(ow, name)
    with pytest.raises(ow.ShapeError, match=rf"{name}: shapes \(3,\) and \(4,\) do not broadcast"):
        unit(ow.input("x", (3,)), ow.input("gate", (4,)))
    for operands in ((ow.input("w", (2, 64), "q4_0"),), (ow.input("x", (64,)), ow.input("w", (64,), "q4_0"))):
        with pytest.raises(ow.DTypeError, match=f"{name} does not take q4_0"):
            unit(*operands)


def test_an_unknown_form_of_gelu_is_named():
    with pytest.raises(ow.UnknownNameError, match="no approximation of gelu named 'tan'; did you mean 'tanh'"):
        ow.geglu(ow.input("x", (4,)), approximate="tan")  # type: ignore[arg-type]


def test_the_limit_of_clamped_units_is_not_negative():
    for limit in (-1.0, float("nan")):
        with pytest.raises(ow.DTypeError, match="limit is a number that is not negative"):
            ow.swiglu_oai(ow.input("x", (4,)), limit=limit)


def test_definitions_say_what_may_be_overwritten_and_their_family():
    for name in NAMES:
        assert (OPS[name].family, OPS[name].inplace, OPS[name].pointwise) == ("gated", (0, 1), True)
    x, gate = ow.input("x", (3, 5)), ow.input("gate", (3, 5))
    assert OPS["reglu"].flops(ow.reglu(x, gate)) == 30
