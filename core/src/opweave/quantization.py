"""Arrays to quantized blocks and back: `quantize`, `dequantize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from opweave.errors import DTypeError, Unavailable
from opweave.graph.arrays import host_array
from opweave.graph.blocks import Blocks, checked_blocks
from opweave.graph.dtypes import QUANTIZED, DType, DTypeLike, as_dtype, f32
from opweave.graph.foreign import host_view
from opweave.graph.layout import check_shape
from opweave.graph.tensor import Tensor
from opweave.ops import blocks as decoding
from opweave.ops.blocks import fields_of

__all__ = ["dequantize", "quantize"]

Array = np.ndarray[Any, Any]


def quantize(values: Any, dtype: DTypeLike) -> Blocks:
    """Round an array to quantized blocks, in the layout of GGUF: values for `opweave.weights`.

    The ``gguf`` package does it (``pip install "opweave[gguf]"``), so that the bytes are those that it writes to files.
    It quantizes to some of the block types that opweave reads: in its version 0.19 to q4_0, q4_1, q5_0, q5_1, q8_0 and
    mxfp4.

    Args:
        values: an array of numbers, also of another library; shape (..., n), n a multiple of the block of ``dtype``.
            It is rounded to f32 first.
        dtype: a quantized `DType` or its name, e.g. ``"q8_0"``.

    Returns:
        Blocks of the shape of ``values``.

    Raises:
        DTypeError: ``dtype`` is not quantized or not one that ``gguf`` quantizes to, ``values`` is a tensor of a graph
            or no array of numbers, or it holds values that are not finite or too large for the scales of ``dtype``.
        LayoutError: the last axis does not consist of whole blocks.
        UnknownNameError: no such dtype.
        Unavailable: the package ``gguf`` is not installed.
    """
    kind = as_dtype(dtype)
    if not kind.is_quantized:
        raise DTypeError(f"quantize: {kind} is no quantized type; these are: {_names(QUANTIZED)}")
    if isinstance(values, Tensor):
        raise DTypeError(
            f"quantize takes an array, and {values.describe()} is symbolic; quantize what ow.read(...) or a run gives"
        )
    if hasattr(values, "__dlpack__") and not isinstance(values, (np.ndarray, np.generic)):
        values = host_view(values)  # np.asarray takes no bf16 and no gradients
    array = host_array(values, f32, copy=False)
    shape = check_shape(array.shape, kind)
    if not np.isfinite(array).all():
        raise DTypeError(f"quantize: {kind} has no values that are not finite (in f32), and the array holds some")
    data = _quantized(array, kind)
    scales = fields_of(data.reshape(-1), kind)
    if any(not np.isfinite(scales[name]).all() for name in scales.dtype.names or () if scales.dtype[name].kind == "f"):
        raise DTypeError(f"quantize: values up to {np.abs(array).max():.3g} are too large for the f16 scales of {kind}")
    return Blocks(data, shape, kind)


def dequantize(blocks: Blocks) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The values of a quantized array, of every block type that opweave has, equal in each bit to the ``gguf`` package.

    Args:
        blocks: what `quantize` gives, or bytes of a GGUF file.

    Returns:
        f32, of the shape of ``blocks``.

    Raises:
        DTypeError, UnknownNameError: no `Blocks`, or a dtype that is not quantized.
        LayoutError: rows that do not consist of whole blocks.
        ShapeError: bytes that do not fit the shape.
    """
    if not isinstance(blocks, Blocks):
        what = blocks.describe() if isinstance(blocks, Tensor) else f"{type(blocks).__name__}"
        raise DTypeError(f"dequantize takes ow.Blocks(data, shape, dtype), not {what}")
    data, _, dtype = checked_blocks(blocks, "dequantize")
    with np.errstate(all="ignore"):  # scales in a file may be infinite or NaN, and then so are the values
        return decoding.dequantize(data, dtype)


def _quantized(array: Array, dtype: DType) -> Array:
    """The blocks as rows of bytes, by the package ``gguf``."""
    try:
        import gguf
    except ImportError as error:
        raise Unavailable(f"quantize needs the package gguf: {error}", remedy='pip install "opweave[gguf]"') from None
    if 0 in array.shape:
        return np.empty((*array.shape[:-1], dtype.row_bytes(array.shape[-1])), np.uint8)
    try:
        with np.errstate(all="ignore"):  # scales that overflow are refused afterwards
            data: Array = gguf.quantize(array, gguf.GGMLQuantizationType[dtype.name.upper()])
    except (NotImplementedError, KeyError):  # KeyError: a version that does not know the type
        able = [t for t in QUANTIZED if _is_able(t)]
        raise DTypeError(
            f"quantize: the gguf package does not quantize to {dtype}, but to {_names(able)}. "
            f"Other programs write files of {dtype}, which ow.load_weights reads"
        ) from None
    return data


def _is_able(dtype: DType) -> bool:
    """Whether the package ``gguf`` quantizes to a type."""
    import gguf

    try:
        gguf.quantize(np.zeros((1, dtype.block), np.float32), gguf.GGMLQuantizationType[dtype.name.upper()])
    except (NotImplementedError, KeyError):
        return False
    return True


def _names(dtypes: Iterable[DType]) -> str:
    return ", ".join(t.name for t in dtypes)
