"""Operators of the domain com.microsoft, against ONNX Runtime, which defines them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import opweave_onnx
from tests.support.onnx_models import model, node, value, weights_of_8_bits

RNG = np.random.default_rng(0)
F32, I32, I64 = np.float32, np.int32, np.int64


def floats(*shape):
    return (RNG.standard_normal(shape) / 2).astype(F32)


def check(op, feeds, outputs, initializers=None, names=None, **attributes):
    names = names or " ".join([*feeds, *(initializers or {})])
    inputs = [value(name, a.dtype, a.shape) for name, a in feeds.items()]
    proto = model([node(op, names, outputs, domain="com.microsoft", **attributes)], inputs,
                  [name for name in outputs.split() if name != "-"], initializers)  # fmt: skip
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(None, feeds)
    with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
        for got, w in zip(loaded.run(feeds).values(), want, strict=True):
            assert got.dtype == w.dtype
            np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-5)


def test_activations():
    x = {"x": floats(3, 8)}
    check("Gelu", x, "y")
    check("FastGelu", x, "y", {"b": floats(8)})
    check("BiasGelu", x, "y", {"b": floats(8)})
    check("QuickGelu", x, "y", alpha=1.5)


@pytest.mark.parametrize(("ta", "tb", "alpha"), [(0, 0, 1.0), (1, 0, 0.5), (0, 1, 2.0), (1, 1, 1.0)])
def test_fused_products(ta, tb, alpha):
    a, b = floats(*((2, 4, 3) if ta else (2, 3, 4))), floats(*((2, 5, 4) if tb else (2, 4, 5)))
    check("FusedMatMul", {"a": a, "b": b}, "y", transA=ta, transB=tb, alpha=alpha)


@pytest.mark.parametrize(("ta", "tb"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(("ba", "bb"), [(1, 0), (0, 1), (1, 1)])
def test_fused_products_of_batches_that_come_second(ta, tb, ba, bb):
    a, b = floats(2, 6, *((4, 3) if ta else (3, 4))), floats(2, 6, *((5, 4) if tb else (4, 5)))
    feeds = {"a": np.moveaxis(a, -2, 0).copy() if ba else a, "b": np.moveaxis(b, -2, 0).copy() if bb else b}
    check("FusedMatMul", feeds, "y", transA=ta, transB=tb, transBatchA=ba, transBatchB=bb)


def test_normalization_of_sums():
    feeds = {"x": floats(2, 3, 8), "skip": floats(2, 3, 8)}
    weights = {"gamma": floats(8), "beta": floats(8), "bias": floats(8)}
    check("SkipLayerNormalization", feeds, "y - - total", weights, epsilon=1e-5)
    check("SkipLayerNormalization", feeds, "y", {"gamma": weights["gamma"]}, epsilon=1e-5)
    check("SkipSimplifiedLayerNormalization", feeds, "y", {"gamma": weights["gamma"]}, epsilon=1e-5)
    ids = {"ids": RNG.integers(0, 9, (2, 4)).astype(I32), "kinds": RNG.integers(0, 2, (2, 4)).astype(I32)}
    tables = {
        "words": floats(9, 8),
        "places": floats(6, 8),
        "kind": floats(2, 8),
        "gamma": floats(8),
        "beta": floats(8),
    }
    mask = {"mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]], I32)}
    check("EmbedLayerNormalization", {**ids, **mask}, "y counts", tables,
          "ids kinds words places kind gamma beta mask", epsilon=1e-5)  # fmt: skip


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_attention_with_packed_weights(unidirectional):
    weights = {"w": floats(8, 24), "b": floats(24)}
    check("Attention", {"x": floats(2, 5, 8)}, "y", weights, num_heads=2, unidirectional=unidirectional)
    mask = {"mask": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], I32)}
    check("Attention", {"x": floats(2, 5, 8), **mask}, "y", weights, "x w b mask", num_heads=2)
    check("Attention", {"x": floats(2, 5, 8), "n": np.array([3, 5], I32)}, "y", weights, "x w b n", num_heads=2)
    past = {"past": floats(2, 2, 2, 3, 4)}
    check("Attention", {"x": floats(2, 5, 8), **past}, "y present", weights, "x w b - past", num_heads=2,
          unidirectional=1)  # fmt: skip


def test_attention_of_several_heads():
    feeds = {name: floats(2, n, 8) for name, n in (("q", 3), ("k", 5), ("v", 5))}
    check("MultiHeadAttention", feeds, "y", num_heads=2)
    check("MultiHeadAttention", feeds, "y", {"b": floats(24)}, num_heads=2, scale=0.3)
    check("MultiHeadAttention", {**feeds, "extra": floats(1, 2, 3, 5)}, "y", None, "q k v - - extra", num_heads=2)


@pytest.mark.parametrize(("tokens", "before", "rotary"), [(5, 0, 0), (5, 0, 1), (1, 4, 0), (1, 4, 1)])
def test_attention_of_groups_with_a_cache(tokens, before, rotary):
    feeds = {"q": floats(1, tokens, 64), "k": floats(1, tokens, 32), "v": floats(1, tokens, 32),
             "past_k": floats(1, 2, before, 16), "past_v": floats(1, 2, before, 16),
             "n": np.array([before + tokens - 1], I32), "total": np.array(before + tokens, I32)}  # fmt: skip
    angles = np.outer(np.arange(16), 0.5 ** np.arange(8)).astype(F32)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)} if rotary else {}
    names = "q k v past_k past_v n total" + (" cos sin" if rotary else "")
    check("GroupQueryAttention", feeds, "y present_k present_v", tables, names, num_heads=4, kv_num_heads=2,
          do_rotary=rotary)  # fmt: skip


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved):
    angles = np.outer(np.arange(16), 0.5 ** np.arange(4)).astype(F32)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    places = {"places": np.array([[3, 4, 5], [7, 8, 9]])}
    check("RotaryEmbedding", {"x": floats(2, 2, 3, 8), **places}, "y", tables, interleaved=interleaved)
    check("RotaryEmbedding", {"x": floats(2, 3, 16), **places}, "y", tables, interleaved=interleaved)
    check("RotaryEmbedding", {"x": floats(2, 2, 3, 8), "places": np.array([3])}, "y", tables, interleaved=interleaved)


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (8, True)])
@pytest.mark.parametrize("k", [64, 80])
def test_weights_of_few_bits(bits, zeros, k):
    n, block = 6, 32
    blocks = -(-k // block)
    weights = {"w": RNG.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8), "s": floats(n * blocks)}
    if zeros:
        weights["z"] = RNG.integers(0, 256, n * (-(-blocks * bits // 8))).astype(np.uint8)
    check("MatMulNBits", {"x": floats(3, k)}, "y", weights, N=n, K=k, bits=bits, block_size=block)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("each", [False, True], ids=["one scale", "a scale for each gate"])
def test_lstm_with_weights_of_8_bits(dtype, each):
    count, size, hidden = 2, 6, 5
    scales = (count, 4 * hidden) if each else (count,)
    # Zero points of more than one scale are those of a symmetric quantization.
    zero = np.full(scales, 0 if dtype is np.int8 else 128, dtype)
    weights = {
        "w": weights_of_8_bits(RNG, dtype, (count, size, 4 * hidden)),
        "r": weights_of_8_bits(RNG, dtype, (count, hidden, 4 * hidden)),
        "b": floats(count, 8 * hidden),
        "ws": RNG.uniform(0.002, 0.004, scales).astype(F32), "wz": zero,
        "rs": RNG.uniform(0.002, 0.004, scales).astype(F32), "rz": zero,
    }  # fmt: skip
    for steps in (4, 70):  # a part of the graph, and a program that is run again
        check("DynamicQuantizeLSTM", {"x": floats(steps, 1, size)}, "y yh yc", weights,
              "x w r b - - - - ws wz rs rz", hidden_size=hidden, direction="bidirectional")  # fmt: skip


@pytest.mark.parametrize("scales", [(), (1,), (3,)])
def test_products_with_weights_of_8_bits(scales):
    w = {"w": RNG.integers(0, 256, (4, 3), np.uint8, endpoint=False)}
    by = {"ws": RNG.uniform(0.01, 0.02, scales).astype(F32), "wz": np.full(scales, 131, np.uint8), "b": floats(3)}
    check("DynamicQuantizeMatMul", {"x": floats(2, 5, 4)}, "y", w | by)
    check("DynamicQuantizeMatMul", {"x": np.zeros((2, 4), F32)}, "y", w | {"ws": by["ws"]})
    x = {"x": RNG.integers(0, 256, (5, 4), np.uint8, endpoint=False)}
    whole = w | by | {"xs": np.array(0.03, F32), "xz": np.array(7, np.uint8)}
    check("MatMulIntegerToFloat", x, "y", whole, "x w xs ws xz wz b")
    check("MatMulIntegerToFloat", x, "y", whole, "x w xs ws")
