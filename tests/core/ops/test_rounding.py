"""Rounding to whole numbers against torch and NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import opweave as ow
from tests.support.evaluate import evaluate

NAMES: dict[str, Callable[..., Any]] = {"floor": np.floor, "ceil": np.ceil, "round": np.round, "trunc": np.trunc}
X = np.array([0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 7.2, -7.8, 8388609, 1e30, np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rounding_agrees_with_torch_and_numpy(name, dtype):
    x = X.astype(dtype)
    got = evaluate(getattr(ow, name)(ow.constant(x)), {})
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, getattr(torch, name)(torch.from_numpy(x)).numpy())
    np.testing.assert_array_equal(got, NAMES[name](x))


def test_of_two_nearest_the_even_one():
    got = evaluate(ow.round(ow.constant(np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]))), {})
    assert got.tolist() == [0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_whole_comes_back(name):
    x, flag = ow.input("x", (3,), "i16"), ow.input("flag", (3,), "bool")
    assert getattr(ow, name)(x) is x
    assert getattr(ow, name)(flag) is flag


@pytest.mark.parametrize("name", NAMES)
def test_quantized_tensors_are_refused(name):
    with pytest.raises(ow.DTypeError, match=f"{name} does not take q8_0"):
        getattr(ow, name)(ow.input("w", (4, 32), "q8_0"))
