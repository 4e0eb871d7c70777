"""`ArrayMemory` against plain bytes, and windows of arrays against NumPy's strides."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opweave.contract import Arg
from opweave.functional import ArrayMemory
from opweave.graph.dtypes import DTYPES, f32, i16, i64
from opweave.graph.layout import array_shape
from tests.support.array_device import Array, Library

SIZE = 64
LIBRARY = Library()


@st.composite
def writes(draw: Any) -> tuple[str, int, int, Any]:
    how = draw(st.sampled_from(["bytes", "f32", "i16", "i64", "copy", "load"]))
    item = {"f32": 4, "i16": 2, "i64": 8, "load": 4}.get(how, 1)
    offset = draw(st.integers(0, SIZE // item - 1)) * item
    n = draw(st.integers(1, (SIZE - offset) // item))
    return how, offset, n * item, draw(st.integers(0, SIZE - n * item) if how == "copy" else st.integers(0, 255))


@given(st.lists(writes(), max_size=12))
def test_it_holds_the_bytes_that_were_put_however_they_overlap(moves: list[tuple[str, int, int, int]]):
    memory, model = ArrayMemory(SIZE, LIBRARY), np.zeros(SIZE, np.uint8)
    for how, offset, size, value in moves:
        fresh = (np.arange(size) * 7 + value).astype(np.uint8)
        if how == "bytes":
            memory.write(offset, fresh.copy())
            model[offset : offset + size] = fresh
        elif how == "copy":
            memory.copy(offset, memory, value, size)
            model[offset : offset + size] = model[value : value + size].copy()
        elif how == "load":
            got = memory.get(offset, f32, (size // 4,)).values
            assert got.tobytes() == model[offset : offset + size].tobytes()
        else:
            dtype = {"f32": f32, "i16": i16, "i64": i64}[how]
            memory.put(offset, dtype, (size // dtype.itemsize,), Array(fresh.view(dtype.numpy)))
            model[offset : offset + size] = fresh
        assert memory.read(0, SIZE).tobytes() == model.tobytes()


def test_an_array_is_handed_over_as_it_is_and_in_another_shape_without_the_host():
    library = Library()
    memory, array = ArrayMemory(64, library), Array(np.arange(6, dtype=np.float32).reshape(2, 3))
    memory.put(8, f32, (2, 3), array)
    cell = memory.cell(8, f32, (2, 3))
    assert memory.get(8, f32, (2, 3)) is array
    assert cell is memory.cell(8, f32, (2, 3))
    assert memory.get(8, f32, (6,)).values.tolist() == [0, 1, 2, 3, 4, 5]
    assert library.moved == 0
    assert cell.array is None, "the bytes are there in another form"
    memory.write(8, np.zeros(4, np.uint8))
    assert memory.get(8, f32, (2, 3)).values.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_somebody_else_has_is_copied_before_it_is_donated():
    memory, array = ArrayMemory(8, LIBRARY), Array(np.ones(2, np.float32))
    cell = memory.cell(0, f32, (2,))
    cell.put(array, borrowed=True)
    assert cell.owned() is not array
    cell.put(array)
    assert cell.owned() is array
    cell.array = None
    assert memory.read(0, 8).tobytes() == bytes(8)


@st.composite
def windows(draw: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A dense array of numbers, and a window of it made by NumPy's views."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    view = whole
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "transpose", "broadcast", "reshape", "diagonal", "overlap"]))
        if kind == "slice" and view.ndim:
            axis = draw(st.integers(0, view.ndim - 1))
            start = draw(st.integers(0, view.shape[axis] - 1))
            piece = slice(start, draw(st.integers(start + 1, view.shape[axis])), draw(st.integers(1, 3)))
            view = view[(slice(None),) * axis + (piece,)]
        elif kind == "transpose":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif kind == "broadcast" and view.ndim < 6:
            view = np.broadcast_to(view, (draw(st.integers(1, 3)), *view.shape))
        elif kind == "reshape" and view.flags.c_contiguous and view.base is not None:
            view = view.reshape(-1)
        elif kind == "diagonal" and view.ndim > 1:
            view = view.diagonal()
        elif kind == "overlap" and view.ndim == 1 and view.size > 2:
            view = np.lib.stride_tricks.sliding_window_view(view, 2)
    return whole, view


def place(whole: np.ndarray[Any, Any], view: np.ndarray[Any, Any]) -> Arg:
    start = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return Arg(None, start, f32, view.shape, view.strides)


@given(windows())
def test_windows_are_those_of_numpy(case: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]):
    dense, view = case
    arg, whole = place(dense, view), Array(dense.copy())
    np.testing.assert_array_equal(LIBRARY.window(whole, arg).values, view)
    if len(np.unique(view)) == view.size:  # otherwise nothing writes there
        values = -1 - np.arange(view.size, dtype=np.float32).reshape(view.shape)
        changed = LIBRARY.with_window(whole, arg, Array(values)).values
        expected = dense.copy()
        np.lib.stride_tricks.as_strided(expected.reshape(-1)[arg.offset // 4 :], view.shape, view.strides)[...] = values
        np.testing.assert_array_equal(changed, expected)


def test_windows_of_quantized_arrays_are_rows_of_bytes():
    dtype = DTYPES["q8_0"]
    rows = np.arange(4 * 2 * 34, dtype=np.uint32).astype(np.uint8).reshape(array_shape((4, 64), dtype))
    arg = Arg(None, 68, dtype, (2, 64), (68, 34))
    np.testing.assert_array_equal(LIBRARY.window(Array(rows), arg).values, rows[1:3])
