"""Products of matrices against NumPy and torch."""

import gguf
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.dtypes import DTYPES
from opweave.graph.graph import Graph
from opweave.graph.opdef import OPS
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(3)


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape):
    return RNG.standard_normal(shape)


SHAPES = [
    ((3,), (3,)), ((3,), (3, 4)), ((4, 3), (3,)), ((2, 3), (3, 4)), ((2, 4, 3), (3, 5)), ((4, 3), (2, 3, 5)),
    ((2, 4, 3), (2, 3, 5)), ((2, 1, 4, 3), (6, 3, 5)), ((3,), (2, 3, 4)), ((2, 4, 3), (3,)), ((1, 4, 3), (2, 3, 5)),
    ((2, 0), (0, 3)), ((0, 3), (3, 2)), ((2, 3), (3, 0)), ((2, 4, 0), (0, 5)), ((0,), (0,)), ((0,), (0, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_matmul_is_numpys(a, b):
    x, y = floats(*a), floats(*b)
    got = value(ow.constant(x) @ ow.constant(y))
    want = np.matmul(x, y)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_matmul_of_strided_operands():
    x, y = floats(5, 4, 3), floats(5, 3, 6)
    a, b = ow.constant(x.transpose(0, 2, 1).copy()).swapaxes(1, 2), ow.constant(y)[:, :, ::2]
    np.testing.assert_allclose(value(a @ b), x @ y[:, :, ::2], rtol=1e-12)


def test_nodes_have_equal_leading_axes():
    for a, b in SHAPES:
        nodes = [t for t in Graph(ow.matmul(ow.input("a", a), ow.input("b", b))).nodes if not t.is_view]
        assert [t.name for t in nodes] == ["matmul"]
        x, y = nodes[0].srcs
        assert x.ndim >= 2
        assert x.shape[:-2] == y.shape[:-2]


def test_many_rows_by_one_matrix_are_one_product():
    node = ow.matmul(ow.input("a", (7, 4, 3)), ow.input("b", (3, 5))).root
    assert node.shape == (28, 5)
    assert [s.shape for s in node.srcs] == [(28, 3), (3, 5)]


def test_matmul_by_a_transposed_matrix_is_linear():
    x, w = floats(4, 3), floats(5, 3)
    a, b = ow.constant(x), ow.constant(w)
    assert ow.matmul(a, b.T) is ow.linear(a, b)
    assert a @ b.swapaxes(0, 1) is ow.linear(a, b)
    np.testing.assert_allclose(value(a @ b.T), x @ w.T, rtol=1e-12)
    # Only where the untransposed matrix is packed, and not for stacks of them.
    assert ow.matmul(a[:, :2], b[:, :2].T).name == "matmul"
    stack = ow.input("stack", (2, 5, 3)).swapaxes(1, 2)
    assert ow.matmul(ow.input("m", (2, 4, 3)), stack).name == "matmul"


def test_integers_multiply_exactly_and_wrap():
    x = RNG.integers(-100, 100, (3, 4)).astype(np.int8)
    y = RNG.integers(-100, 100, (4, 2)).astype(np.int8)
    got = value(ow.constant(x) @ ow.constant(y))
    assert got.dtype == np.int8
    np.testing.assert_array_equal(got, x @ y)
    big = np.array([[2**60, 1]])
    assert value(ow.constant(big) @ ow.constant(np.array([[3], [5]]))).item() == 3 * 2**60 + 5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (0, 3), (2, 2, 2, 3)])
def test_linear_is_torchs(shape, bias):
    x, w, b = floats(*shape), floats(5, 3), floats(5) if bias else None
    got = value(ow.linear(ow.constant(x), ow.constant(w), None if b is None else ow.constant(b)))
    want = torch.nn.functional.linear(*(None if v is None else torch.from_numpy(v) for v in (x, w, b)))
    assert got.shape == tuple(want.shape)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)


