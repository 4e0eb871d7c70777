"""Tensors: identity, leaves, where they were built, and what they refuse to be."""

import gc
import pickle
import threading
import time
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.graph.opdef import OpDef, find_op
from opweave.graph.tensor import node

# --- leaves ---------------------------------------------------------------------------------------------------------


def data_of(tensor):
    """The array of a constant."""
    assert tensor.leaf is not None
    return tensor.leaf.data


def test_an_input_is_its_name():
    x = ow.input("x", (2, 3))
    assert ow.input("x", [2, 3], "float32") is x
    assert ow.input("x", (2, 4)) is not x
    assert (x.shape, x.dtype.name, x.ndim, x.size, x.nbytes) == ((2, 3), "f32", 2, 6, 24)
    assert x.leaf is not None
    assert x.leaf.kind == "input"
    assert ow.input("n", 5).shape == (5,)


@pytest.mark.parametrize("name", ["", None, 3])
def test_an_input_needs_a_name(name):
    with pytest.raises(ow.ShapeError, match="an input needs a name"):
        ow.input(name, (2,))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, "f32"), (2, "i64"), (True, "bool"), ([1.0, 2.0], "f32"), ([[1, 2]], "i64"), (np.float64(2), "f64"),
        (np.ones(3), "f64"), (np.ones(3, np.float16), "f16"), (np.uint8(7), "u8"),
    ],
)  # fmt: skip
def test_constants_take_numpys_types_and_python_numbers_f32_and_i64(value, dtype):
    c = ow.constant(value)
    assert c.dtype.name == dtype
    np.testing.assert_array_equal(data_of(c), np.asarray(value))


def test_equal_numbers_are_one_constant_and_arrays_are_copied():
    assert ow.constant(2.0) is ow.constant(2.0)
    assert ow.constant(2.0) is not ow.constant(2)
    array = np.zeros(3, np.float32)
    c = ow.constant(array)
    array[0] = 9
    assert data_of(c).tolist() == [0, 0, 0]
    array.flags.writeable = False
    assert np.shares_memory(data_of(ow.constant(array)), array)


@pytest.mark.parametrize("leaf", [ow.input, ow.state])
def test_shapes_of_leaves_are_an_integer_or_several(leaf):
    for shape in (3, np.int64(3), [3], range(3, 4), np.array([3])):
        assert leaf("x", shape).shape == (3,)
    for wrong in (None, "ab", 2.5, (2, None), {"a": 1}):
        with pytest.raises(ow.ShapeError, match="a shape is a tuple of integers"):
            leaf("x", wrong)


def test_axes_to_swap_are_integers():
    with pytest.raises(ow.ShapeError, match="swapaxes: axes are integers, not 'a' and 1"):
        ow.input("x", (2, 3)).swapaxes("a", 1)  # type: ignore[arg-type]


def test_constants_can_be_given_a_type():
    assert ow.constant([1, 2], "bf16").dtype.name == "bf16"
    assert data_of(ow.constant(np.ones(3), "f32")).dtype == np.float32
    t = ow.constant(1.0)
    assert ow.constant(t) is t
    with pytest.raises(ow.DTypeError):
        ow.constant(["a"])
    with pytest.raises(ow.DTypeError):
        ow.constant([[1], [1, 2]])


# --- identity -------------------------------------------------------------------------------------------------------


def test_equal_nodes_live_once_and_die_with_their_last_reader():
    x = ow.input("x", (3,))
    a = ow.exp(x)
    assert ow.exp(x) is a
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
    assert ow.exp(x).name == "exp"


def test_signatures_are_shared_by_nodes_that_look_alike_to_a_device():
    a = ow.exp(ow.input("a", (3,)))
    b = ow.exp(ow.input("b", (3,)))
    assert a is not b
    assert a.signature is b.signature
    assert a.signature is not ow.exp(ow.input("c", (4,))).signature
    assert ow.scale(a, 2).signature is not ow.scale(a, 3).signature
    assert ow.exp(ow.input("m", (3, 3)).T).signature is not ow.exp(ow.input("m", (3, 3))).signature
    assert ow.input("a", (3,)).signature is None
    assert ow.input("m", (3, 3)).T.signature is None


def test_names_change_nothing_but_messages():
    x = ow.input("x", (3,))
    y = ow.exp(x).named("logits")
    assert y.name == "logits"
    assert ow.exp(x) is y
    assert repr(y) == "<Tensor exp 'logits' f32[3]>"
    assert repr(ow.tanh(x)) == "<Tensor tanh f32[3]>"
    assert repr(x) == "<Tensor input 'x' f32[3]>"


