"""Between tensors of torch, arrays of NumPy and dtypes of opweave. Memory of the host is shared, never copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

import opweave as ow
from opweave.errors import DTypeError
from opweave.graph.dtypes import DType, as_dtype
from opweave.graph.tensor import Tensor
from opweave_torch.memory import TORCH_DTYPES

__all__ = ["Array", "Complex", "array_of", "as_real", "dtype_of", "shape_and_dtype", "tensor_of"]

Array = np.ndarray[Any, Any]
OURS: Final = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Complex:
    """Complex numbers while a graph is traced.

    Attributes:
        real, imag: their parts, of one shape and dtype.
    """

    real: Tensor
    imag: Tensor

    @classmethod
    def of(cls, pairs: Tensor) -> Complex:
        """Of tensors whose last axis holds the real and the imaginary part."""
        return cls(pairs[..., 0], pairs[..., 1])

    @property
    def pairs(self) -> Tensor:
        """The parts along a new last axis."""
        return ow.concat([ow.expand_dims(self.real, -1), ow.expand_dims(self.imag, -1)], -1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.real.shape

    @property
    def size(self) -> int:
        return self.real.size


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex values with their parts along a new last axis; others as they are."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


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