def test_operands_are_promoted():
    x, w, b = ow.input("x", (4, 3), "f16"), ow.input("w", (5, 3), "bf16"), ow.input("b", (5,), "f32")
    assert ow.linear(x, w).dtype.name == "f32"
    assert {s.dtype.name for s in ow.linear(x, w, b).srcs} == {"f32"}
    assert ow.matmul(x, ow.input("v", (3, 2), "f32")).dtype.name == "f32"


def test_cost_is_two_for_each_product():
    assert OPS["matmul"].flops(ow.matmul(ow.input("a", (4, 3)), ow.input("b", (3, 5)))) == 120
    assert OPS["linear"].flops(ow.linear(ow.input("a", (4, 3)), ow.input("w", (5, 3)))) == 120


# --- quantized weights ----------------------------------------------------------------------------------------------

QUANTIZED = [t for t in DTYPES.values() if t.is_quantized]


def blocks(dtype, rows, count):
    """Random valid rows of ``count`` blocks, and their values by the gguf package."""
    kind = getattr(gguf.GGMLQuantizationType, dtype.name.upper())
    try:
        data = gguf.quants.quantize(RNG.standard_normal((rows, count * dtype.block)).astype(np.float32), kind)
    except NotImplementedError:
        data = RNG.integers(0, 64, (rows, count * dtype.itemsize), np.uint8)  # no f16 of small bytes is infinite
    return data, gguf.quants.dequantize(data, kind)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
def test_linear_multiplies_by_the_decoded_weights(dtype):
    data, values = blocks(dtype, 6, 2)
    x, b = floats(3, 2 * dtype.block).astype(np.float32), floats(6).astype(np.float32)
    node = ow.linear(ow.input("x", x.shape), ow.input("w", values.shape, dtype), ow.input("b", b.shape))
    assert node.dtype.name == "f32"
    assert node.attrs == {"blocks": dtype}
    got = OPS["linear"].reference(x, data, b, **node.attrs)
    np.testing.assert_allclose(got, x.astype(np.float64) @ values.astype(np.float64).T + b, rtol=1e-9, atol=1e-9)


def test_a_quantized_weight_leaves_the_type_of_x():
    w = ow.input("w", (5, 32), "q4_0")
    assert ow.linear(ow.input("h", (3, 32), "f16"), w).dtype.name == "f16"
    assert ow.linear(ow.input("i", (3, 32), "i8"), w).dtype.name == "f32"
    mixed = ow.linear(ow.input("h", (3, 32), "f16"), w, ow.input("b", (5,)))
    assert mixed.srcs[2].dtype.name == "f16"