def test_a_leaf_is_fed_and_read_by_its_key_whatever_it_is_named():
    x, n = ow.input("x", (3,)).named("images"), ow.state("n", (3,)).named("sums")
    assert (x.name, x.key, x[1:].key, n.key, ow.exp(x).key) == ("images", "x", "x", "n", "")
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.assign(n, n + x))
        assert program.run(x=[1, 2, 3]).tolist() == [1, 2, 3]
        assert program.submit({"x": [1, 1, 1]}).result().tolist() == [2, 3, 4]
        assert program.read("n").tolist() == [2, 3, 4]
        with pytest.raises(ow.OpweaveError, match="images"):
            program.run(images=[1, 2, 3])
    x.named(""), n.named("")


# --- where it was built ---------------------------------------------------------------------------------------------


def test_sites_name_the_callers_file_and_line():
    x = ow.input("site", (3, 4))
    y = ow.layer_norm(x * 3.25)
    line = test_sites_name_the_callers_file_and_line.__code__.co_firstlineno
    assert x.site == f"{__file__}:{line + 1}"
    assert y.site == f"{__file__}:{line + 2}"
    assert y.srcs[0].site == f"{__file__}:{line + 2}"
    assert y.describe() == f"layer_norm f32[3, 4] (built at {__file__}:{line + 2})"


# --- operators ------------------------------------------------------------------------------------------------------


def test_operators_are_the_functions():
    x, y = ow.input("x", (3, 3)), ow.input("y", (3, 3))
    assert x + y is ow.add(x, y)
    assert x - y is ow.sub(x, y)
    assert x * y is ow.mul(x, y)
    assert x / y is ow.div(x, y)
    assert x @ y is ow.matmul(x, y)
    assert -x is ow.neg(x)
    one: Any = np.ones((3, 3), np.float32)  # Any: NumPy's annotations do not have the operators that defer to tensors
    for result, op, first in (
        (one + x, "add", False), (one - x, "sub", False), (one * x, "mul", False), (one / x, "div", False),
        (one @ x, "matmul", False), (x @ one, "matmul", True),
    ):  # fmt: skip
        assert result.name == op
        assert (result.srcs[0] is x) == first
    assert x.reshape(9) is ow.reshape(x, 9)
    assert x.astype("f16") is ow.cast(x, "f16")
    assert x.broadcast_to((2, 3, 3)) is ow.broadcast_to(x, (2, 3, 3))


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        (bool, "has no truth value; run a program"),
        (lambda t: t and 1, "no truth value"),
        (iter, r"t\[0\], t\[1\]"),
        (list, r"ow\.split"),
        (lambda t: 3 in t, None),
        (len, r"\.shape\[0\]"),
        (np.asarray, "holds no values; run a program"),
        (lambda t: np.add(np.ones(3), t), None),
        (float, "holds no number"),
    ],
)
def test_what_looks_like_values_raises_with_a_hint(use, hint):
    with pytest.raises(TypeError, match=hint) as caught:
        use(ow.input("x", (3,)))
    if hint is not None:
        assert isinstance(caught.value, ow.DTypeError)


def test_comparison_is_by_identity():
    x, y = ow.input("x", (3,)), ow.input("y", (3,))
    assert x == x
    assert x != y
    assert len({x, y, ow.input("x", (3,))}) == 2


def test_tensors_are_not_made_by_hand():
    with pytest.raises(TypeError, match=r"tensors are built by ow\.input"):
        ow.Tensor()


# --- definitions ----------------------------------------------------------------------------------------------------


def test_definitions_are_found_by_name_and_pickled_by_it():
    assert find_op("add").name == "add"
    assert pickle.loads(pickle.dumps(find_op("softmax"))) is find_op("softmax")
    with pytest.raises(ow.UnknownNameError, match=r"no operation named 'sofmax'; did you mean .*'softmax'"):
        find_op("sofmax")
    with pytest.raises(ValueError, match="'add' is already defined by elementwise"):
        ow.define_op(OpDef("add", infer=lambda x: (x.shape, x.dtype), reference=lambda x: x))


def test_third_parties_make_nodes_with_their_own_definitions():
    double = OpDef("test_double", infer=lambda x: (x.shape, x.dtype), reference=lambda x: 2 * x)
    x = ow.input("x", (3,))
    t = node(double, (x,), {})
    assert (t.op, t.shape, t.name) == (double, (3,), "test_double")
    assert double.family == "third-party"


def test_views_of_a_view_share_its_root_and_memory():
    state = ow.state("s", (4, 4))
    part = state[1:3].T[1]
    assert part.root is state
    assert part.memory is state
    assert part.offset == 16 + 4
    after = ow.assign(state[0], 1.0)
    assert after.root is after
    assert after.memory is state
    assert after[2].memory is state
    assert after[2].root is after


