"""Encoding of values to quantized blocks, and decoding: nodes for tensors, results for arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, overload

import numpy as np

from opweave.errors import DTypeError, ShapeError
from opweave.graph.arrays import host_array
from opweave.graph.blocks import Blocks, checked_blocks
from opweave.graph.dtypes import QUANTIZED, DType, DTypeLike, as_dtype, f32
from opweave.graph.layout import Shape, check_shape
from opweave.graph.opdef import OpDef, Sample, flops_per_element
from opweave.graph.tensor import Tensor, node
from opweave.ops.operands import Array, broadcast_to, builds, cast, rows, unquantized
from opweave.ops.samples import operand, weight

__all__ = ["dequantize", "quantize"]


def _quantize_infer(x: Tensor, *importance: Tensor, dtype: DType) -> tuple[Shape, DType]:
    if any(t.dtype is not f32 or t.shape != x.shape for t in (x, *importance)):
        given = " and ".join(t.describe() for t in (x, *importance))
        raise ShapeError(f"quantize: needs f32 values, and importances of their shape, not {given}")
    return check_shape(x.shape, dtype), dtype


def _quantize(x: Array, importance: Array | None = None, *, dtype: DType) -> Array:
    from opweave.ops.encoding import encode  # most programs only decode

    return encode(x, dtype, importance)


def _flops(out: Tensor) -> int:
    from opweave.ops.encoding import FITTED, OF_ENTRIES

    fitted = out.dtype.name in FITTED or len(out.srcs) > 1
    return out.size * (1500 if out.dtype.name in OF_ENTRIES else 600 if fitted else 8)


_SIZES: Final = ((8, 256), (64, 512), (256, 1024))


def _quantize_samples() -> list[Sample]:
    attrs = {"dtype": as_dtype("q8_0")}
    return [Sample("f32", lambda: [node(QUANTIZE, (operand(*s),), attrs) for s in _SIZES])]


QUANTIZE = OpDef(
    "quantize",
    infer=_quantize_infer,
    reference=_quantize,
    flops=_flops,
    formula="blocks whose values are near x",
    exact=True,
    nan=False,
    runs_like="cast",
    samples=_quantize_samples,
)


@overload
def quantize(values: Tensor, dtype: DTypeLike, *, importance: Any = None) -> Tensor: ...
@overload
def quantize(values: Any, dtype: DTypeLike, *, importance: Any = None) -> Blocks: ...
@builds(QUANTIZE)
def quantize(values: Any, dtype: DTypeLike, *, importance: Any = None) -> Tensor | Blocks:
    """Round values to quantized blocks, in the layout of GGUF. A tensor gives a node; an array is encoded at once, for
    `opweave.weights`.

    The bytes of q4_0, q4_1, q5_0, q5_1, q8_0, tq1_0, tq2_0 and mxfp4 are those that the ``gguf`` package makes, those
    of nvfp4 are ggml's. The other types are fitted to a small sum of squared errors: of normally distributed values
    the root mean square error for q2_k, q3_k, q4_k, q5_k and q6_k is at most 0.28, 0.15, 0.075, 0.038 and 0.019 of that
    of the values. Every device gives the same bytes. As for integers, there are no gradients through blocks.

    Args:
        values: a tensor of a float type, or an array of numbers, also of another library; shape (..., n), n a multiple
            of the block of ``dtype``. It is rounded to f32 first.
        dtype: a quantized `DType` or its name, e.g. ``"q8_0"``.
        importance: for the fitted types, and q4_0, q4_1, q5_0 and q5_1, which are fitted then: the factors by which
            squared errors count, not negative, of a shape that broadcasts to that of ``values``. No type needs them,
            those of fewer than three bits gain most. For weights (out, in) usually the mean squares of the activations,
            of shape (in,). An array or a tensor beside a tensor, else an array.

    Nodes have f32 sources of one shape. Of a tensor, blocks with values that are not finite, or too large for the f16
    scales, decode to values of which some are not finite; but mxfp4 and nvfp4 have none of these, and the values of
    nvfp4 reach to 2,688.

    Returns:
        A tensor of ``dtype``; of an array `Blocks` of its shape.

    Raises:
        DTypeError: ``dtype`` is not quantized or not one that is encoded; ``values`` are no numbers, or of an array are
            not finite or too large for the scales of ``dtype``; importances for another type, or negative ones.
        LayoutError: the last axis does not consist of whole blocks.
        ShapeError: importances that do not broadcast.
        UnknownNameError: no such dtype.
    """
    from opweave.ops.blocks import fields_of
    from opweave.ops.encoding import ENCODED, WEIGHED

    kind = as_dtype(dtype)
    if not kind.is_quantized:
        raise DTypeError(f"quantize: {kind} is no quantized type; these are: {_names(QUANTIZED)}")
    if kind.name not in ENCODED:
        raise DTypeError(
            f"quantize: values are not encoded to {kind}, but to {', '.join(ENCODED)}. Other programs write files of "
            f"{kind}, which ow.load_weights reads"
        )
    if importance is not None and kind.name not in WEIGHED:
        raise DTypeError(f"quantize: importances are for {', '.join(WEIGHED)}; {kind} is not fitted")
    if isinstance(values, Tensor):
        return _quantized_tensor(values, kind, importance)
    if isinstance(importance, Tensor):
        raise DTypeError(f"quantize: importances beside an array are an array, not {importance.describe()}")
    array, weights = host_array(values, f32, copy=False), None
    shape = check_shape(array.shape, kind)
    if importance is not None:
        weights = _broadcast_importance(host_array(importance, f32, copy=False), shape)
    if not np.isfinite(array).all():
        raise DTypeError(f"quantize: {kind} has no values that are not finite (in f32), and the array holds some")
    if kind.name == "nvfp4" and np.abs(array).max(initial=0) > 2688:
        raise DTypeError(
            "quantize: the values of nvfp4 reach to 2,688, and the array holds larger ones; divide by a scale"
        )
    data = _quantize(array, weights, dtype=kind)
    scales = fields_of(data.reshape(-1), kind)
    if any(not np.isfinite(scales[name]).all() for name in scales.dtype.names or () if scales.dtype[name].kind == "f"):
        raise DTypeError(f"quantize: values up to {np.abs(array).max():.3g} are too large for the f16 scales of {kind}")
    return Blocks(data, shape, kind)


def _quantized_tensor(x: Tensor, dtype: DType, importance: Any) -> Tensor:
    if x.dtype.is_quantized:
        x = dequantize(x)
    if not x.dtype.is_float:
        raise DTypeError(f"quantize: the values are of a float type, not {x.describe()}; cast them first")
    check_shape(x.shape, dtype)
    srcs = [cast(x, f32)]
    if importance is not None:
        weights = cast(unquantized("quantize", importance), f32)
        try:
            srcs.append(broadcast_to(weights, x.shape))
        except ShapeError:
            raise ShapeError(f"quantize: importances {weights.describe()} do not broadcast to {x.describe()}") from None
    return node(QUANTIZE, tuple(srcs), {"dtype": dtype})


def _broadcast_importance(importance: Array, shape: Shape) -> Array:
    try:
        result = np.broadcast_to(importance, shape)
    except ValueError:
        raise ShapeError(f"quantize: importances of shape {importance.shape} do not broadcast to {shape}") from None
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise DTypeError("quantize: importances are finite and not negative")
    return result


def _dequantize_infer(x: Tensor, *, blocks: DType) -> tuple[Shape, DType]:
    if x.dtype is not blocks or not blocks.is_quantized:
        raise DTypeError(f"dequantize: the operand is not of quantized blocks ({blocks}), but {x.describe()}")
    return x.shape, f32


def _dequantize(x: Array, *, blocks: DType) -> Array:
    from opweave.ops.blocks import dequantize  # most programs have no quantized values

    return dequantize(x, blocks)


def _dequantize_samples() -> Iterator[Sample]:
    for dtype in ("q8_0", "q4_k"):
        yield Sample(dtype, partial(lambda t: [dequantize(weight(*s, dtype=t)) for s in _SIZES], dtype))


DEQUANTIZE = OpDef(
    "dequantize",
    infer=_dequantize_infer,
    reference=_dequantize,
    flops=flops_per_element(2),
    formula="the values of quantized blocks",
    exact=True,
    runs_like="cast",
    samples=_dequantize_samples,
)


@overload
def dequantize(blocks: Tensor) -> Tensor: ...
@overload
def dequantize(blocks: Blocks) -> np.ndarray[Any, np.dtype[np.float32]]: ...
@builds(DEQUANTIZE)
def dequantize(blocks: Any) -> Any:
    """The values of quantized blocks of every block type, equal to the bit to those of the ``gguf`` package. A
    quantized tensor gives a node (``x.astype("f32")`` makes the same one); `Blocks` are decoded at once.

    Args:
        blocks: a quantized tensor; or `Blocks`: what `quantize` gives, or bytes of a GGUF file.

    Nodes carry the type of their source as the attribute ``blocks``.

    Returns:
        f32, of the shape of ``blocks``: a tensor of a tensor, else an array.

    Raises:
        DTypeError, UnknownNameError: neither, or a dtype that is not quantized.
        LayoutError: rows that do not consist of whole blocks; the transpose of a quantized matrix.
        ShapeError: bytes that do not fit the shape.
    """
    if isinstance(blocks, Tensor):
        if not blocks.dtype.is_quantized:
            raise DTypeError(f"dequantize: {blocks.describe()} is not quantized")
        rows("dequantize", blocks)
        return node(DEQUANTIZE, (blocks,), {"blocks": blocks.dtype})
    if not isinstance(blocks, Blocks):
        raise DTypeError(f"dequantize takes a tensor or ow.Blocks(data, shape, dtype), not {type(blocks).__name__}")
    data, _, dtype = checked_blocks(blocks, "dequantize")
    with np.errstate(all="ignore"):  # scales in a file may be infinite or NaN, and then so are the values
        return _dequantize(data, blocks=dtype)


def _names(dtypes: Iterable[DType]) -> str:
    return ", ".join(t.name for t in dtypes)
