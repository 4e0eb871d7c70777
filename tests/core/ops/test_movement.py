"""Views against NumPy, one by one and in random chains; packing and joining."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.graph import opdef
from opweave.graph.dtypes import as_dtype
from opweave.graph.graph import Graph
from opweave.ops.movement import slice as slice_op
from tests.support.evaluate import evaluate


def value(tensor):
    return evaluate(tensor, {})


def counting(*shape, dtype=np.float32):
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


# --- random chains --------------------------------------------------------------------------------------------------

axes = st.integers(-5, 4)
index = st.one_of(
    st.integers(-4, 4), st.none(), st.just(...), st.slices(5).filter(lambda s: s.step is None or s.step > 0)
)
steps = st.one_of(
    st.tuples(st.just("reshape"), st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 6, 8, 12]), max_size=4).map(tuple)),
    st.tuples(st.just("transpose"), st.one_of(st.none(), st.permutations(range(3)).map(tuple))),
    st.tuples(st.just("swapaxes"), st.tuples(axes, axes)),
    st.tuples(st.just("slice"), st.one_of(index, st.lists(index, max_size=4).map(tuple))),
    st.tuples(st.just("broadcast_to"), st.lists(st.integers(1, 4), max_size=4).map(tuple)),
    st.tuples(st.just("expand_dims"), axes),
    st.tuples(st.just("squeeze"), st.one_of(st.none(), axes)),
)

OURS: dict[str, Any] = {
    "reshape": ow.reshape,
    "transpose": ow.transpose,
    "swapaxes": lambda x, a: ow.swapaxes(x, *a),
    "slice": slice_op,
    "broadcast_to": ow.broadcast_to,
    "expand_dims": ow.expand_dims,
    "squeeze": ow.squeeze,
}
NUMPYS: dict[str, Any] = {
    "reshape": np.reshape,
    "transpose": np.transpose,
    "swapaxes": lambda x, a: np.swapaxes(x, *a),
    "slice": lambda x, key: x[key],
    "broadcast_to": np.broadcast_to,
    "expand_dims": np.expand_dims,
    "squeeze": np.squeeze,
}


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.lists(steps, min_size=1, max_size=6))
def test_chains_of_views_show_what_numpy_shows(shape, chain):
    array = counting(*shape)
    tensor = ow.constant(array)
    for name, argument in chain:
        if name == "squeeze" and np.ndim(array) == 0:
            continue  # NumPy lets a number have an axis 0 here, and only here
        try:
            shown = NUMPYS[name](array, argument)
        except (ValueError, IndexError):
            with pytest.raises((ow.ShapeError, ow.BoundsError, ow.LayoutError)):
                OURS[name](tensor, argument)
            continue
        if shown.ndim > 8:
            continue
        array, tensor = shown, OURS[name](tensor, argument)
        assert tensor.shape == np.shape(array)
        np.testing.assert_array_equal(value(tensor), array)
        # A view is one window of one root, however long the chain is.
        assert tensor.root.root is tensor.root
        packed = [t.name for t in Graph(tensor).nodes if not t.is_view]
        assert set(packed) <= {"contiguous"}
    np.testing.assert_array_equal(value(ow.contiguous(tensor)), array)


# --- one by one -----------------------------------------------------------------------------------------------------


def test_views_that_show_their_source_are_their_source():
    x = ow.input("x", (2, 1, 3))
    assert x.reshape(2, 1, 3) is x
    assert x.reshape(2, -1, 3) is x
    assert x[:] is x
    assert x[...] is x
    assert x[0:2, :, 0:5] is x
    assert x.transpose(0, 1, 2) is x
    assert x.transpose((0, -2, 2)) is x
    assert x.swapaxes(1, 1) is x
    assert x.T.T is x
    assert x.broadcast_to((2, 1, 3)) is x
    assert x.contiguous() is x
    assert ow.squeeze(x, ()) is x
    assert x[1:].contiguous() is x[1:]


def test_equal_views_are_one_however_they_are_written():
    x = ow.input("x", (6, 4))
    assert x[1:3] is x[1:-3]
    assert x[1:3] is x[1:3, ...]
    assert x[::4] is x[0:5:4]
    assert x[-1] is x[5]
    assert x.T is ow.transpose(x)
    assert x.T is x.swapaxes(0, -1)
    assert ow.flatten(x) is x.reshape(24)


def test_reshape_of_what_strides_cannot_express_packs_first():
    x = ow.constant(counting(3, 4))
    flat = x.T.reshape(12)
    assert [t.name for t in Graph(flat).nodes if not t.is_view] == ["contiguous"]
    assert value(flat).tolist() == counting(3, 4).T.reshape(12).tolist()
    kept = x[:, 1:3].reshape(3, 2, 1)
    assert kept.root is x


def test_flatten_merges_the_named_axes():
    x = ow.input("x", (2, 3, 4, 5))
    assert ow.flatten(x).shape == (120,)
    assert ow.flatten(x, 1).shape == (2, 60)
    assert ow.flatten(x, 1, 2).shape == (2, 12, 5)
    assert ow.flatten(ow.input("n", ())).shape == (1,)
    with pytest.raises(ow.ShapeError, match="flatten: axis 0 lies before axis 2"):
        ow.flatten(x, 2, 0)


def test_split_gives_slices():
    array = counting(6, 4)
    x = ow.constant(array)
    for ours, numpys in (
        (ow.split(x, 3), np.split(array, 3)),
        (ow.split(x, 2, axis=-1), np.split(array, 2, axis=1)),
        (ow.split(x, (1, 2, 3)), np.split(array, [1, 3])),
        (ow.split(x, [4, 0, 0], axis=1), np.split(array, [4, 4], axis=1)),
    ):
        assert len(ours) == len(numpys)
        for a, b in zip(ours, numpys, strict=True):
            assert a.root is x
            np.testing.assert_array_equal(value(a), b)
    wrong: list[Any] = [4, 0, (1, 2), (7, -1), (1.5, 4.5), 1.5, "ab"]
    for sizes in wrong:
        with pytest.raises(ow.ShapeError, match="split: "):
            ow.split(x, sizes)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: x.reshape(5), ow.ShapeError, "reshape: cannot reshape"),
        (lambda x: x.reshape(-1, -1), ow.ShapeError, "one length may be -1"),
        (lambda x: x.reshape("ab"), ow.ShapeError, "tuple of integers"),
        (lambda x: x.reshape((1,) * 7 + (12, 1)), ow.ShapeError, "at most 8"),
        (lambda x: x.transpose(0, 0), ow.ShapeError, "name each axis once"),
        (lambda x: x.transpose(0), ow.ShapeError, "name each axis once"),
        (lambda x: x.transpose(0, 2), ow.BoundsError, "axis 2 is out of range"),
        (lambda x: x.swapaxes(0, 2), ow.BoundsError, "swapaxes: axis 2"),
        (lambda x: x[3], ow.BoundsError, "index 3 is out of range for axis 0 of length 3"),
        (lambda x: x[0, 0, 0], ow.BoundsError, "too many parts"),
        (lambda x: x[..., ...], ow.BoundsError, "too many parts"),
        (lambda x: x[::-1], ow.LayoutError, "negative step"),
        (lambda x: x[::0], ow.LayoutError, "step cannot be zero"),
        (lambda x: x[1.0], ow.LayoutError, "cannot index with float"),
        (lambda x: x[True], ow.LayoutError, "a bool selects by value"),
        (lambda x: x[np.array([0, 1])], ow.LayoutError, r"take rows with embedding\(\)"),
        (lambda x: x[x], ow.LayoutError, "cannot index with Tensor"),
        (lambda x: x.broadcast_to((3, 5)), ow.ShapeError, "does not broadcast"),
        (lambda x: ow.expand_dims(x, 4), ow.BoundsError, "expand_dims: axis 4"),
        (lambda x: ow.expand_dims(x, (0, 0)), ow.ShapeError, "name an axis twice"),
        (lambda x: ow.squeeze(x, 0), ow.ShapeError, "squeeze: axis 0 has length 3"),
    ],
)
def test_what_views_cannot_show_is_refused_with_operand_and_line(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make(ow.input("x", (3, 4)))
    assert "test_movement.py:" in str(caught.value)


# --- quantized ------------------------------------------------------------------------------------------------------


def test_views_of_whole_blocks():
    w = ow.input("w", (4, 3, 64), "q4_0")
    assert w[1:3].shape == (2, 3, 64)
    assert w[..., 32:].shape == (4, 3, 32)
    assert w[..., 32:].offset == 18
    assert w.swapaxes(0, 1).shape == (3, 4, 64)
    assert w.reshape(12, 64).shape == (12, 64)
    assert w.reshape(4, 192).shape == (4, 192)
    assert w.swapaxes(0, 1).contiguous().name == "contiguous"
    assert ow.copy(w).dtype.name == "q4_0"


@pytest.mark.parametrize(
    "cut",
    [
        lambda w: w[:, 16:48],
        lambda w: w[:, ::2],
        lambda w: w[:, 0],
        lambda w: w[:, :40],
        lambda w: w.reshape(8, 16),
        lambda w: w.reshape(-1, 2),
        lambda w: ow.expand_dims(w, -1),
        lambda w: w[..., None],
        lambda w: w.reshape(2, 1, 64).transpose(),
    ],
)
def test_views_that_cut_a_block_are_refused(cut):
    with pytest.raises(ow.LayoutError):
        cut(ow.input("w", (2, 64), "q4_0"))


@pytest.mark.parametrize("shape", [(5, 64), (32, 32), (1, 32)])
def test_the_transpose_of_quantized_blocks_only_serves_matmul(shape):
    w = ow.input("w", shape, "q8_0")
    t = w.T
    assert t.shape == shape[::-1]
    assert t.T is w
    x, v = ow.input("x", (3, shape[1])), ow.input("v", (shape[0], 2))
    assert ow.matmul(x, t) is ow.linear(x, w)
    uses: list[Any] = [
        ow.copy,
        ow.contiguous,
        ow.neg,
        ow.exp,
        ow.sum,
        ow.softmax,
        lambda t: t + 1,
        lambda t: t[:1],
        lambda t: t[:],
        lambda t: t.reshape(-1),
        lambda t: t.broadcast_to((2, *t.shape)),
        lambda t: t.astype("f32"),
        lambda t: t @ v,
        lambda t: ow.linear(x, t),
        lambda t: ow.embedding(t, [0]),
        lambda t: ow.concat([t, t]),
        lambda t: ow.custom(len, t, like=((), "i64")),
        lambda t: ow.expand_dims(t, 0),
    ]
    for use in uses:
        with pytest.raises(ow.LayoutError, match="only serves as the right operand of matmul"):
            use(t)


# --- packing and joining --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_is_numpys(axis):
    arrays = [counting(2, 3, 4), counting(2, 3, 4) + 50, counting(2, 3, 4) - 9]
    got = ow.concat([ow.constant(a) for a in arrays], axis)
    assert got.attrs == {"axis": axis % 3}
    np.testing.assert_array_equal(value(got), np.concatenate(arrays, axis))


def test_concat_promotes_its_operands():
    node = ow.concat([ow.input("a", (2,), "i32"), ow.input("b", (2,), "f16")])
    assert node.dtype.name == "f16"
    assert {s.dtype.name for s in node.srcs} == {"f16"}


def test_concat_drops_empty_operands():
    a, none = ow.input("a", (2, 3)), ow.constant(np.zeros((0, 3), np.float32))
    assert ow.concat([none, a, none]) is a
    assert ow.concat([none, none]) is none
    assert ow.concat([a]) is a
    assert len(ow.concat([a, none, a]).srcs) == 2
    assert ow.concat([a, a[:0]]) is a
    assert ow.concat([a, ow.weights({"w": np.ones((4, 3), np.float32)})["w"][2:2], ow.state("s", (0, 3))]) is a
    assert ow.concat([ow.input("p", (2, 0)), ow.input("q", (3, 0))]).shape == (5, 0)


def test_concat_depends_on_empty_operands_that_need_an_input():
    a, none = ow.input("a", (2, 3)), ow.input("none", (0, 3))
    alone = ow.concat([none, a, none])
    assert (alone.name, alone.root, alone.shape, alone.is_dense) == ("after", a, (2, 3), True)
    assert alone.srcs == (a, none)
    both = ow.concat([a, none, a])
    assert [s.root for s in both.srcs] == [a, a]
    assert ow.Graph(both).leaves == (a, none)
    assert ow.concat([none, none]) is none
    # A constant that depends on an input passes this on.
    later = ow.concat([a, ow.concat([ow.constant(np.ones((2, 3), np.float32)), none])[:0]])
    assert none in ow.Graph(later).leaves


def test_concat_refuses_what_does_not_fit():
    a = ow.input("a", (2, 3))
    with pytest.raises(ow.ShapeError, match=r"agree in all axes but axis 0: .*'a'.*'b'"):
        ow.concat([a, ow.input("b", (2, 4))])
    with pytest.raises(ow.ShapeError, match="agree in all axes"):
        ow.concat([a, ow.input("e", (0, 4))])
    with pytest.raises(ow.ShapeError, match="at least one"):
        ow.concat([])
    with pytest.raises(ow.ShapeError, match="a sequence of tensors"):
        opdef.build("concat", a)
    with pytest.raises(ow.ShapeError, match="concat: takes a sequence of tensors, not 3"):
        ow.concat(3)  # type: ignore[arg-type]
    with pytest.raises(ow.BoundsError, match="concat: axis 2"):
        ow.concat([a, a], 2)
    w = ow.input("w", (2, 32), "q4_0")
    with pytest.raises(ow.DTypeError, match="concat does not take q4_0"):
        ow.concat([w, ow.input("x", (2, 32))])
    with pytest.raises(ow.DTypeError, match="concat does not take q4_0"):
        ow.concat([w, ow.input("x", (2, 32), "q8_0")])
    with pytest.raises(ow.LayoutError, match="concat: the transpose of a quantized matrix"):
        ow.concat([w.T, w.T])


def test_copy_is_a_node_even_of_what_is_packed():
    x = ow.input("x", (3,))
    assert ow.copy(x).name == "copy"
    assert ow.copy(x) is not x
    assert ow.copy(x).root is ow.copy(x)


@pytest.mark.parametrize("dtype", ["f64", "bf16", "i8", "bool"])
def test_packing_keeps_every_dtype(dtype):
    array = counting(3, 4).astype(as_dtype(dtype).numpy)
    got = value(ow.constant(array).T.contiguous())
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array.T)
