"""`DecodedType`: weights of ``cpu`` that are kept in the type that products are computed in."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.graph.dtypes import DType, f32
from opweave.graph.layout import Shape
from opweave.ops.blocks import dequantize
from opweave.runtime.host.repacked import RepackedType
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.jit.supported import BLOCKS, VECTOR
from opweave_cpu.tunables import limit

if TYPE_CHECKING:
    from opweave.contract import Step
    from opweave.graph.tensor import Tensor

__all__ = ["DecodedType", "DecodedWeight"]

MOST_ROWS: Final = limit("decoded_rows", 256, 1, 1 << 12)
"""Rows of a product from which on decoding takes less than a tenth of its time."""


class DecodedWeight(NamedTuple):
    """What `DecodedType` makes of a tensor.

    Attributes:
        stored: its bytes, shape (rows, bytes of a row).
        values: its values in f32.
    """

    stored: np.ndarray[Any, Any]
    values: np.ndarray[Any, np.dtype[np.float32]]


class DecodedType(RepackedType):
    """Matrices of weights that BLAS cannot read as they lie, quantized or of a half type, in f32 beside their bytes:
    ``buffer_type="cpu.decoded"``. Products read the f32, and decode nothing."""

    @property
    def name(self) -> str:
        return f"{self.device.name}.decoded"

    def alloc_size(self, tensor: Tensor) -> int:
        return tensor.nbytes + prod(tensor.shape) * f32.itemsize

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        if len(shape) != 2 or 0 in shape:
            return "it keeps matrices only"
        if not (dtype.is_quantized or dtype.is_half):
            return f"it keeps quantized and half types, not {dtype}, which BLAS reads as it lies"
        return None

    def _pays(self, step: Step, source: int) -> bool:
        weights = step.srcs[source]
        whole = weights.dtype.is_half and weights.shape[-1] % VECTOR == 0
        if (weights.dtype.name in BLOCKS or whole) and why_not() is None:
            return False  # compiled functions read them as they lie, in less time than f32
        rows = prod(step.out.shape[:-1])
        return step.op == "linear" and source == 1 and rows <= MOST_ROWS.value and step.out.dtype.name != "f64"

    def _pack(self, data: np.ndarray[Any, Any], dtype: DType, shape: Shape) -> DecodedWeight:
        stored = data.copy().reshape(shape[0], -1)
        if dtype.is_quantized:
            return DecodedWeight(stored, dequantize(stored, dtype))
        return DecodedWeight(stored, stored.view(dtype.numpy).astype(np.float32))

    def _unpack(self, packed: DecodedWeight, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        return packed.stored
