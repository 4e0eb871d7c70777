"""What sessions are fed."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow


@pytest.fixture
def scheduler(device):
    with ow.Scheduler(device) as made:
        yield made


def values(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


LARGE = 1024, 256


def test_inputs_of_one_session_are_bound_independently(scheduler):
    a, b = ow.input("a", LARGE), ow.input("b", LARGE)
    program = scheduler.build(a - b)
    arrays = [values(LARGE, seed) for seed in range(3)]
    for i, j in ((0, 1), (0, 2), (1, 2), (2, 2), (0, 1)):
        assert np.array_equal(program.run(a=arrays[i], b=arrays[j]), arrays[i] - arrays[j])


def test_an_input_of_which_parts_are_read_strided_is_copied(scheduler):
    x = ow.input("x", LARGE)
    part = x.T[::3]
    program = scheduler.build((x * 2.0, ow.exp(part)))
    array = values(LARGE)
    double, e = program.run(x=array)
    assert np.array_equal(double, array * 2)
    np.testing.assert_allclose(e, np.exp(array.T[::3]), rtol=1e-5)


def test_results_outlive_what_was_fed_and_weights_that_are_written(scheduler):
    w = ow.weights({"w": values((8, 256), 5)})
    x = ow.input("x", LARGE)
    program = scheduler.build((x, ow.linear(x, w["w"])))
    array = values(LARGE)
    before = array.copy()
    same, product = program.run(x=array)
    want = product.copy()
    w.write({"w": values((8, 256), 6)})
    array.fill(0)
    again = program.run(x=before)[1]
    assert np.array_equal(same, before)
    assert np.array_equal(product, want)
    np.testing.assert_allclose(again, before @ values((8, 256), 6).T, rtol=1e-3, atol=1e-3)
