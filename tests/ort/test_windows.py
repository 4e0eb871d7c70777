"""Windows of dense values, cut out by ONNX's operators, against NumPy's views."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st

from opweave.graph.dtypes import f32
from opweave_ort.model import Model
from opweave_ort.windows import Window, cover, show

KINDS = ("slice", "transpose", "index", "diagonal", "reshape", "broadcast")


@st.composite
def windows(draw):
    """A dense array, and a view of it made of slices, transposes, reshapes, diagonals and broadcasts."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    base = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    view = base
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=4)):
        if kind == "slice":
            steps = [slice(draw(st.integers(0, n - 1)), None, draw(st.integers(1, 2))) for n in view.shape]
            key: Any = (*steps, ...)
            view = np.asarray(view)[key]
        elif kind == "transpose":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif kind == "index" and view.ndim > 1:
            view = view[draw(st.integers(0, len(view) - 1))]
        elif kind == "diagonal" and view.ndim == 2:
            view = view.diagonal()
        elif kind == "reshape" and view.flags.c_contiguous:
            first = draw(st.sampled_from([d for d in range(1, view.size + 1) if view.size % d == 0]))
            view = view.reshape(first, -1)
        elif kind == "broadcast" and view.ndim < 4:
            view = np.broadcast_to(view, (3, *view.shape))
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 4
    strides = tuple([0 if n == 1 else s // 4 for n, s in zip(view.shape, view.strides, strict=True)])
    return base, view, Window(offset, view.shape, strides)


def shown(array, window):
    model = Model()
    value = show(model, model.input("in0", f32, array.shape), array.shape, window)
    model.output(value, f32, window.lead)
    session = onnxruntime.InferenceSession(model.serialized(), providers=["CPUExecutionProvider"])
    return session.run(None, {"in0": array})[0]


@settings(max_examples=150, deadline=None)
@given(windows())
def test_a_window_is_cut_out_of_its_value(case):
    base, view, window = case
    result = shown(base, window)
    assert result.shape == window.lead
    assert np.array_equal(np.broadcast_to(result, view.shape), view)


@settings(max_examples=100, deadline=None)
@given(windows())
def test_an_array_that_begins_with_the_window_covers_it(case):
    base, view, window = case
    window = window._replace(offset=0)
    shape = cover(window)
    if shape is not None:
        begin = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 4
        memory = np.concatenate([base.reshape(-1)[begin:], np.full(2000, np.nan, np.float32)])
        result = shown(memory[: prod(shape)].reshape(shape), window)
        assert np.array_equal(np.broadcast_to(result, view.shape), view)
