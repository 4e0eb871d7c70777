"""Decoding of quantized blocks: equal to the gguf package in every bit."""

import gguf
import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import DTYPES, as_dtype
from opweave.ops.blocks import dequantize

QUANTIZED = [t for t in DTYPES.values() if t.is_quantized]


def kind_of(dtype):
    return getattr(gguf.GGMLQuantizationType, dtype.name.upper())


@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
def test_sizes_are_ggufs(dtype):
    assert (dtype.block, dtype.itemsize) == gguf.GGML_QUANT_SIZES[kind_of(dtype)]


@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
@pytest.mark.parametrize("shape", [(1,), (200, 3), (2, 3, 2)])
def test_any_bytes_decode_as_gguf_decodes_them(dtype, shape):
    rng = np.random.default_rng(4)
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    with np.errstate(all="ignore"):  # among random scales are infinities and NaN
        got, want = dequantize(data, dtype), gguf.quants.dequantize(data, kind_of(dtype))
    assert got.dtype == np.float32
    assert got.shape == (*shape[:-1], shape[-1] * dtype.block)
    np.testing.assert_array_equal(got, want.reshape(got.shape))


@pytest.mark.parametrize("dtype", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_encoded_weights_come_back_close(dtype):
    values = np.random.default_rng(4).standard_normal((4, 128)).astype(np.float32)
    data = gguf.quants.quantize(values, kind_of(as_dtype(dtype)))
    assert np.abs(dequantize(data, as_dtype(dtype)) - values).max() < 0.4


def test_a_slice_of_bytes_need_not_be_packed():
    dtype = as_dtype("q8_0")
    data = np.random.default_rng(4).integers(0, 60, (6, 4 * dtype.itemsize), np.uint8)
    whole = dequantize(data, dtype)
    np.testing.assert_array_equal(dequantize(data[::2, dtype.itemsize :], dtype), whole[::2, 32:])


def test_what_does_not_decode():
    with pytest.raises(ow.LayoutError, match="whole blocks of 18 bytes"):
        dequantize(np.zeros((2, 20), np.uint8), as_dtype("q4_0"))
    with pytest.raises(ow.DTypeError, match="uint8"):
        dequantize(np.zeros((2, 18), np.int8), as_dtype("q4_0"))
    with pytest.raises(ow.DTypeError, match="as f32"):
        dequantize(np.zeros((2, 18), np.uint8), as_dtype("f32"))
