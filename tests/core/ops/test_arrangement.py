"""Repeating, turning, shifting, framing, triangles and diagonals: the references against NumPy and torch."""

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.graph import Graph
from tests.support.evaluate import evaluate


def value(tensor):
    return evaluate(tensor, {})


def counting(*shape, dtype=np.float32):
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def steps(tensor):
    return [t.name for t in Graph(tensor).nodes if not t.is_view]


# --- repeating ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (1, 4), (2, 3, 4)])
@pytest.mark.parametrize("reps", [1, 3, 0, (2, 1), (2, 3), (1, 2, 3), (2, 1, 1, 2)])
def test_tile_is_numpys(shape, reps):
    array = counting(*shape)
    got = ow.tile(ow.constant(array), reps)
    np.testing.assert_array_equal(value(got), np.tile(array, reps))
    assert got.shape == np.tile(array, reps).shape


@pytest.mark.parametrize("times", [0, 1, 2, 5])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_repeat_is_numpys(axis, times):
    array = counting(2, 3, 4)
    got = ow.repeat(ow.constant(array), times, axis)
    np.testing.assert_array_equal(value(got), np.repeat(array, times, axis))
    if times:
        other = torch.repeat_interleave(torch.from_numpy(array), times, axis)
        np.testing.assert_array_equal(value(got), other.numpy())


def test_repeating_is_a_view_and_one_packed_copy():
    x = ow.input("x", (2, 3, 4))
    assert ow.tile(x, 1) is x
    assert ow.repeat(x, 1, 0) is x
    assert steps(ow.tile(x, (2, 3, 4))) == ["contiguous"]
    assert steps(ow.repeat(x, 2, -1)) == ["contiguous"]
    assert steps(ow.tile(ow.input("row", (1, 5)), (7, 1))) == []


def test_as_many_axes_as_there_are_can_be_repeated():
    array = counting(2, 1, 2, 2, 1, 2, 2, 2)
    reps = (2, 2, 1, 2, 3, 1, 2, 2)
    np.testing.assert_array_equal(value(ow.tile(ow.constant(array), reps)), np.tile(array, reps))
    np.testing.assert_array_equal(value(ow.repeat(ow.constant(array), 3, 5)), np.repeat(array, 3, 5))


def test_rows_of_blocks_repeat_whole():
    w = ow.input("w", (2, 64), "q4_0")
    assert ow.tile(w, (3, 2)).shape == (6, 128)
    assert ow.repeat(w, 2, 0).shape == (4, 64)
    with pytest.raises(ow.LayoutError):
        ow.repeat(w, 2, 1)


# --- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), ()])
def test_flip_is_numpys(axis):
    array = counting(2, 3, 4)
    np.testing.assert_array_equal(value(ow.flip(ow.constant(array), axis)), np.flip(array, axis))


def test_flipping_what_has_one_element_is_nothing():
    x = ow.input("x", (1, 3))
    assert ow.flip(x, 0) is x
    assert ow.flip(x) is ow.flip(x, 1) is ow.flip(x, (-1, 0))


@pytest.mark.parametrize(
    ("shift", "axis"),
    [(1, None), (-5, None), (100, None), (1, 0), (-1, -1), (7, 2), ((1, 2), (0, 1)), ((1, 2), (1, 1)), (2, (0, 2))],
)
def test_roll_is_numpys(shift, axis):
    array = counting(2, 3, 4)
    np.testing.assert_array_equal(value(ow.roll(ow.constant(array), shift, axis)), np.roll(array, shift, axis))


def test_rolling_all_the_way_is_nothing():
    x = ow.input("x", (2, 3))
    assert ow.roll(x, 3, 1) is x
    assert ow.roll(x, (1, -1), (0, 0)) is x
    assert ow.roll(x, -1, 1) is ow.roll(x, 2, -1)
    empty = ow.input("empty", (0, 3))
    assert ow.roll(empty, 1, 0) is empty


