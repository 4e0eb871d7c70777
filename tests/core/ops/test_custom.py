"""Python functions as nodes."""

import numpy as np
import pytest

import opweave as ow
from opweave.graph import opdef
from tests.support.evaluate import evaluate


def outer(a, b):
    return np.outer(a, b)


def test_a_function_of_arrays_is_a_node():
    a, b = ow.constant([1.0, 2.0]), ow.constant([3.0, 4.0, 5.0])
    node = ow.custom(outer, a, b, like=((2, 3), "f32"))
    assert node.shape == (2, 3)
    assert evaluate(node, {}).tolist() == [[3, 4, 5], [6, 8, 10]]
    assert ow.custom(outer, a, b, like=((2, 3), "f32")) is node


def test_like_takes_a_tensor_or_a_spec_and_converts_the_result():
    x = ow.constant([1.5, 2.5])
    assert ow.custom(np.cumsum, x, like=x).dtype.name == "f32"
    node = ow.custom(np.cumsum, x, like=ow.Spec((2,), ow.as_dtype("i32")))
    assert evaluate(node, {}).tolist() == [1, 4]


def test_a_function_without_sources():
    assert evaluate(ow.custom(lambda: np.ones(2), like=((2,), "f16")), {}).dtype == np.float16


def test_sources_are_read_only():
    def spoil(x):
        x += 1
        return x

    with pytest.raises(ValueError, match="read-only"):
        evaluate(ow.custom(spoil, ow.constant([1.0]), like=((1,), "f32")), {})


def test_broken_promises_are_named():
    x = ow.constant([1.0, 2.0])
    with pytest.raises(ow.ShapeError, match=r"custom: sum returned shape \(\), not \(2,\) as promised"):
        evaluate(ow.custom(np.sum, x, like=x), {})
    with pytest.raises(ow.DTypeError, match="returned complex128"):
        evaluate(ow.custom(lambda a: a.astype(complex), x, like=x), {})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: opdef.build("custom", 3, x, like=x), ow.DTypeError, "int is not callable"),
        (lambda x: ow.custom(len, x, like=3), ow.ShapeError, "like is a tensor or a pair"),
        (lambda x: ow.custom(len, x, like=((2,), "f33")), ow.UnknownNameError, "f32"),
        (lambda x: ow.custom(len, x, like=((32,), "q4_0")), ow.DTypeError, "cannot produce q4_0"),
        (lambda x: ow.custom(len, ow.input("q", (32,), "q4_0"), like=x), ow.DTypeError, "does not take q4_0"),
    ],
)
def test_what_is_no_custom_node(make, error, message):
    with pytest.raises(error, match=message):
        make(ow.input("x", (2,)))


def test_unhashable_callables_are_refused():
    class Scaler(dict):
        def __call__(self, x):
            return x

    with pytest.raises(ow.DTypeError, match="not hashable; wrap it in a function"):
        ow.custom(Scaler(), ow.input("x", (2,)), like=((2,), "f32"))
