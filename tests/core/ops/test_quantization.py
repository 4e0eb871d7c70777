"""`opweave.quantize` and `opweave.dequantize` of arrays and of tensors, against the ``gguf`` package."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import ctypes
import re
import sys
import zlib
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import opweave as ow
from opweave.graph.dtypes import QUANTIZED
from opweave.ops.encoding import ENCODED, FITTED, WEIGHED, encode

RNG = np.random.default_rng(17)
ABLE = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq2_0", "tq1_0", "mxfp4"]
"""What gguf encodes too."""
ERRORS = {
    "q2_k": 0.28, "q3_k": 0.15, "q4_k": 0.075, "q5_k": 0.038, "q6_k": 0.019, "iq4_nl": 0.075, "iq4_xs": 0.076,
    "iq3_s": 0.135, "iq3_xxs": 0.18, "iq2_s": 0.25, "iq2_xs": 0.295, "iq2_xxs": 0.34,
}  # fmt: skip
"""The stated root mean square errors for normally distributed values."""
F = np.float32


def kind(name):
    return gguf.GGMLQuantizationType[name.upper()]


@pytest.mark.parametrize("name", ABLE)
@pytest.mark.parametrize("shape", [(256,), (3, 512), (2, 3, 256), (0, 256), (2, 0)])
def test_the_bytes_and_values_are_those_of_gguf(name, shape):
    values = (RNG.standard_normal(shape) * 10.0 ** RNG.integers(-3, 3, shape)).astype(F)
    blocks = ow.quantize(values, name)
    assert (blocks.shape, blocks.dtype) == (shape, ow.as_dtype(name))
    decoded = ow.dequantize(blocks)
    assert (decoded.shape, decoded.dtype) == (shape, F)
    if values.size:
        want = gguf.quantize(values, kind(name))
        np.testing.assert_array_equal(blocks.data, want)
        np.testing.assert_array_equal(decoded.view(np.uint32), gguf.dequantize(want, kind(name)).view(np.uint32))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_every_block_type_is_decoded_without_the_package(dtype, monkeypatch):
    raw = RNG.integers(0, 256, (5, 3 * dtype.itemsize), np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw, kind(dtype.name))
    monkeypatch.setitem(sys.modules, "gguf", None)
    np.testing.assert_array_equal(ow.dequantize(ow.Blocks(raw, (5, 3 * dtype.block), dtype.name)), want)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.tolist(),
        lambda x: x.astype(np.float64),
        lambda x: np.asfortranarray(x),
        lambda x: torch.from_numpy(x).requires_grad_(),
        lambda x: torch.from_numpy(x.astype(F)),
    ],
)
def test_arrays_of_any_kind(convert):
    values = RNG.standard_normal((3, 64)).astype(F)
    np.testing.assert_array_equal(ow.quantize(convert(values), "q8_0").data, ow.quantize(values, "q8_0").data)


def test_half_types():
    values = RNG.standard_normal((3, 64)).astype(ml_dtypes.bfloat16)
    want = ow.quantize(values.astype(F), "q8_0").data
    np.testing.assert_array_equal(ow.quantize(values, "q8_0").data, want)
    theirs = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    np.testing.assert_array_equal(ow.quantize(theirs, "q8_0").data, want)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
@settings(max_examples=50, deadline=None)
@given(
    values=arrays(
        F, (2, 64), elements=st.floats(-1e4, 1e4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30) | st.just(0.5)
    )
)
def test_any_values_give_the_bytes_of_gguf(name, values):
    values += F(0)  # zeros without a sign: which of two is the smallest is not defined
    np.testing.assert_array_equal(ow.quantize(values, name).data, gguf.quantize(values, kind(name)))


def test_the_package_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in ENCODED:
        assert ow.dequantize(ow.quantize(np.ones(256), name)).shape == (256,)


# --- the types that are fitted --------------------------------------------------------------------------------------


def error(values, blocks, importance=1.0):
    wrong = ((ow.dequantize(blocks) if isinstance(blocks, ow.Blocks) else blocks) - values).astype(np.float64) ** 2
    return float((wrong * importance).sum())


@pytest.mark.parametrize(("name", "bound"), ERRORS.items())
@pytest.mark.parametrize("scale", [0.02, 1.0, 300.0])
def test_errors_are_within_those_that_are_stated(name, bound, scale):
    values = (RNG.standard_normal((64, 512)) * scale).astype(F)
    relative = np.sqrt(error(values, ow.quantize(values, name)) / (values.astype(np.float64) ** 2).sum())
    assert 0.85 * bound < relative < bound


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_more_bits_and_plain_rounding_are_not_better(name):
    """Scales that reach from the smallest to the largest value, without a search, give larger errors."""
    values = RNG.standard_normal((64, 256)).astype(F)
    plain = {
        "q2_k": (16, 2, True),
        "q3_k": (16, 3, False),
        "q4_k": (32, 4, True),
        "q5_k": (32, 5, True),
        "q6_k": (16, 6, False),
    }
    size, bits, shifted = plain[name]
    parts = values.reshape(-1, size)
    if shifted:
        low = np.minimum(parts.min(1, keepdims=True), 0)
        step = (parts.max(1, keepdims=True) - low) / (2**bits - 1)
        rounded = np.rint((parts - low) / step) * step + low
    else:
        step = np.abs(parts).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
        rounded = np.rint(parts / step) * step
    assert error(values, ow.quantize(values, name)) < ((rounded - parts) ** 2).sum()


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.37, -250.0])
def test_equal_values_stay_as_they_are(name, value):
    decoded = ow.dequantize(ow.quantize(np.full((2, 256), value, F), name))
    np.testing.assert_allclose(decoded, value, rtol=1e-3)


@pytest.mark.parametrize("name", WEIGHED)
def test_importances_lower_the_error_of_what_is_important(name):
    values = RNG.standard_normal((32, 512)).astype(F)
    importance = np.where(np.arange(512) % 8 == 0, 100.0, 1.0).astype(F)
    weighted, plain = ow.quantize(values, name, importance=importance), ow.quantize(values, name)
    assert error(values, weighted, importance) < 0.75 * error(values, plain, importance)
    each = np.broadcast_to(importance, values.shape)
    np.testing.assert_array_equal(ow.quantize(values, name, importance=each).data, weighted.data)
    equal = ow.quantize(values, name, importance=np.ones(512)).data
    np.testing.assert_array_equal(ow.quantize(values, name, importance=np.full(512, 0.25)).data, equal)
    if name in FITTED:
        np.testing.assert_array_equal(equal, plain.data)


@pytest.mark.parametrize("name", WEIGHED)
@pytest.mark.parametrize("counts", [slice(0), slice(32, 64), slice(3, None, 32)])
def test_what_has_no_importance_may_be_anything(name, counts):
    """Where one value of each part counts, or none, no quotient of rounding errors makes scales large."""
    values = RNG.standard_normal((4, 256)).astype(F)
    importance = np.zeros(256, F)
    importance[counts] = 3
    decoded = ow.dequantize(ow.quantize(values, name, importance=importance))
    assert np.abs(decoded).max() < 20
    assert error(values, decoded, importance) <= 0.12 * error(values, np.zeros_like(values), importance)


@pytest.fixture(scope="module")
def by_ggml():
    """Quantizes rows by ggml itself, as xllamacpp brings it."""
    chunk = ctypes.CDLL(pytest.importorskip("xllamacpp").xllamacpp.__file__).ggml_quantize_chunk
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    chunk.restype, chunk.argtypes = ctypes.c_size_t, (ctypes.c_int, pointer, pointer, size, size, size, pointer)

    def quantize(values, name, importance=None):
        out = np.zeros((len(values), ow.as_dtype(name).row_bytes(values.shape[1])), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        chunk(kind(name).value, values.ctypes.data, out.ctypes.data, 0, *values.shape, weights)
        return ow.Blocks(out, values.shape, name)

    return quantize


IMPORTANCE = (RNG.random(512) ** 4 + 1e-3).astype(F)


@pytest.mark.parametrize("name", ENCODED)
def test_errors_are_not_above_those_of_ggml(by_ggml, name):
    values = RNG.standard_normal((64, 512)).astype(F)
    ones = np.ones(512, F) if name in ("iq2_xs", "iq2_xxs") else None  # which it does not encode without any
    ours, theirs = ow.quantize(values, name), by_ggml(values, name, ones)
    assert error(values, ours) <= 1.01 * error(values, theirs)
    if name not in FITTED:
        np.testing.assert_array_equal(ours.data, theirs.data)
    if name in WEIGHED:
        ours, theirs = ow.quantize(values, name, importance=IMPORTANCE), by_ggml(values, name, IMPORTANCE)
        assert error(values, ours, IMPORTANCE) <= 1.06 * error(values, theirs, IMPORTANCE)


def test_nvfp4_has_the_bytes_of_ggml_at_every_size(by_ggml):
    """Scales below the smallest one, subnormal ones, ties, and beyond the largest one."""
    sizes = np.concatenate([2.0 ** np.arange(-20, 12), 1.5 * 2.0 ** np.arange(-16, 10), RNG.random(70) * 2688])
    values = (RNG.uniform(-1, 1, (128, 64)) * np.resize(sizes, (128, 1))).astype(F)
    values[:, ::16] = np.resize(sizes, (128, 1))
    want = by_ggml(values, "nvfp4").data
    np.testing.assert_array_equal(encode(values, ow.as_dtype("nvfp4")), want)


RECORDED = {
    "nvfp4": 3334479885, "iq4_nl": 1910355708, "iq4_xs": 3641847571, "iq3_s": 2060724647,
    "iq3_xxs": 3555959697, "iq2_s": 999042127, "iq2_xs": 3334731391, "iq2_xxs": 3516062942,
}  # fmt: skip
"""Checksums of the bytes that are encoded on every machine."""


@pytest.mark.parametrize("name", RECORDED)
def test_every_machine_makes_the_same_bytes(name):
    integers = np.arange(4 * 512, dtype=np.uint32) * np.uint32(2654435761) >> 8
    even = integers.reshape(4, 512).astype(F) / F(2**23) - 1
    values = even * even * even
    assert zlib.crc32(ow.quantize(values, name).data) == RECORDED[name]


# --- tensors --------------------------------------------------------------------------------------------------------

X = ow.input("x", (3, 512))


@pytest.mark.parametrize("name", ENCODED)
def test_a_tensor_is_quantized_and_decoded_by_nodes(name):
    values = RNG.standard_normal((3, 512)).astype(F)
    blocks = ow.quantize(X, name)
    assert (blocks.dtype.name, blocks.shape, blocks.op.name) == (name, (3, 512), "quantize")
    want = ow.quantize(values, name)
    with ow.Scheduler("host") as scheduler:
        data, decoded, half = scheduler.build([blocks, ow.dequantize(blocks), X.astype(name).astype("f16")]).run(
            x=values
        )
    np.testing.assert_array_equal(data, want.data)
    np.testing.assert_array_equal(decoded, ow.dequantize(want))
    np.testing.assert_array_equal(half, ow.dequantize(want).astype(np.float16))


def test_what_casts_make():
    blocks = X.astype("q8_0")
    assert blocks is ow.quantize(X, "q8_0")
    assert blocks.astype("q8_0") is blocks
    assert blocks.astype("f32") is ow.dequantize(blocks)
    assert [t.op.name for t in ow.Graph(blocks.astype("q4_0")).nodes] == ["quantize", "dequantize", "quantize"]
    assert [t.op.name for t in ow.Graph(ow.quantize(X.astype("bf16"), "q8_0")).nodes] == ["cast", "cast", "quantize"]


def test_importances_of_a_tensor():
    values, importance = RNG.standard_normal((3, 512)).astype(F), RNG.random(512).astype(F)
    want = ow.quantize(values, "q4_k", importance=importance)
    for given_importance in (importance, ow.constant(importance), importance.astype(np.float64)):
        blocks = ow.quantize(X, "q4_k", importance=given_importance)
        with ow.Scheduler("host") as scheduler:
            np.testing.assert_array_equal(scheduler.build(blocks).run(x=values), want.data)


def test_a_block_with_a_value_that_is_not_finite_decodes_to_such_values():
    values = np.ones((4, 32), F)
    values[1, 3], values[2, 4], values[3, 5] = np.nan, np.inf, -np.inf
    values = np.repeat(values, 8, 1)
    for name in set(ENCODED) - {"mxfp4", "nvfp4"}:
        for device in ("host", "cpu", "torch", "opencl"):
            with ow.Scheduler([*{ow.device(device), ow.device("host")}]) as scheduler:
                decoded = scheduler.build(ow.quantize(ow.input("x", (4, 256)), name).astype("f32")).run(x=values)
            np.testing.assert_allclose(decoded[0], 1, rtol=1e-3)
            assert not np.isfinite(decoded[1:]).all(1).any()


def test_gradients_stop_at_blocks_as_at_integers():
    w = ow.state("w", (4, 512))
    (none,) = ow.gradients(w.astype("q8_0").astype("f32").sum(), [w])
    assert none.op.name == "full"
    x = ow.state("x2", (3, 512))
    (grad,) = ow.gradients(ow.linear(x, ow.quantize(X, "q8_0")).sum(), [x])
    assert grad.shape == x.shape


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ow.quantize(np.ones(256), "iq1_m"), ow.DTypeError, "not encoded to iq1_m, but to q4_0, q4_1"),
        (lambda: ow.quantize(X, "iq1_s"), ow.DTypeError, "not encoded to iq1_s, but to q4_0, q4_1"),
        (lambda: ow.quantize(np.full(64, 2689), "nvfp4"), ow.DTypeError, "reach to 2,688"),
        (lambda: ow.quantize(np.ones(32), "f16"), ow.DTypeError, "f16 is no quantized type"),
        (lambda: ow.quantize(np.ones(32), "q9"), ow.UnknownNameError, "q9"),
        (lambda: ow.quantize(np.ones(33), "q8_0"), ow.LayoutError, "multiple of its block of 32"),
        (lambda: ow.quantize(ow.input("x", (3, 48)), "q8_0"), ow.LayoutError, "multiple of its block of 32"),
        (lambda: ow.quantize(1.0, "q8_0"), ow.LayoutError, "multiple of its block of 32"),
        (lambda: ow.quantize([["a"] * 32], "q8_0"), ow.DTypeError, "opweave has no dtype"),
        (lambda: ow.quantize([1.0, float("nan")] * 16, "q8_0"), ow.DTypeError, "not finite"),
        (lambda: ow.quantize(np.full(32, 1e300), "q8_0"), ow.DTypeError, "not finite"),
        (lambda: ow.quantize(np.full(32, 1e9), "q8_0"), ow.DTypeError, "too large for the f16 scales"),
        (lambda: ow.quantize(X.astype("i32"), "q8_0"), ow.DTypeError, "of a float type, not"),
        (lambda: ow.quantize(np.ones(32), "q8_0", importance=np.ones(32)), ow.DTypeError, "q8_0 is not fitted"),
        (lambda: ow.quantize(np.ones(256), "q4_k", importance=np.ones(3)), ow.ShapeError, "do not broadcast"),
        (lambda: ow.quantize(X, "q4_k", importance=np.ones(3)), ow.ShapeError, "do not broadcast"),
        (lambda: ow.quantize(np.ones(256), "q4_k", importance=-np.ones(256)), ow.DTypeError, "not negative"),
        (lambda: ow.quantize(np.ones(256), "q4_k", importance=X), ow.DTypeError, "beside an array are an array"),
        (lambda: ow.dequantize(X), ow.DTypeError, "is not quantized"),
        (lambda: ow.dequantize(ow.quantize(X, "q8_0").T), ow.LayoutError, "transpose of a quantized matrix"),
        (lambda: ow.dequantize([1.0]), ow.DTypeError, r"takes a tensor or ow.Blocks\(data, shape, dtype\), not"),  # type: ignore[call-overload]
        (lambda: ow.dequantize(ow.Blocks(np.zeros(34, np.uint8), (64,), "q8_0")), ow.ShapeError, "takes 68 bytes"),
        (
            lambda: ow.dequantize(ow.Blocks(np.zeros(34, np.uint8), (34,), "u8")),
            ow.DTypeError,
            "quantized type, not u8",
        ),
        (lambda: ow.quantize(X, "q8_0") + 1, ow.DTypeError, "does not take q8_0"),
    ],
)
def test_what_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_the_page_lists_every_block_type():
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (\d+) \| (yes)? ?\| ([\d.]*) ?\|$", page, re.MULTILINE)
    listed = {name: (float(bits), int(block), bool(encoded)) for name, bits, block, encoded, _ in rows}
    assert listed == {t.name: (t.itemsize * 8 / t.block, t.block, t.name in ENCODED) for t in QUANTIZED}
    values = RNG.standard_normal((256, 512)).astype(F)
    for name, *_, stated in rows:
        if stated:
            found = np.sqrt(error(values, ow.quantize(values, name)) / (values.astype(np.float64) ** 2).sum())
            assert abs(found - float(stated)) < 0.02 * float(stated)