# --- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("widths", [0, 1, (1, 2), ((0, 0), (2, 0), (1, 3)), ((1, 1),), ((1, 2), (0, 0), (3, 3))])
def test_pad_is_numpys(mode, widths):
    array = counting(3, 3, 4)
    got = value(ow.pad(ow.constant(array), widths, mode))
    np.testing.assert_array_equal(got, np.pad(array, widths, mode))


@pytest.mark.parametrize(("mode", "torchs"), [("edge", "replicate"), ("reflect", "reflect"), ("wrap", "circular")])
def test_pad_is_torchs(mode, torchs):
    array = counting(1, 2, 5, 6)
    got = value(ow.pad(ow.constant(array), ((0, 0), (0, 0), (2, 3), (1, 4)), mode))
    want = torch.nn.functional.pad(torch.from_numpy(array), (1, 4, 2, 3), torchs)
    np.testing.assert_array_equal(got, want.numpy())


@pytest.mark.parametrize(("dtype", "fill"), [("f32", -1.5), ("bf16", 0.1), ("i8", -128), ("bool", True), ("u8", 255)])
def test_a_frame_has_the_dtype_of_what_it_frames(dtype, fill):
    kind = as_dtype(dtype).numpy
    got = value(ow.pad(ow.constant(np.zeros((2, 2), kind)), 1, value=fill))
    assert got.dtype == kind
    assert got[0, 0] == np.array(fill, kind)
    assert not got[1:3, 1:3].any()


# --- matrices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, -1, 3, -9, 9])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (2, 3, 3, 4), (1, 1), (0, 3)])
def test_triangles_are_numpys(shape, k):
    array = counting(*shape) + 1
    np.testing.assert_array_equal(value(ow.tril(ow.constant(array), k)), np.tril(array, k))
    np.testing.assert_array_equal(value(ow.triu(ow.constant(array), k)), np.triu(array, k))


def test_what_is_outside_of_a_triangle_is_zero_whatever_it_was():
    array = np.full((2, 2), np.nan, np.float32)
    array[1] = np.inf
    got = value(ow.tril(ow.constant(array), -1))
    np.testing.assert_array_equal(got, [[0, 0], [np.inf, 0]])


@pytest.mark.parametrize("k", [0, 2, -3])
def test_diagonals_are_numpys_and_torchs(k):
    vector, matrix, many = counting(4), counting(4, 6), counting(2, 3, 4)
    np.testing.assert_array_equal(value(ow.diag(ow.constant(vector), k)), np.diag(vector, k))
    np.testing.assert_array_equal(value(ow.diag(ow.constant(matrix), k)), np.diag(matrix, k))
    want = torch.diag_embed(torch.from_numpy(many), k)
    np.testing.assert_array_equal(value(ow.diag_embed(ow.constant(many), k)), want.numpy())
    np.testing.assert_array_equal(value(ow.diagonal(ow.diag_embed(ow.constant(many), k), k, -2, -1)), many)


@pytest.mark.parametrize("offset", [0, 1, -1, 5, -9])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (-1, 0), (1, 2)])
def test_a_diagonal_is_a_view(axes, offset):
    array = counting(3, 4, 5)
    x = ow.constant(array)
    for source, numpys in ((x, array), (x.T, array.T), (x[1:, ::2, 1:], array[1:, ::2, 1:])):
        got = ow.diagonal(source, offset, *axes)
        assert got.root is x
        np.testing.assert_array_equal(value(got), np.diagonal(numpys, offset, *axes))
        np.testing.assert_array_equal(value(ow.contiguous(got)), np.diagonal(numpys, offset, *axes))


