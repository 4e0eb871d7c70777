"""Arrays of the host, made of what callers pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from opweave.errors import DTypeError
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, f32
from opweave.graph.foreign import host_view, is_foreign

__all__ = ["host_array"]


def host_array(value: Any, dtype: DTypeLike | None = None, *, copy: bool) -> np.ndarray[Any, Any]:
    """``value`` as a dense row-major array. An array of another library, such as a tensor of PyTorch, keeps its dtype;
    one that requires a gradient is detached.

    With a ``dtype`` the values are converted to it as far as it holds them: a float type rounds, and what is too large
    for it becomes infinite; an integer type and bool take whole numbers within their range.

    Raises:
        DTypeError: it is no array of numbers, or has values that ``dtype`` does not hold; an array of floats for an
            integer ``dtype``, whatever its values; an array in the memory of another device than the host.
    """
    if is_foreign(value):
        value = host_view(value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError(f"cannot make an array of {type(value).__name__}: {error}") from None
    if dtype is None and not isinstance(value, (np.ndarray, np.generic)):
        # Python numbers have no width; models compute in f32 and i64.
        array = _converted(array, f32) if array.dtype == np.float64 else array
    want = as_dtype(array.dtype if dtype is None else dtype)
    if array.dtype != want.numpy:
        if isinstance(value, np.ndarray) and not want.is_float and array.dtype.kind not in "biu":
            raise DTypeError(f"an array of {array.dtype} does not become {want} silently; convert with astype(...)")
        array = _converted(array, want)
        copy = False
    array = np.array(array, order="C", copy=True) if copy else np.ascontiguousarray(array).reshape(array.shape)
    return array


def _converted(array: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    kind = array.dtype.kind
    # Numbers beyond 64 bits are objects.
    if kind not in "biuf" and not (kind == "O" and all(isinstance(v, (int, float)) for v in array.flat)):
        as_dtype(array.dtype)
    if not dtype.is_float and kind != "b":
        _check_range(array, dtype)
    try:
        with np.errstate(over="ignore"):
            if kind == "O" and dtype.is_float:
                array = array.astype(np.float64)  # bf16 does not convert from objects
            return array.astype(dtype.numpy)
    except OverflowError as error:
        raise DTypeError(f"cannot make {dtype} of such numbers: {error}") from None


def _check_range(array: np.ndarray[Any, Any], dtype: DType) -> None:
    """Raises `DTypeError` naming the first value that an integer type, or bool, does not hold."""
    limits = None if dtype.kind == "b" else np.iinfo(dtype.numpy)
    low, high = (0, 1) if limits is None else (int(limits.min), int(limits.max))
    values = array if array.dtype.kind in "biuO" else array.astype(np.float64)
    # `high` may not be representable in a float type, but `high + 1`, a power of two, is.
    wrong = (values < low) | (values >= high + 1)
    if values.dtype.kind == "f":
        wrong |= values != np.trunc(values)
    if np.any(wrong):
        value = values[wrong].reshape(-1)[0]
        raise DTypeError(f"{value} does not fit into {dtype}, which holds {low} .. {high} without fractions")
