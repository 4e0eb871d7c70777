"""The arithmetic of layouts, compared with NumPy's strides."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.graph.dtypes import DTYPES, f32, f64, i8
from opweave.graph.layout import (
    broadcast_shapes,
    broadcast_strides,
    check_shape,
    dense_strides,
    is_dense,
    nbytes,
    normalize_axes,
    normalize_key,
    reshape_strides,
    resolve_reshape,
    slice_window,
    span,
)


def window_of(shape, strides, offset, key, dtype):
    return slice_window(shape, strides, offset, normalize_key(key, shape), dtype)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
q4_0 = DTYPES["q4_0"]


@st.composite
def windows(draw, *, empty=True):
    """A view of an array, made by transposing, slicing and broadcasting; perhaps one without elements."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    if draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    for axis in range(array.ndim):
        start = draw(st.integers(0, 2 if empty else min(2, array.shape[axis] - 1)))
        array = array[(slice(None),) * axis + (slice(start, None, draw(st.integers(1, 3))),)]
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape))
    return array


def offset_in(array, root):
    return array.__array_interface__["data"][0] - root.__array_interface__["data"][0]


@given(shapes)
def test_dense_strides_are_numpys(shape):
    array = np.empty(shape, np.float64)
    assert nbytes(shape, f64) == array.nbytes
    if array.size:
        assert dense_strides(shape, f64) == array.strides


@given(windows())
def test_dense_is_what_numpy_calls_c_contiguous(array):
    assert is_dense(array.shape, array.strides, f32) == array.flags.c_contiguous


@given(windows())
def test_span_reaches_past_the_last_element(array):
    if array.size == 0:
        assert span(array.shape, array.strides, f32) == 0
    else:
        last = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
        assert span(array.shape, array.strides, f32) == last + 4


@settings(max_examples=400)
@given(windows(empty=False), st.data())
def test_reshape_finds_strides_exactly_where_numpy_needs_no_copy(array, data):
    rest, lengths = array.size, []
    for _ in range(data.draw(st.integers(0, 4))):
        lengths.append(data.draw(st.sampled_from([n for n in range(1, 13) if rest % n == 0])))
        rest //= lengths[-1]
    target = (*lengths, rest)
    strides = reshape_strides(array.shape, array.strides, target, f32)
    reshaped = array.reshape(target)
    shared = np.shares_memory(reshaped, array)
    assert (strides is not None) == shared
    if strides is not None:
        seen = np.lib.stride_tricks.as_strided(array, target, strides)
        np.testing.assert_array_equal(seen, reshaped)


@given(shapes, st.lists(st.integers(-1, 12), max_size=4).map(tuple))
def test_reshape_targets_are_resolved_as_numpy_does(shape, to):
    try:
        want = np.empty(shape).reshape(to).shape
    except ValueError:
        with pytest.raises(ow.ShapeError):
            resolve_reshape(shape, to)
    else:
        assert resolve_reshape(shape, to) == want


parts = st.one_of(
    st.integers(-6, 6), st.none(), st.just(...), st.slices(6).filter(lambda s: s.step is None or s.step > 0)
)


@settings(max_examples=500)
@given(windows(), st.one_of(parts, st.lists(parts, max_size=5).map(tuple)))
def test_slices_are_numpys_windows(array, key):
    try:
        want = array[key]
    except IndexError:
        with pytest.raises(ow.BoundsError):
            window_of(array.shape, array.strides, 0, key, f32)
        return
    shape, strides, offset = window_of(array.shape, array.strides, 0, key, f32)
    assert shape == np.shape(want)
    if np.size(want) and isinstance(want, np.ndarray):
        assert offset == offset_in(want, array)
        for n, ours, numpys in zip(shape, strides, want.strides, strict=True):
            assert n == 1 or ours == numpys