def test_a_diagonal_of_a_state_can_be_written():
    state = ow.state("s", (3, 3))
    after = evaluate(ow.assign(ow.diag(state), 5.0), {state: np.zeros((3, 3), np.float32)})
    np.testing.assert_array_equal(after, np.eye(3) * 5)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: ow.tile(x, 1.5), ow.ShapeError, "tile: a number of repetitions is an integer, not 1.5"),  # type: ignore[arg-type]
        (lambda x: ow.tile(x, (2, -1)), ow.ShapeError, "tile: .* none negative"),
        (lambda x: ow.tile(x, (1,) * 9), ow.ShapeError, "at most 8"),
        (lambda x: ow.repeat(x, -1), ow.ShapeError, "repeat: -1 repetitions"),
        (lambda x: ow.repeat(x, [1, 2]), ow.ShapeError, "repeat: the number of repetitions is an integer"),  # type: ignore[arg-type]
        (lambda x: ow.repeat(x, 2, 5), ow.BoundsError, "repeat: axis 5"),
        (lambda x: ow.flip(x, (0, -2)), ow.ShapeError, "flip: axes .* name an axis twice"),
        (lambda x: ow.flip(x, 2), ow.BoundsError, "flip: axis 2"),
        (lambda x: ow.roll(x, (1, 2, 3), (0, 1)), ow.ShapeError, "roll: 3 shifts for 2 axes"),
        (lambda x: ow.roll(x, 0.5, 0), ow.ShapeError, "roll: a shift is an integer"),  # type: ignore[arg-type]
        (lambda x: ow.pad(x, -1), ow.ShapeError, "pad: widths .* none negative"),
        (lambda x: ow.pad(x, ((1, 1),) * 3), ow.ShapeError, "pad: widths .* a pair for each axis"),
        (lambda x: ow.pad(x, (1, 2, 3)), ow.ShapeError, "pad: widths"),
        (lambda x: ow.pad(x, 1, "mirror"), ow.UnknownNameError, "mode of pad named 'mirror'"),  # type: ignore[arg-type]
        (lambda x: ow.pad(x, 1, np.ones(2)), ow.UnknownNameError, "mode of pad"),  # type: ignore[arg-type]
        (lambda x: ow.pad(x, 1 << 62), ow.ShapeError, "pad: .* has more bytes than the address space"),
        (lambda x: ow.tile(x, 1 << 62), ow.ShapeError, "has more bytes than the address space"),
        (lambda x: ow.diag_embed(x[:0], 1 << 70), ow.ShapeError, "diag_embed: .* more bytes than the address space"),
        (lambda x: ow.pad(x, ((3, 0), (0, 0)), "reflect"), ow.ShapeError, "axis 0 of length 3 .* frame of 2 by 'refl"),
        (lambda x: ow.pad(x, ((4, 0), (0, 0)), "wrap"), ow.ShapeError, "frame of 3 by 'wrap'"),
        (lambda x: ow.pad(x[:0], 1, "edge"), ow.ShapeError, "frame of 0 by 'edge'"),
        (lambda x: ow.pad(x.astype("u8"), 1, value=-1), ow.DTypeError, "pad: -1 does not fit into u8"),
        (lambda x: ow.pad(x.astype("i32"), 1, value=0.5), ow.DTypeError, "0.5 does not fit into i32"),
        (lambda x: ow.tril(x[0]), ow.ShapeError, "tril: needs at least two axes"),
        (lambda x: ow.triu(x, 0.5), ow.ShapeError, "triu: k is an integer"),  # type: ignore[arg-type]
        (lambda x: ow.diag(x[None]), ow.ShapeError, "diag: takes a vector or a matrix"),
        (lambda x: ow.diagonal(x, 0, 1, -1), ow.ShapeError, "axis 1 and axis -1 are one"),
        (lambda x: ow.diagonal(x[0]), ow.ShapeError, "diagonal: needs at least two axes"),
        (lambda x: ow.diag_embed(x[0, 0]), ow.ShapeError, "diag_embed: needs 1 to 7 axes"),
        (lambda x: ow.flip(ow.input("w", (2, 32), "q8_0")), ow.DTypeError, "flip does not take q8_0"),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make(ow.input("x", (3, 4)))


@pytest.mark.parametrize("k", [1 << 31, 1 << 70, -(1 << 31), -(1 << 70)])
def test_triangles_beyond_the_matrix_are_all_of_it_or_nothing(k):
    x = np.arange(1.0, 13).reshape(3, 4)
    for function in (ow.tril, ow.triu):
        whole = (k > 0) == (function is ow.tril)
        np.testing.assert_array_equal(value(function(ow.constant(x), k)), x if whole else np.zeros_like(x))
