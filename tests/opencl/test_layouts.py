"""Axes that every operand steps through evenly become one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opweave_opencl.layouts import coalesce, nested


def test_dense_operands_become_one_axis():
    assert coalesce((2, 3, 4), [(12, 4, 1), (12, 4, 1)]) == ((24,), [(1,), (1,)])


def test_a_scalar_beside_a_dense_operand_does_not_keep_axes_apart():
    assert coalesce((2, 3, 4), [(12, 4, 1), (0, 0, 0)]) == ((24,), [(1,), (0,)])


def test_a_broadcast_row_keeps_two_axes():
    assert coalesce((2, 3, 4), [(12, 4, 1), (0, 0, 1)]) == ((4, 6), [(1, 4), (1, 0)])


def test_axes_of_length_one_vanish():
    assert coalesce((1, 5, 1), [(99, 2, 7)]) == ((5,), [(2,)])
    assert coalesce((1, 1), [(9, 9)]) == ((1,), [(1,)])
    assert coalesce((), [()]) == ((1,), [(1,)])


@given(st.lists(st.integers(1, 4), max_size=5), st.data())
def test_the_walk_stays_the_same(shape, data):
    axes = len(shape)
    strides = [data.draw(st.lists(st.integers(0, 12), min_size=axes, max_size=axes)) for _ in range(2)]
    lengths, steps = coalesce(shape, strides)
    for before, after in zip(strides, steps, strict=True):
        want = [sum(i * s for i, s in zip(at, before, strict=True)) for at in np.ndindex(*shape)]
        got = [sum(i * s for i, s in zip(reversed(at), after, strict=True)) for at in np.ndindex(*lengths[::-1])]
        assert got == want


@given(st.lists(st.integers(1, 4), max_size=5), st.data())
def test_another_order_of_axes_meets_the_same_elements(shape, data):
    axes = len(shape)
    strides = [data.draw(st.lists(st.integers(-12, 12), min_size=axes, max_size=axes)) for _ in range(2)]
    lengths, steps = nested(shape, strides, 4)
    assert len(lengths) >= 2
    before = sorted(
        tuple([sum(i * s for i, s in zip(at, own, strict=True)) for own in strides]) for at in np.ndindex(*shape)
    )
    after = sorted(
        tuple([sum(i * s for i, s in zip(at, own, strict=True)) for own in steps]) for at in np.ndindex(*lengths)
    )
    assert before == after


def test_operands_that_are_all_transposed_are_walked_as_they_lie():
    assert nested((5, 20), [(1, 5), (1, 5)], 4) == ((100, 1), [(1, 0), (1, 0)])


def test_vectors_go_along_the_long_axis():
    assert nested((1000, 3), [(1, 1000), (3, 1)], 16)[0] == (1000, 3)
