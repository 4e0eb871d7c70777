"""Arithmetic, elementary functions and conversions, against NumPy and torch."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.dtypes import DTYPES
from opweave.graph.dtypes import PLAIN as COMPUTED
from opweave.graph.opdef import OPS
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(11)
PLAIN = [DTYPES[name] for name in COMPUTED.split()]
TORCH = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
BINARY: dict[str, tuple[Callable[[Any, Any], ow.Tensor], np.ufunc]] = {
    "add": (ow.add, np.add), "sub": (ow.sub, np.subtract), "mul": (ow.mul, np.multiply),
}  # fmt: skip
UNARY = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    **{
        name: getattr(torch, name)
        for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf")
    },
}
POSITIVE = ("log", "log1p", "sqrt", "rsqrt")


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNARY)
def test_functions_agree_with_torch_in_float64(name):
    x = floats(200, dtype=np.float64) * 3
    if name in POSITIVE:
        x = np.abs(x)
    got = value(getattr(ow, name)(ow.constant(x)))
    np.testing.assert_allclose(got, UNARY[name](torch.from_numpy(x)).numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", sorted(set(UNARY) - {"sign"}))
def test_functions_of_nan_infinities_and_zeros_agree_with_torch(name):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30], np.float32)
    got = value(getattr(ow, name)(ow.constant(x)))
    np.testing.assert_allclose(got, UNARY[name](torch.from_numpy(x)).numpy(), rtol=1e-6)


def test_the_sign_of_nan_is_nan_as_in_numpy():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(value(ow.sign(ow.constant(x))), np.sign(x))


@pytest.mark.parametrize("name", ["neg", "abs", "sign", "square"])
@pytest.mark.parametrize("dtype", ["i64", "i32", "i16", "i8", "u8"])
def test_integers_stay_integers_and_wrap(name, dtype):
    x = np.array([0, 1, 2, 100, *((-1, -7, -128) if dtype[0] == "i" else (255,))], dtype=DTYPES[dtype].numpy)
    got = value(getattr(ow, name)(ow.constant(x)))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, UNARY[name](torch.from_numpy(x)).numpy())


def test_expm1_and_log1p_keep_their_digits_near_zero():
    x = np.array([1e-12, -1e-12])
    assert value(ow.expm1(ow.constant(x))) == pytest.approx(x, rel=1e-11)
    assert value(ow.log1p(ow.constant(x))) == pytest.approx(x, rel=1e-11)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", ["i64", "i32", "i16", "i8", "u8", "f64", "f32", "f16"])
def test_arithmetic_is_numpys_and_wraps(name, dtype):
    ours, numpys = BINARY[name]
    kind = DTYPES[dtype].numpy
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        a, b = RNG.integers(limits.min, limits.max, (2, 50), kind, endpoint=True)
    else:
        a, b = floats(2, 50, dtype=kind)
    got = value(ours(ow.constant(a), ow.constant(b)))
    assert got.dtype == kind
    np.testing.assert_array_equal(got, numpys(a, b))


def test_half_types_compute_wide_and_round_once():
    a, b = floats(500), floats(500)
    for t in (np.float16, ml_dtypes.bfloat16):
        x, y = a.astype(t), b.astype(t)
        got = value(ow.mul(ow.constant(x), ow.constant(y)))
        assert got.dtype == t
        np.testing.assert_array_equal(got, (x.astype(np.float32) * y.astype(np.float32)).astype(t))


def test_division_of_integers_is_in_f32():
    a, b = np.array([7, -7, 1], np.int32), np.array([2, 2, 0], np.int32)
    node = ow.constant(a) / ow.constant(b)
    assert node.dtype.name == "f32"
    assert value(node).tolist() == [3.5, -3.5, math.inf]
    np.testing.assert_array_equal(value(ow.constant(a) / 3), (a / np.float32(3)).astype(np.float32))


def test_division_of_an_integer_by_a_half_stays_half():
    assert (ow.input("i", (2,), "i32") / ow.input("h", (2,), "f16")).dtype.name == "f16"


def test_functions_of_integers_become_f32():
    x = ow.constant(np.array([0, 1, 4]))
    for f in (ow.exp, ow.sqrt, ow.tanh, ow.sin, ow.rsqrt, ow.reciprocal, ow.log1p, lambda t: ow.scale(t, 2.0)):
        assert f(x).dtype.name == "f32"
    assert value(ow.sqrt(x)).tolist() == [0, 1, 2]
    assert ow.neg(x).dtype.name == "i64"


@pytest.mark.parametrize("source", PLAIN, ids=repr)
@pytest.mark.parametrize("target", PLAIN, ids=repr)
def test_casts_agree_with_torch(source, target):
    x = np.array([0, 1, 3, 100, 0.75, 2.5] if source.is_float else [0, 1, 3, 100]).astype(source.numpy)
    got = value(ow.cast(ow.constant(x), target))
    assert got.dtype == target.numpy
    want = torch.tensor(x.astype(np.float64)).to(TORCH[source.name]).to(TORCH[target.name]).to(torch.float64)
    np.testing.assert_array_equal(got.astype(np.float64), want.numpy())


# --- powers ---------------------------------------------------------------------------------------------------------


def test_powers_agree_with_torch():
    a, b = floats(200, dtype=np.float64) * 3, RNG.integers(-4, 5, 200).astype(np.float64)
    got = value(ow.pow(ow.constant(a), ow.constant(b)))
    np.testing.assert_allclose(got, torch.pow(torch.from_numpy(a), torch.from_numpy(b)).numpy(), rtol=1e-12)
    b += 0.25
    got = value(ow.constant(np.abs(a)) ** ow.constant(b))
    np.testing.assert_allclose(got, torch.pow(torch.from_numpy(np.abs(a)), torch.from_numpy(b)).numpy(), rtol=1e-12)


def test_powers_of_nan_infinities_and_zeros_agree_with_torch():
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0, -2.5], np.float32)
    a, b = (x.ravel() for x in np.meshgrid(special, special))
    got = value(ow.pow(ow.constant(a), ow.constant(b)))
    np.testing.assert_allclose(got, torch.pow(torch.from_numpy(a), torch.from_numpy(b)).numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["i64", "i32", "i16", "i8", "u8"])
def test_powers_of_integers_agree_with_torch_also_below_zero(dtype):
    kind = DTYPES[dtype].numpy
    numbers = np.arange(-6, 7).astype(np.int8).astype(kind) if dtype[0] == "i" else np.arange(9, dtype=kind)
    a, b = (x.ravel() for x in np.meshgrid(numbers, numbers))
    got = value(ow.pow(ow.constant(a), ow.constant(b)))
    assert got.dtype == kind
    np.testing.assert_array_equal(got, torch.pow(torch.from_numpy(a), torch.from_numpy(b)).numpy())


def test_the_operators_of_python_build_powers_and_absolute_values():
    x, y = ow.input("x", (3,)), ow.input("y", (3,))
    assert x**y is ow.pow(x, y)
    assert 2**x is ow.pow(2.0, x)
    assert [s.dtype.name for s in (2**x).srcs] == ["f32", "f32"]
    assert abs(x) is ow.abs(x)


def test_the_most_used_exponents_have_operations_of_their_own():
    x, i = ow.input("x", (3,), "f16"), ow.input("i", (3,), "i32")
    assert x**2 is x**2.0 is ow.square(x)
    assert x**0.5 is ow.sqrt(x)
    assert x**-0.5 is ow.rsqrt(x)
    assert x**-1 is ow.reciprocal(x)
    assert (x**3).name == "pow"
    assert (x**3).dtype.name == "f16"
    assert i**2 is ow.square(i)
    assert (i**0.5).dtype.name == "f32"
    assert (i**0.5).name == "pow"
    with pytest.raises(ow.DTypeError, match=r"pow: integers have no power -1; cast first; .*'i' i32\[3\]"):
        i**-1


# --- promotion and broadcasting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", PLAIN, ids=repr)
@pytest.mark.parametrize("b", PLAIN, ids=repr)
def test_promotion_is_torchs(a, b):
    if a.name == b.name == "bool":
        return
    got = ow.mul(ow.input("a", (2,), a), ow.input("b", (2,), b))
    want = torch.promote_types(TORCH[a.name], TORCH[b.name])
    assert TORCH[got.dtype.name] is want
    assert all(s.dtype is got.dtype for s in got.srcs)


@pytest.mark.parametrize(
    ("a", "b"), [((3, 1), (1, 4)), ((2, 3, 4), (4,)), ((), (3,)), ((1,), (2, 5)), ((0, 3), (1, 3)), ((5, 1, 3), (2, 3))]
)
def test_kernels_get_operands_of_the_outputs_shape(a, b):
    x, y = floats(*a), floats(*b)
    node = ow.constant(x) + ow.constant(y)
    assert node.name == "add"
    assert [s.shape for s in node.srcs] == [node.shape] * 2
    np.testing.assert_array_equal(value(node), x + y)


def test_broadcast_operands_are_views_with_stride_0():
    node = ow.input("a", (3, 1)) * ow.input("b", (4,))
    assert [s.is_view for s in node.srcs] == [True, True]
    assert [s.strides for s in node.srcs] == [(4, 0), (0, 4)]


# --- numbers --------------------------------------------------------------------------------------------------------


def test_a_number_and_a_float_tensor_become_scale():
    x = ow.input("x", (3,))
    for node, scale, bias in (
        (x * 2, 2, 0),
        (0.5 * x, 0.5, 0),
        (x + 1, 1, 1),
        (1 + x, 1, 1),
        (x - 3, 1, -3),
        (3 - x, -1, 3),
        (ow.scale(x, 2, 5), 2, 5),
    ):
        assert node.name == "scale"
        assert node.srcs == (x,)
        assert dict(node.attrs) == {"scale": scale, "bias": bias}


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("number", [2, 0.1, True, -3.5])
def test_numbers_do_not_change_the_dtype_of_floats(dtype, number):
    x = floats(9).astype(DTYPES[dtype].numpy)
    wide = x.astype(np.float64)
    pairs = [
        (ow.constant(x) * number, wide * number),
        (ow.constant(x) + number, wide + number),
        (ow.constant(x) - number, wide - number),
        (number - ow.constant(x), number - wide),
    ]
    for node, want in pairs:
        assert node.dtype.name == dtype
        np.testing.assert_array_equal(value(node), want.astype(x.dtype))
    assert (ow.constant(x) / number).dtype.name == dtype
    assert (number / ow.constant(x)).dtype.name == dtype


def test_numbers_and_integer_tensors():
    x = ow.constant(np.array([1, 2, 3], np.int8))
    assert value(x + 1).tolist() == [2, 3, 4]
    assert (x + 1).dtype.name == "i8"
    assert (x * 1.5).dtype.name == "f32"
    assert value(5 - x).tolist() == [4, 3, 2]
    assert (ow.constant(np.array([True, False])) + 1).dtype.name == "i64"
    with pytest.raises(ow.DTypeError, match=r"add: 300 does not fit into i8; .* input 'x' i8"):
        ow.input("x", (3,), "i8") + 300


def test_numpy_arrays_on_the_left_come_to_the_tensor():
    node = np.array([1.0, 2.0], np.float32) * ow.input("x", (2,))
    assert isinstance(node, ow.Tensor)
    assert node.name == "mul"


# --- identities and errors ------------------------------------------------------------------------------------------


def test_a_cast_to_the_same_type_is_the_tensor():
    x = ow.input("x", (3,))
    assert ow.cast(x, "f32") is x
    assert x.astype(np.float32) is x


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(2.7, "i32"), (-2.7, "i8"), (300, "u8"), (-1, "u8"), (2.5, "bool"), (True, "i64"), (1e30, "f16"), (-3, "bf16")],
)
def test_a_number_is_cast_as_an_array_of_it_would_be(number, dtype):
    alone, among_others = ow.cast(ow.constant(number), dtype), ow.cast(ow.constant([number, number]), dtype)
    assert value(alone).tolist() == value(among_others)[0].tolist()


def test_equal_nodes_are_one():
    x, y = ow.input("x", (3,)), ow.input("y", (3,))
    assert ow.add(x, y) is ow.add(x, y)
    assert ow.add(x, y) is not ow.add(y, x)
    assert ow.exp(x * 2.0) is ow.exp(x * 2)
    assert ow.cast(x, "f16") is x.astype(np.float16)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_shapes_that_do_not_broadcast_name_both_operands_and_their_lines(name):
    with pytest.raises(ow.ShapeError) as caught:
        getattr(ow, name)(ow.input("left", (2, 3)), ow.input("right", (4,)))
    message = str(caught.value)
    assert message.startswith(f"{name}: shapes (2, 3) and (4,) do not broadcast")
    assert "input 'left' f32[2, 3]" in message
    assert "input 'right' f32[4]" in message
    assert "test_elementwise.py:" in message


@pytest.mark.parametrize("name", ["add", "sub", "mul", "pow", "neg", "abs", "sign", "square"])
def test_bool_has_no_arithmetic(name):
    x = ow.input("x", (2,), "bool")
    with pytest.raises(ow.DTypeError, match=f"{name}: bool has no arithmetic; cast first"):
        getattr(ow, name)(*(x,) * (2 if name in ("add", "sub", "mul", "pow") else 1))


@pytest.mark.parametrize(
    "name", [*UNARY, "add", "sub", "mul", "div", "pow", "scale", "softmax", "layer_norm", "sum", "max"]
)
def test_quantized_tensors_are_refused_with_a_hint(name):
    w = ow.input("w", (4, 32), "q4_0")
    more = {"add": (w,), "sub": (w,), "mul": (1,), "pow": (2,), "div": (2.0,), "scale": (2.0,)}.get(name, ())
    with pytest.raises(ow.DTypeError, match=rf"{name} does not take q4_0: .*linear\(x, w\).*'w' q4_0\[4, 32\]"):
        getattr(ow, name)(w, *more)


@pytest.mark.parametrize("bad", [None, "text", 1j, object(), [1, "a"]])
def test_what_is_no_number_is_refused(bad):
    with pytest.raises(ow.DTypeError, match="add: "):
        ow.input("x", (3,)) + bad


def test_casts_that_are_refused():
    with pytest.raises(ow.DTypeError, match=r"values are not encoded to iq1_s, but to q4_0"):
        ow.cast(ow.input("x", (256,)), "iq1_s")
    with pytest.raises(ow.DTypeError, match=r"quantize: the values are of a float type, not .*i32"):
        ow.cast(ow.input("x", (32,), "i32"), "q8_0")
    with pytest.raises(ow.UnknownNameError, match="did you mean 'f32'"):
        ow.cast(ow.input("x", (32,)), "f33")


def test_elementwise_definitions_say_what_may_be_overwritten():
    assert OPS["add"].inplace == (0, 1)
    assert OPS["exp"].inplace == (0,)
    assert all(OPS[name].pointwise for name in (*UNARY, "add", "cast", "copy", "scale"))
    x = ow.input("x", (3, 5))
    assert OPS["add"].flops(x + x) == 15
    assert OPS["cast"].flops(x.astype("f16")) == 0


def test_every_public_builder_is_in_the_table_or_made_of_it():
    made_of_others = {
        "bernoulli", "cross_entropy", "dft", "diag", "expand_dims", "flatten", "gated_delta_rule",
        "gated_linear_attention", "greater", "greater_equal", "mse_loss", "outer", "repeat", "rwkv6", "rwkv7", "split",
        "squeeze", "swapaxes", "tile",
    }  # fmt: skip
    # Made by the builder or the gradient of another operation, and by x[...].
    second_forms = {
        "after", "attention_backward", "avg_pool_backward", "gelu_tanh_backward", "head_softmax",
        "layer_norm_backward", "log_softmax_backward", "max_pool_backward", "relu_backward", "rms_norm_backward",
        "silu_backward", "slice", "softmax_backward",
    }  # fmt: skip
    from opweave import ops

    known = {name for name, op in OPS.items() if op.family != "third-party"}
    assert set(vars(ops)["__all__"]) - made_of_others == known - second_forms
    for name in known:
        assert OPS[name].formula
        assert name in second_forms or OPS[name].build is getattr(ops, name)