@pytest.mark.parametrize("shape", [(5, 32), (32, 32), (1, 32)])
def test_matmul_by_a_transposed_quantized_matrix_is_linear(shape):
    w = ow.input("w", shape, "q4_0")
    x = ow.input("x", (3, 32))
    assert x @ w.T is ow.linear(x, w)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ow.input("a", (2, 3)) @ ow.input("b", (2, 3)), ow.ShapeError, "second last axis of the right one"),
        (lambda: ow.input("a", (2, 3)) @ ow.input("b", (2,)), ow.ShapeError, "only axis of the right one"),
        (lambda: ow.input("a", (2, 3)) @ 2.0, ow.ShapeError, "multiply with \\*"),
        (lambda: ow.input("a", (2, 4, 3)) @ ow.input("b", (3, 3, 5)), ow.ShapeError, "leading axes"),
        (lambda: ow.input("a", (2, 3), "bool") @ ow.input("b", (3, 2), "bool"), ow.DTypeError, "no arithmetic"),
        (lambda: ow.input("a", (2, 32)) @ ow.input("w", (32, 32), "q4_0"), ow.DTypeError, "linear"),
        (lambda: ow.input("w", (2, 32), "q4_0") @ ow.input("a", (32, 2)), ow.DTypeError, "does not take q4_0"),
        (lambda: ow.linear(ow.input("a", (2, 3)), ow.input("w", (3, 2))), ow.ShapeError, r"w \(out, in\)"),
        (lambda: ow.linear(ow.input("a", (2, 3)), ow.input("w", (3,))), ow.ShapeError, r"w \(out, in\)"),
        (lambda: ow.linear(ow.input("a", (2, 3)), ow.input("w", (4, 2, 5))), ow.ShapeError, r"w \(\.\.\., out, in\)"),
        (lambda: ow.linear(ow.input("a", (3, 2, 5)), ow.input("w", (4, 2, 5))), ow.ShapeError, "leading axes"),
        (
            lambda: ow.linear(ow.input("a", (2, 5)), ow.input("w", (4, 2, 5)), ow.input("b", (4, 2))),
            ow.ShapeError,
            r"b \(out,\)",
        ),
        (lambda: ow.linear(ow.input("a", (2, 3)), ow.input("w", (4, 3)), ow.input("b", (3,))), ow.ShapeError, "bias"),
        (lambda: ow.linear(1.0, ow.input("w", (4, 3))), ow.ShapeError, r"x \(\.\.\., in\)"),
    ],
)
def test_what_does_not_multiply(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "test_matmul.py:" in str(caught.value)


BATCHES = [
    ((64,), (3, 5, 64)), ((2, 64), (3, 5, 64)), ((3, 2, 64), (3, 5, 64)), ((4, 3, 2, 64), (3, 5, 64)),
    ((2, 64), (4, 3, 5, 64)), ((4, 1, 2, 64), (1, 3, 5, 64)), ((1, 64), (1, 5, 64)), ((3, 0, 64), (3, 5, 64)),
    ((2, 64), (0, 5, 64)), ((0, 2, 64), (1, 5, 64)),
]  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("x", "w"), BATCHES, ids=str)
@pytest.mark.parametrize("dtype", [None, "q8_0", "q4_0"])
def test_linear_with_a_batch_of_matrices_is_numpys_matmul(dtype, x, w, biased):
    rows, matrices, bias = floats(*x), floats(*w), floats(w[-2])
    blocks = None if dtype is None else ow.quantize(matrices, dtype)
    if blocks is not None:
        matrices = ow.dequantize(blocks)
    (leaf,) = ow.weights({"w": matrices if blocks is None else blocks}).values()
    got = value(ow.linear(ow.constant(rows), leaf, bias if biased else None))
    want = np.matmul(rows, np.swapaxes(matrices, -1, -2).astype(np.float64)) + (bias if biased else 0)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_types_of_a_linear_with_a_batch_of_quantized_matrices():
    w = ow.input("w", (3, 5, 32), "q8_0")
    for dtype, result in [("f64", "f64"), ("f16", "f16"), ("i32", "f32")]:
        assert ow.linear(ow.input("x", (2, 32), dtype), w, ow.input("b", (5,))).dtype.name == result
    with pytest.raises(ow.DTypeError, match="linear does not take q8_0"):
        ow.linear(w, w)
    nodes = [t for t in Graph(ow.linear(ow.input("x", (3, 2, 32)), w)).nodes if not t.is_view]
    assert [t.name for t in nodes] == ["expert_linear"], "and no copy of rows or weights"


def test_outer_is_torchs():
    a, b = floats(3), floats(5)
    got = ow.outer(ow.constant(a), ow.constant(b))
    np.testing.assert_array_equal(value(got), torch.outer(torch.from_numpy(a), torch.from_numpy(b)).numpy())
    assert [t.name for t in Graph(got).nodes if not t.is_view] == ["mul"]
    assert ow.outer(ow.input("i", (2,), "i8"), ow.input("h", (3,), "f16")).dtype.name == "f16"


def test_outer_refuses_what_is_no_vector():
    with pytest.raises(ow.ShapeError, match="outer: needs two vectors"):
        ow.outer(ow.input("a", (3, 1)), ow.input("b", (3,)))
    with pytest.raises(ow.DTypeError, match="outer does not take q4_0"):
        ow.outer(ow.input("a", (32,), "q4_0"), ow.input("b", (3,)))
    with pytest.raises(ow.DTypeError, match="bool has no arithmetic"):
        ow.outer(ow.input("a", (3,), "bool"), ow.input("b", (3,), "bool"))