def test_slices_keep_the_offset_of_their_source():
    assert window_of((4, 6), (24, 4), 100, (1, slice(2, 4)), f32) == ((2,), (4,), 100 + 24 + 8)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (slice(None, None, -1), ow.LayoutError),
        (4, ow.BoundsError),
        ((0, 0, 0), ow.BoundsError),
        ((..., ...), ow.BoundsError),
        ("a", ow.LayoutError),
        (1.0, ow.LayoutError),
    ],
)
def test_slices_that_no_window_shows(key, error):
    with pytest.raises(error):
        window_of((4, 6), (24, 4), 0, key, f32)


@given(st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=3))
def test_broadcasting_is_numpys(several):
    try:
        want = np.broadcast_shapes(*several)
    except ValueError:
        with pytest.raises(ow.ShapeError, match="do not broadcast"):
            broadcast_shapes(*several)
        return
    assert broadcast_shapes(*several) == want
    for shape in several:
        array = np.empty(shape, np.float32)
        seen = np.broadcast_to(array, want)
        strides = broadcast_strides(shape, array.strides, want)
        assert all(n == 1 or ours == numpys for n, ours, numpys in zip(want, strides, seen.strides, strict=True))


@pytest.mark.parametrize(("shape", "to"), [((3,), (4,)), ((2, 3), (3,)), ((2,), (2, 3))])
def test_shapes_that_do_not_broadcast(shape, to):
    with pytest.raises(ow.ShapeError):
        broadcast_strides(shape, dense_strides(shape, f32), to)


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_run_along_the_last_axis():
    assert nbytes((3, 64), q4_0) == 3 * 36
    assert dense_strides((2, 3, 64), q4_0) == (108, 36, 18)
    assert is_dense((2, 3, 64), (108, 36, 18), q4_0)
    assert not is_dense((2, 3, 64), (216, 72, 18), q4_0)
    assert span((2, 64), (100, 18), q4_0) == 100 + 36


def test_slices_of_blocks_are_whole():
    assert window_of((3, 64), (36, 18), 0, (1, slice(32, 64)), q4_0) == ((32,), (18,), 36 + 18)
    for key in ((slice(None), slice(1, 33)), (slice(None), slice(0, 32, 2)), (slice(None), 0), (..., None)):
        with pytest.raises(ow.LayoutError):
            window_of((3, 64), (36, 18), 0, key, q4_0)


def test_reshapes_of_blocks_are_whole():
    assert reshape_strides((2, 3, 64), (108, 36, 18), (6, 64), q4_0) == (36, 18)
    assert reshape_strides((2, 3, 64), (108, 36, 18), (2, 192), q4_0) == (108, 18)
    assert reshape_strides((2, 3, 64), (108, 36, 18), (12, 32), q4_0) == (18, 18)
    assert reshape_strides((2, 3, 64), (108, 36, 18), (24, 16), q4_0) is None
    assert reshape_strides((3, 2, 64), (36, 108, 18), (6, 64), q4_0) is None


# --- shapes and axes ------------------------------------------------------------------------------------------------


def test_shapes_are_checked():
    assert check_shape(3, i8) == (3,)
    assert check_shape([np.int64(2), 3], i8) == (2, 3)
    assert check_shape((4, 64), q4_0) == (4, 64)
    for bad in ((2, -1), (1,) * 9, "abc", (1.5,), None):
        with pytest.raises(ow.ShapeError):
            check_shape(bad, i8)
    for cut in ((4, 33), (), (4, 16)):
        with pytest.raises(ow.LayoutError, match="multiple of its block of 32"):
            check_shape(cut, q4_0)


def test_axes_are_normalised():
    assert normalize_axes(None, 3) == (0, 1, 2)
    assert normalize_axes(-1, 3) == (2,)
    assert normalize_axes((2, -3), 3) == (0, 2)
    assert normalize_axes((), 3) == ()
    with pytest.raises(ow.ShapeError, match="twice"):
        normalize_axes((1, -2), 3)
    with pytest.raises(ow.BoundsError, match="axis 3 is out of range for 3 axes"):
        normalize_axes(3, 3)
