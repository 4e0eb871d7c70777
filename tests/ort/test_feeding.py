"""Large inputs are read where they are fed; small ones, and arrays of other layouts, are copied."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave_ort import calls


@pytest.fixture
def scheduler(device):
    with ow.Scheduler(device) as made:
        yield made


def values(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bound(program):
    """The addresses at which the only session of a program reads inputs in its next run."""
    (call,) = program.run_lists[0].calls.calls
    return list(call._addresses.values())


LARGE = calls.FED_BYTES.value // 4 // 256, 256


def test_a_large_array_is_read_where_it_lies(scheduler):
    x = ow.input("x", LARGE)
    program = scheduler.build((x * 2.0, x.reshape(256, -1) + 1.0))
    for seed in range(12):  # more than there are bindings kept
        array = values(LARGE, seed)
        double, more = program.run(x=array)
        assert bound(program) == [array.ctypes.data] * 2
        assert np.array_equal(double, array * 2)
        assert np.array_equal(more, array.reshape(256, -1) + 1)


def test_smaller_ones_and_arrays_of_other_layouts_are_copied(scheduler):
    small = LARGE[0] // 2, LARGE[1]
    program = scheduler.build(ow.input("x", small) * 2.0)
    assert np.array_equal(program.run(x=values(small)), values(small) * 2)
    assert bound(program) == []
    program = scheduler.build(ow.input("x", LARGE) * 2.0)
    first = values(LARGE)
    assert np.array_equal(program.run(x=first), first * 2)
    (address,) = bound(program)
    assert address == first.ctypes.data
    turned = np.asfortranarray(values(LARGE, 1))
    assert np.array_equal(program.run(x=turned), turned * 2)
    assert not set(bound(program)) & {first.ctypes.data, turned.ctypes.data}


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
