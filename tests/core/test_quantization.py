"""`opweave.quantize` and `opweave.dequantize`, against the ``gguf`` package."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.dtypes import QUANTIZED

RNG = np.random.default_rng(17)
ABLE = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq2_0", "tq1_0", "mxfp4"]
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


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ow.Unavailable, match=r'pip install "opweave\[gguf\]"'):
        ow.quantize(np.ones(32), "q8_0")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ow.quantize(np.ones(256), "q4_k"), ow.DTypeError, f"not quantize to q4_k, but to {', '.join(ABLE)}"),
        (lambda: ow.quantize(np.ones(32), "f16"), ow.DTypeError, "f16 is no quantized type"),
        (lambda: ow.quantize(np.ones(32), "q9"), ow.UnknownNameError, "q9"),
        (lambda: ow.quantize(np.ones(33), "q8_0"), ow.LayoutError, "multiple of its block of 32"),
        (lambda: ow.quantize(1.0, "q8_0"), ow.LayoutError, "multiple of its block of 32"),
        (lambda: ow.quantize([["a"] * 32], "q8_0"), ow.DTypeError, "opweave has no dtype"),
        (lambda: ow.quantize([1.0, float("nan")] * 16, "q8_0"), ow.DTypeError, "not finite"),
        (lambda: ow.quantize(np.full(32, 1e300), "q8_0"), ow.DTypeError, "not finite"),
        (lambda: ow.quantize(np.full(32, 1e9), "q8_0"), ow.DTypeError, "too large for the f16 scales"),
        (lambda: ow.quantize(ow.input("x", (32,)), "q8_0"), ow.DTypeError, "is symbolic; quantize what ow.read"),
        (lambda: ow.dequantize(ow.input("x", (32,))), ow.DTypeError, r"takes ow.Blocks\(data, shape, dtype\), not"),  # type: ignore[arg-type]
        (lambda: ow.dequantize(ow.Blocks(np.zeros(34, np.uint8), (64,), "q8_0")), ow.ShapeError, "takes 68 bytes"),
        (
            lambda: ow.dequantize(ow.Blocks(np.zeros(34, np.uint8), (34,), "u8")),
            ow.DTypeError,
            "quantized type, not u8",
        ),
    ],
)
def test_what_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_weights_take_what_it_gives():
    w, x = RNG.standard_normal((7, 64)), RNG.standard_normal((2, 64)).astype(F)
    blocks = ow.quantize(w, "q8_0")
    y = ow.linear(ow.input("x", (2, 64)), ow.weights({"w": blocks})["w"])
    with ow.Scheduler("host") as scheduler:
        got = scheduler.build(y).run(x=x)
    np.testing.assert_allclose(got, x @ ow.dequantize(blocks).T, rtol=1e-4, atol=1e-5)
    assert np.abs(got - x @ w.T).max() < 0.2


def test_blocks_show_their_type_shape_and_size():
    assert repr(ow.Blocks(np.zeros((4, 68), np.uint8), (4, 64), "q8_0")) == "<Blocks q8_0[4, 64], 272 bytes>"
