"""Operands as tensors: the views of buffers that kernels compute on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from opweave.contract import Arg, Rows, flat_rows
from opweave.errors import DTypeError, UnsupportedOpError
from opweave.graph.dtypes import DTYPES, DType
from opweave.graph.layout import Shape, Strides, reshape_strides

__all__ = [
    "TORCH_DTYPES", "byte_tensor", "dense_bytes", "one_tensor_a_window", "reshaped", "row_tensor", "shaped", "tensor",
    "torch_dtype",
]  # fmt: skip

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    DTYPES[ours]: theirs
    for ours, theirs in {
        "f64": torch.float64,
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "i64": torch.int64,
        "i32": torch.int32,
        "i16": torch.int16,
        "i8": torch.int8,
        "u8": torch.uint8,
        "bool": torch.bool,
    }.items()
}
"""torch's type for each plain one."""


_OURS: Final = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}


def dense_bytes(array: Tensor) -> tuple[Tensor, DType, Shape]:
    """A dense tensor's memory as a flat byte tensor, and its dtype and shape.

    Raises:
        DTypeError: a dtype that opweave does not have.
        UnsupportedOpError: it is not dense.
    """
    dtype = _OURS.get(array.dtype)
    if dtype is None:
        raise DTypeError(f"opweave has no dtype for {array.dtype}")
    if not array.is_contiguous():
        raise UnsupportedOpError(f"a tensor of strides {array.stride()} is not dense; call its contiguous() first")
    return array.detach().reshape(-1).view(torch.uint8), dtype, tuple(array.shape)


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's type for the elements; ``uint8`` (raw bytes) for quantized types."""
    return TORCH_DTYPES.get(dtype, torch.uint8)


def tensor(arg: Arg) -> Tensor:
    """The operand as a tensor over its own bytes: dtype, shape and strides of the operand, no copy.

    Quantized types show as ``uint8`` of shape ``(*leading, blocks, bytes of a block)``.
    """
    known = _SHARED.known
    if known is None:
        return shaped(_bytes_of(arg), arg.dtype, arg.shape, arg.strides)
    window = (id(arg.buffer), arg.offset, arg.dtype, arg.shape, arg.strides)
    found = known.get(window)
    if found is None:
        found = known[window] = shaped(_bytes_of(arg), arg.dtype, arg.shape, arg.strides)
    return found


def reshaped(arg: Arg, shape: Shape) -> Tensor | None:
    """The operand as a tensor of another shape, ``None`` where that needs a copy."""
    strides = reshape_strides(arg.shape, arg.strides, shape, arg.dtype)
    return None if strides is None else tensor(Arg(arg.buffer, arg.offset, arg.dtype, shape, strides))


class _Shared(threading.local):
    """The tensors made so far, by memory, dtype and layout, while this thread compiles a plan."""

    known: dict[Any, Tensor] | None = None


_SHARED: Final = _Shared()


@contextmanager
def one_tensor_a_window() -> Iterator[None]:
    """Operands of the same memory, dtype and layout become one tensor object, also of values that use it one after the
    other: a plan that runs touches fewer objects, which stay in the processor's caches."""
    outer, _SHARED.known = _SHARED.known, {}
    try:
        yield
    finally:
        _SHARED.known = outer


def shaped(whole: Tensor, dtype: DType, shape: Shape, strides: Strides) -> Tensor:
    """Flat bytes as a tensor of a dtype, shape and strides (in bytes)."""
    if dtype.block > 1:
        shape = (*shape[:-1], shape[-1] // dtype.block, dtype.itemsize)
        strides = (*strides[:-1], dtype.itemsize, 1)
    kind = torch_dtype(dtype)
    return whole.view(kind).as_strided(shape, [s // kind.itemsize for s in strides])


def _bytes_of(arg: Arg) -> Tensor:
    """The bytes from the operand's first element to past its last one, flat."""
    mem, window = arg.mem, slice(arg.offset, arg.offset + arg.span)
    if isinstance(mem, Tensor):
        return mem[window]
    if isinstance(mem, np.ndarray) and mem.dtype == np.uint8:
        return byte_tensor(mem[window])
    assert arg.buffer is not None
    return byte_tensor(arg.buffer.host_bytes(arg.offset, arg.span))  # of another backend in the same space


def byte_tensor(data: np.ndarray[Any, Any] | memoryview) -> Tensor:
    """A flat byte tensor over host memory, which it keeps alive."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch knows no read-only tensors and warns. What may be written is checked before plans are compiled.
    from ctypes import c_ubyte

    window = (c_ubyte * array.nbytes).from_address(array.__array_interface__["data"][0])
    window.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)


def row_tensor(rows: Rows) -> Tensor:
    """Rows of bytes of the host as a tensor over the same memory."""
    return byte_tensor(flat_rows(rows)).as_strided(rows.shape, rows.strides)