def test_equal_nodes_built_in_two_threads_are_one():
    def slow(x):
        time.sleep(0.02)  # long enough for the other thread to come along
        return x.shape, x.dtype

    op = OpDef("test_slow", infer=slow, reference=lambda x: x)
    x = ow.input("x", (3,))
    made = []
    threads = [threading.Thread(target=lambda: made.append(node(op, (x,), {}))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert made[0] is made[1]


def test_fractions_never_become_integers_silently():
    with pytest.raises(ow.DTypeError, match="fractions"):
        ow.constant([1.5, 2.0], "i32")
    values = ow.constant([1.0, 2.0], "i32")
    assert values.dtype.name == "i32"


@pytest.mark.parametrize(
    ("value", "dtype", "says"),
    [
        (300, "u8", r"300 does not fit into u8, which holds 0 \.\. 255"),
        ([0, -1], "u8", "-1 does not fit into u8"),
        (
            np.array([1, 1 << 40]),
            "i32",
            r"1099511627776 does not fit into i32, which holds -2147483648 \.\. 2147483647",
        ),
        ([float(1 << 31)], "i32", "2147483648.0 does not fit into i32"),
        ([float(1 << 63)], "i64", "does not fit into i64"),
        (np.array([1 << 63], np.uint64), "i64", "9223372036854775808 does not fit into i64"),
        (1 << 70, "i64", "1180591620717411303424 does not fit into i64"),
        ([1.0, float("nan")], "i16", "nan does not fit into i16"),
        ([float("-inf")], "i64", "-inf does not fit into i64"),
        ([0, 2], "bool", r"2 does not fit into bool, which holds 0 \.\. 1"),
        (np.array([1, 2], np.float32), "i32", "an array of float32 does not become i32 silently"),
        (np.ones(2, ml_dtypes.bfloat16), "i32", "an array of bfloat16 does not become i32 silently"),
        (np.ones(2, np.complex64), "f32", "complex64"),
        ("1.5", "f32", "no dtype for"),
        ([None], "f32", "no dtype for"),
        ([None], "i32", "no dtype for"),
        (10**400, "f32", "cannot make f32"),
    ],
)
def test_values_that_a_dtype_does_not_hold_are_refused(value, dtype, says):
    with pytest.raises(ow.DTypeError, match=says):
        ow.constant(value, dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [
        ([255, 0], "u8", [255, 0]),
        ([-128.0, 127.0], "i8", [-128, 127]),
        ([True, 0, 1.0], "bool", [True, False, True]),
        (np.array([7], np.uint32), "i64", [7]),
        ([-(1 << 63), (1 << 63) - 1], "i64", [-(1 << 63), (1 << 63) - 1]),
        ([], "u8", []),
        ([1e30, -1e30, 1 / 3], "f16", [float("inf"), float("-inf"), 0.333251953125]),
        (1 << 70, "f32", 2.0**70),
        ([1 << 70, -(1 << 70)], "bf16", [2.0**70, -(2.0**70)]),
        ([True, False], "i64", [1, 0]),
        (np.array([True]), "i8", [1]),
        ([1e308, -1e308], None, [float("inf"), float("-inf")]),
    ],
)
def test_values_that_a_dtype_holds_are_converted(value, dtype, held):
    assert ow.read(ow.constant(value, dtype)).tolist() == held


# --- attributes as keys ---------------------------------------------------------------------------------------------


KEYED = OpDef("keyed", infer=lambda x, *, a: (x.shape, x.dtype), reference=lambda x, *, a: x)
DIFFERENT = [
    0, 0.0, -0.0, False, 1, 1.0, True, float("nan"), "0.0", "nan", None, (), (0,), (0.0,), (-0.0,), (False,), ((1,),),
    ((True,),), ((1.0,),), np.float32(0), np.float64(1),
]  # fmt: skip


def test_attributes_are_distinguished_by_type_and_sign():
    x = ow.input("x", (3,))
    nodes = [node(KEYED, (x,), {"a": value}) for value in DIFFERENT]
    assert len(set(nodes)) == len(DIFFERENT)
    assert len({n.signature for n in nodes}) == len(DIFFERENT), "devices would remember one verdict for two of them"
    for made, value in zip(nodes, DIFFERENT, strict=True):
        assert node(KEYED, (x,), {"a": value}) is made
        assert type(made.attrs["a"]) is type(value)


def test_scaling_by_zero_keeps_the_sign_of_the_zero():
    x = ow.input("x", (3,))
    up, down = ow.scale(x, 0.0), ow.scale(x, -0.0)
    assert up is not down
    program = ow.compile([up, down])
    for got, negative in zip(program(x=np.ones(3, np.float32)), (False, True), strict=True):
        assert (np.signbit(got) == negative).all()
