"""Mixtures of experts against products done one by one."""

import gguf
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.graph import Graph
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(23)


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape):
    return RNG.standard_normal(shape)


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("each", [False, True])
def test_expert_linear_is_linear_with_the_weights_of_the_expert(each, index):
    tokens, used, experts, outputs, inputs = 6, 3, 4, 5, 7
    w, ids = floats(experts, outputs, inputs), RNG.integers(0, experts, (tokens, used)).astype(index)
    x = floats(tokens, used, inputs) if each else floats(tokens, inputs)
    got = value(ow.expert_linear(ow.constant(x), ow.constant(w), ow.constant(ids)))
    rows = torch.from_numpy(x if each else np.repeat(x[:, None], used, 1))
    want = torch.einsum("tui,tuoi->tuo", rows, torch.from_numpy(w)[torch.from_numpy(ids.astype(np.int64))])
    assert got.shape == (tokens, used, outputs)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_expert_linear_of_blocks(name):
    w, ids = floats(3, 5, 64).astype(np.float32), np.array([[0, 2], [2, 1]])
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quantize(w, kind)
    x = floats(2, 64).astype(np.float32)
    leaf = ow.input("w", (3, 5, 64), name.lower())
    got = ow.expert_linear(ow.constant(x), leaf, ow.constant(ids))
    assert got.attrs["blocks"].name == name.lower()
    assert got.dtype.name == "f32"
    weights = gguf.dequantize(raw, kind)
    want = np.einsum("ti,tuoi->tuo", x.astype(np.float64), weights[ids].astype(np.float64))
    np.testing.assert_allclose(evaluate(got, {leaf: raw}), want, rtol=1e-5, atol=1e-5)


def test_expert_linear_nodes_share_a_tokens_row():
    x, w, ids = ow.input("x", (6, 7), "f16"), ow.input("w", (4, 5, 7)), ow.input("ids", (6, 3), "i32")
    node = ow.expert_linear(x, w, ids)
    assert node.dtype.name == "f32"
    assert node.srcs[0].shape == (6, 1, 7)
    assert [t.name for t in Graph(node).nodes if not t.is_view] == ["cast", "expert_linear"]


def test_expert_linear_refuses():
    x, w, ids = ow.input("x", (6, 7)), ow.input("w", (4, 5, 7)), ow.input("ids", (6, 3), "i32")
    with pytest.raises(ow.DTypeError, match="ids of experts are i32 or i64"):
        ow.expert_linear(x, w, x)
    for a, b, c in (
        (ow.input("x", (6, 8)), w, ids),
        (ow.input("x", (5, 7)), w, ids),
        (ow.input("x", (6, 2, 7)), w, ids),
        (x, ow.input("w", (5, 7)), ids),
        (x, w, ow.input("ids", (6,), "i32")),
        (ow.input("x", (7,)), w, ids),
    ):
        with pytest.raises(ow.ShapeError, match="expert_linear: needs x"):
            ow.expert_linear(a, b, c)
    with pytest.raises(ow.DTypeError, match="does not take q8_0"):
        ow.expert_linear(ow.input("x", (6, 32), "q8_0"), ow.input("w", (4, 5, 32)), ids)
    with pytest.raises(ow.DTypeError, match="bool has no arithmetic"):
        ow.expert_linear(ow.input("x", (6, 7), "bool"), ow.input("w", (4, 5, 7), "bool"), ids)


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_expert_that_does_not_exist(bad):
    ids = ow.constant(np.array([[0, bad]]))
    with pytest.raises(ow.BoundsError, match=f"expert_linear: index {bad} .number 1. is outside of 0 .. 3"):
        value(ow.expert_linear(ow.constant(floats(1, 7)), ow.constant(floats(4, 5, 7)), ids))
    with pytest.raises(ow.BoundsError, match=f"add_expert: index {bad} .number 1. is outside of 0 .. 3"):
        value(ow.add_expert(ow.constant(floats(1, 2, 7)), ow.constant(floats(4, 7)), ids))


@pytest.mark.parametrize("lead", [(), (6,), (6, 3)])
def test_add_expert_adds_the_row_that_the_id_names(lead):
    x, table, ids = floats(*lead, 5), floats(4, 5), RNG.integers(0, 4, lead)
    got = value(ow.add_expert(ow.constant(x), ow.constant(table), ow.constant(ids)))
    want = torch.from_numpy(x) + torch.nn.functional.embedding(torch.as_tensor(ids), torch.from_numpy(table))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-13)


def test_add_expert_promotes_and_refuses():
    x, table, ids = ow.input("x", (6, 3, 5), "f16"), ow.input("b", (4, 5)), ow.input("ids", (6, 3), "i64")
    assert ow.add_expert(x, table, ids).dtype.name == "f32"
    with pytest.raises(ow.ShapeError, match="add_expert: needs x"):
        ow.add_expert(x, ow.input("b", (4, 6)), ids)
    with pytest.raises(ow.ShapeError, match="add_expert: needs x"):
        ow.add_expert(x, table, ow.input("ids", (6,), "i32"))
    with pytest.raises(ow.DTypeError, match="ids of experts"):
        ow.add_expert(x, table, x)
