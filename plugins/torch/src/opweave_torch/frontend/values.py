"""Between tensors of torch, arrays of NumPy and dtypes of opweave. Memory of the host is shared, never copied."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from opweave.errors import DTypeError
from opweave.graph.dtypes import DType, as_dtype
from opweave_torch.memory import TORCH_DTYPES

__all__ = ["Array", "array_of", "dtype_of", "shape_and_dtype", "tensor_of"]

Array = np.ndarray[Any, Any]
OURS: Final = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}


def dtype_of(dtype: torch.dtype, what: str) -> DType:
    """The dtype for one of torch. Raises `DTypeError` for those that opweave does not compute with, as complex ones."""
    found = OURS.get(dtype)
    if found is None:
        raise DTypeError(f"{what} is {dtype}, which opweave does not have")
    return found


def array_of(tensor: torch.Tensor) -> Array:
    """The values as an array: over the same memory if the tensor is dense and on the host."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy()).view(as_dtype("bf16").numpy)
    return np.asarray(tensor.numpy())


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor over the memory of an array, or over that of a copy if nobody may write to it."""
    array = np.asarray(array)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == as_dtype("bf16").numpy:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], DType]:
    """Of a tensor or an array."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), dtype_of(value.dtype, "an argument")
    return value.shape, as_dtype(value.dtype)
