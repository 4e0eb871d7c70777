"""Operators of the domain com.microsoft between quantized values, and fused ones, against ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

import opweave_onnx
from tests.support.onnx_models import model, node, value, weights_of_8_bits

F32, I32 = np.float32, np.int32
PLACEMENTS = [["cpu"], ["opencl:0", "host"]]
TYPES = pytest.mark.parametrize("dtype", [np.uint8, np.int8])
RNG = np.random.default_rng(5)


def integers(dtype, *shape):
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def floats(*shape):
    return (RNG.standard_normal(shape) / 2).astype(F32)


def scale(number):
    return np.array(number, F32)


def end(dtype, which):
    """A zero point: the least, the middle or the largest number of the type."""
    limits = np.iinfo(dtype)
    return np.array({"low": limits.min, "middle": limits.min + 128, "high": limits.max}[which], dtype)


def check(op, feeds, names, known, *, quanta=0, **attributes):
    """On two devices, the same integers as ONNX Runtime, or ones that differ by ``quanta`` at most; equal floats up to
    rounding."""
    inputs = [value(name, a.dtype, a.shape) for name, a in feeds.items()]
    outputs = attributes.pop("outputs", "out")
    proto = model([node(op, names, outputs, domain="com.microsoft", **attributes)], inputs, outputs.split(), known)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(None, feeds)
    for placement in PLACEMENTS:
        with opweave_onnx.load(proto, placement) as loaded:
            found = loaded.run(feeds)
            for got, w in zip(found.values(), want, strict=True):
                assert (got.dtype, got.shape) == (w.dtype, w.shape)
                if w.dtype.kind in "iu":
                    np.testing.assert_array_less(np.abs(got.astype(int) - w.astype(int)), quanta + 1)
                else:
                    np.testing.assert_allclose(got, w, rtol=1e-5, atol=1e-5)


def quantized_as(dtype, zero="middle", zero_out="middle", result=0.02, given=0.02):
    """Scales and zero points of a value and of a result."""
    return {"xs": scale(given), "xz": end(dtype, zero), "ys": scale(result), "yz": end(dtype, zero_out)}


# --- element by element ---------------------------------------------------------------------------------------------


@TYPES
@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize(("zero", "zero_out"), [("low", "high"), ("middle", "low"), ("high", "middle")])
def test_sums_and_products(dtype, op, zero, zero_out):
    known = {"as": scale(0.013), "az": end(dtype, zero), "bs": scale(0.031), "bz": end(dtype, "middle"),
             "cs": scale(0.027), "cz": end(dtype, zero_out)}  # fmt: skip
    # ONNX Runtime multiplies by the ratios of the scales, rounded to f32, so that halves can round otherwise.
    for a, b in [((3, 5, 7), (3, 5, 7)), ((1, 33), (33,)), ((2, 1, 3), (4, 1)), ((0, 3), (0, 3)), ((1,), (1,))]:
        feeds = {"a": integers(dtype, *a), "b": integers(dtype, *b)}
        check(op, feeds, "a as az b bs bz cs cz", known, quanta=1)


@TYPES
@pytest.mark.parametrize("zero", ["low", "middle", "high"])
@pytest.mark.parametrize(("op", "attributes"), [("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.2})])
def test_functions_of_every_number(dtype, zero, op, attributes):
    every = np.arange(256, dtype=np.uint8).view(dtype)
    sigmoid = op == "QLinearSigmoid"
    known = quantized_as(dtype, zero, "low" if sigmoid else "middle", 1 / 256 if sigmoid else 0.07, 0.04)
    for x in (every.reshape(2, 128), every[:1], every[:0]):
        check(op, {"x": x}, "x xs xz ys yz", known, quanta=1, **attributes)
    check(op, {"x": every}, "x xs - ys -", {n: known[n] for n in ("xs", "ys")}, quanta=1, **attributes)


@TYPES
@pytest.mark.parametrize(("axis", "opset"), [(-1, 13), (1, 13), (1, 12), (2, 11)])
def test_softmax(dtype, axis, opset):
    known = quantized_as(dtype, "high", "low", 1 / 256)
    for shape in [(2, 3, 17), (1, 5, 2)]:
        x = {"x": integers(dtype, *shape)}
        check("QLinearSoftmax", x, "x xs xz ys yz", known, quanta=1, axis=axis, opset=opset)


def test_a_softmax_of_one_element_is_the_largest_number():
    # 1 is 256 quanta, which ONNX Runtime converts to a byte as 0.
    known = quantized_as(np.uint8, "middle", "low", 1 / 256)
    proto = model([node("QLinearSoftmax", "x xs xz ys yz", "y", domain="com.microsoft", opset=13)],
                  [value("x", np.uint8, (2, 1))], ["y"], known)  # fmt: skip
    with opweave_onnx.load(proto, ["cpu"]) as loaded:
        np.testing.assert_array_equal(loaded(x=np.array([[7], [200]], np.uint8)), [[255], [255]])


@TYPES
def test_choices(dtype):
    known = {"xs": scale(0.02), "xz": end(dtype, "low"), "ys": scale(0.05), "yz": end(dtype, "high"),
             "zs": scale(0.03), "zz": end(dtype, "middle")}  # fmt: skip
    for shape in [(3, 11), (1, 1), (0, 4)]:
        feeds = {"c": RNG.random(shape) < 0.5, "x": integers(dtype, *shape), "y": integers(dtype, *shape)}
        check("QLinearWhere", feeds, "c x xs xz y ys yz zs zz", known, quanta=1)


@TYPES
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_joining(dtype, axis):
    known = {"ys": scale(0.04), "yz": end(dtype, "low")}
    feeds, names = {}, "ys yz"
    for i, n in enumerate((1, 4, 2)):
        shape = [2, 3, 5]
        shape[axis] = n
        feeds[f"x{i}"] = integers(dtype, *shape)
        known |= {f"s{i}": scale(0.01 * (i + 2)), f"z{i}": end(dtype, ("low", "middle", "high")[i])}
        names += f" x{i} s{i} z{i}"
    check("QLinearConcat", feeds, names, known, quanta=1, axis=axis)


@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [F32, np.float16])
def test_rows_of_quantized_tables(bits, dtype, with_zeros):
    rows, length, block = 7, 48, 32
    packed = 8 // bits
    known = {
        "table": integers(np.uint8, rows, length // packed),
        "scales": RNG.uniform(0.01, 0.02, (rows, 2)).astype(dtype),
    }
    names = "table ids scales"
    if with_zeros:
        known["zeros"] = integers(np.uint8, rows, 2 // packed)
        names += " zeros"
    for ids in (np.array([[0, 6, -1], [3, 3, 2]]), np.array([5], I32)):
        check("GatherBlockQuantized", {"ids": ids}, names, known, bits=bits, block_size=block, quantize_axis=1)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
def test_rows_of_tables_of_4_bits(kind, axes):
    gathered, along = axes
    table = integers(np.int8, 33, 18, 20).astype(kind)
    shape = [-(-n // 16) if i == along else n for i, n in enumerate(table.shape)]
    known = {"table": table, "scales": RNG.uniform(0.01, 0.02, shape).astype(F32),
             "zeros": RNG.integers(0, 7, shape).astype(kind)}  # fmt: skip
    for names in ("table ids scales", "table ids scales zeros"):
        used = {name: known[name] for name in names.split() if name != "ids"}
        check("GatherBlockQuantized", {"ids": np.array([[4, 0], [17, 9]])}, names, used, gather_axis=gathered,
              quantize_axis=along, block_size=16)  # fmt: skip


# --- pools ----------------------------------------------------------------------------------------------------------


@TYPES
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("zero", ["low", "high"])
def test_means_of_pictures(dtype, last, zero):
    known = quantized_as(dtype, zero, "middle", 0.011)
    for shape in [(2, 3, 5, 7), (1, 1, 1, 1), (1, 9, 33, 31)]:
        check("QLinearGlobalAveragePool", {"x": integers(dtype, *shape)}, "x xs xz ys yz", known, quanta=1,
              channels_last=last)  # fmt: skip


@TYPES
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("more", [{}, {"strides": [2, 2]}, {"pads": [1, 0, 1, 1], "count_include_pad": 1},
                                  {"pads": [1, 1, 1, 1]}, {"strides": [2, 1], "ceil_mode": 1}])  # fmt: skip
def test_means_of_windows(dtype, last, more):
    known = quantized_as(dtype, "high", "low", 0.03)
    for shape in [(2, 4, 7, 9), (1, 5, 4, 5)]:
        x = integers(dtype, *shape)
        check("QLinearAveragePool", {"x": x.transpose(0, 2, 3, 1).copy() if last else x}, "x xs xz ys yz", known,
              quanta=1, kernel_shape=[3, 2], channels_last=last, **more)  # fmt: skip


@TYPES
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axes", [[1], [-1, 0], [0, 1, 2]])
def test_means_over_axes(dtype, keep, axes):
    """Against NumPy: ONNX Runtime has the schema, and no kernel for the CPU."""
    known = quantized_as(dtype, "high", "middle", 0.011)
    x = integers(dtype, 3, 5, 7)
    proto = model([node("QLinearReduceMean", "x xs xz ys yz", "y", domain="com.microsoft", axes=axes, keepdims=keep)],
                  [value("x", dtype, x.shape)], ["y"], known)  # fmt: skip
    mean = ((x.astype(float) - known["xz"]) * 0.02).mean(tuple(axes), keepdims=bool(keep))
    limits = np.iinfo(dtype)
    want = np.clip(np.round(mean / 0.011) + known["yz"], limits.min, limits.max)
    for placement in PLACEMENTS:
        with opweave_onnx.load(proto, placement) as loaded:
            (got,) = loaded.run({"x": x}).values()
        assert (got.dtype, got.shape) == (np.dtype(dtype), want.shape)
        assert np.abs(got - want).max() <= 1


# --- convolutions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(("dtype", "weights"), [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
@pytest.mark.parametrize("more", [{}, {"strides": [2, 1], "pads": [1, 0, 2, 1]}, {"group": 2}, {"dilations": [2, 1]}])
def test_convolutions_of_channels_first_and_last(dtype, weights, last, more):
    x = integers(dtype, 2, 4, 7, 9)
    known = {"xs": scale(0.02), "xz": end(dtype, "high"),
             "w": weights_of_8_bits(RNG, weights, (6, 4 // more.get("group", 1), 3, 2)),
             "ws": RNG.uniform(0.01, 0.02, 6).astype(F32), "wz": np.full(6, 3 if weights == np.uint8 else 0, weights),
             "ys": scale(0.2), "yz": end(dtype, "middle"), "b": RNG.integers(-1000, 1000, 6).astype(I32)}  # fmt: skip
    feeds = {"x": np.moveaxis(x, 1, -1).copy() if last else x}
    check("QLinearConv", feeds, "x xs xz w ws wz ys yz b", known, quanta=1, channels_last=last, **more)


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [False, True], ids=["one scale", "a scale for each column"])
@pytest.mark.parametrize(("ta", "tb"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(("dtype", "weights"), [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
def test_gemm(dtype, each, ta, tb, weights):
    m, k, n = 3, 37, 5
    b = weights_of_8_bits(RNG, weights, (n, k) if tb else (k, n))
    known = {"as": scale(0.02), "az": end(dtype, "high"), "b": b,
             "bs": RNG.uniform(0.01, 0.02, n).astype(F32) if each else scale(0.015),
             "bz": np.full(n, 3, weights) if each else np.array(3, weights),
             "c": RNG.integers(-1000, 1000, n).astype(I32), "ys": scale(0.4), "yz": end(dtype, "middle")}  # fmt: skip
    for rows in (m, 1):
        feeds = {"a": integers(dtype, *((k, rows) if ta else (rows, k)))}
        check("QGemm", feeds, "a as az b bs bz c ys yz", known, quanta=1, transA=ta, transB=tb, alpha=0.5)
        check("QGemm", feeds, "a as az b bs bz - ys yz", {n: v for n, v in known.items() if n != "c"}, quanta=1,
              transA=ta, transB=tb)  # fmt: skip
        floating = {n: v for n, v in known.items() if n not in ("ys", "yz")}
        check("QGemm", feeds, "a as az b bs bz c", floating, transA=ta, transB=tb)


@TYPES
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("each", [False, True], ids=["one scale", "a scale for each column"])
def test_attention_with_weights(dtype, unidirectional, each):
    hidden, heads = 8, 2
    known = {"w": weights_of_8_bits(RNG, dtype, (hidden, 3 * hidden)), "b": floats(3 * hidden), "xs": scale(0.01),
             "ws": RNG.uniform(0.005, 0.01, 3 * hidden).astype(F32) if each else scale(0.007),
             "xz": np.array(120, np.uint8),
             "wz": np.full(3 * hidden if each else (), end(dtype, "middle"), dtype)}  # fmt: skip
    for batch, tokens in [(2, 5), (1, 1)]:
        x = {"x": integers(np.uint8, batch, tokens, hidden)}
        options = {"num_heads": heads, "unidirectional": unidirectional}
        check("QAttention", x, "x w b xs ws - xz wz", known, **options)
        mask = {"m": np.ones((batch, tokens), I32)}
        mask["m"][:, tokens // 2 + 1 :] = 0
        check("QAttention", {**x, **mask}, "x w b xs ws m xz wz", known, **options)
        past = {"past": floats(2, batch, heads, 3, hidden // heads)}
        check("QAttention", {**x, **past}, "x w b xs ws - xz wz past", known, outputs="y present", num_heads=heads,
              unidirectional=1)  # fmt: skip


def test_embeddings():
    ids = {"ids": RNG.integers(0, 9, (2, 4)).astype(I32), "kinds": RNG.integers(0, 2, (2, 4)).astype(I32)}
    shapes = {"words": (9, 8), "places": (6, 8), "kind": (2, 8), "gamma": (8,), "beta": (8,)}
    known = {name: integers(np.uint8, *shape) for name, shape in shapes.items()}
    known |= {f"{name}_s": scale(0.01 + 0.001 * i) for i, name in enumerate(shapes)}
    known |= {f"{name}_z": np.array(120 + i, np.uint8) for i, name in enumerate(shapes)}
    scales, zeros = (" ".join(f"{name}_{part}" for name in shapes) for part in "sz")
    check("QEmbedLayerNormalization", ids, f"ids kinds words places kind gamma beta - {scales} {zeros}", known,
          epsilon=1e-5, outputs="y counts")  # fmt: skip
    check("QEmbedLayerNormalization", {**ids, "mask": np.array([[1, 1, 1, 0], [1] * 4], I32)},
          f"ids kinds words places kind gamma beta mask {scales} {zeros}", known, epsilon=1e-5,
          outputs="y counts")  # fmt: skip


# --- fused ----------------------------------------------------------------------------------------------------------

ACTIVATIONS = [("Relu", []), ("Tanh", []), ("Sigmoid", []), ("LeakyRelu", [0.3]), ("Clip", [-0.1, 0.4]),
               ("HardSigmoid", [0.25, 0.4])]  # fmt: skip


@pytest.mark.parametrize(("name", "params"), ACTIVATIONS)
def test_convolutions_with_an_activation(name, params):
    known = {"w": floats(6, 2, 3, 3), "b": floats(6)}
    for batch in (0, 1, 2):
        x = {"x": floats(batch, 4, 5, 7)}
        options = {"activation": name, "pads": [1, 1, 1, 1], "group": 2}
        options |= {"activation_params": params} if params else {}
        check("FusedConv", x, "x w b", known, **options)
        check("FusedConv", {**x, "z": floats(batch, 6, 5, 7)}, "x w b z", known, **options)


@pytest.mark.parametrize(("name", "params"), [a for a in ACTIVATIONS if a[0] != "Clip"])
def test_products_with_an_activation(name, params):
    known = {"b": floats(5, 4), "c": floats(5)}
    more = {f"activation_{key}": p for key, p in zip(("alpha", "beta"), params, strict=False)}
    for rows in (0, 1, 3):
        check("FusedGemm", {"a": floats(rows, 4)}, "a b c", known, activation=name, transB=1, alpha=0.5, **more)
