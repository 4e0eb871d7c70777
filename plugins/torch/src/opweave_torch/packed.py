"""Kinds of memory for weights of ``torch:cpu``: packed by oneDNN, quantized ones as f32 or bf16, and integers of 4 bits
as torch multiplies by them.

The operators have no public names. Where a version of torch lacks them, or they refuse a product, the device does not
offer that kind of memory, and weights are read as they lie.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opweave.graph.dtypes import DType, bf16, f32
from opweave.graph.layout import Shape
from opweave.ops.blocks import block_parts, dequantize
from opweave.runtime.host.repacked import RepackedType
from opweave_torch.memory import shaped, torch_dtype
from opweave_torch.native import int4_packed, int4_product, multiplies_bf16, packed_product
from opweave_torch.packed_weight import PackedWeight
from opweave_torch.tunables import limit

if TYPE_CHECKING:
    from opweave.contract import BufferType, Step
    from opweave.graph.tensor import Tensor as Leaf

__all__ = ["MOST_ROWS", "Int4Type", "PackedType", "RoundedType", "multiply_int4", "packed_types"]

MOST_ROWS: Final = limit("packed_rows", 4096, 1, 1 << 14)
"""Rows of a product from which on what packing saves does not pay for a second copy of the weights."""

MOST_INT4_ROWS: Final = 4
"""Rows up to which products with integers of 4 bits take less time than those with the values in bf16: of 4096 x 4096
weights on one core of an AMD EPYC, in milliseconds,

==================== ==== ==== ==== ==== ==== ====
rows                 1    4    8    16   128  512
==================== ==== ==== ==== ==== ==== ====
integers of 4 bits   1.0  1.7  3.4  6.7  52   217
values in bf16       2.0  1.7  2.4  3.5  20   80
values in f32        3.3  3.3  4.6  7.0  41   161
==================== ==== ==== ==== ==== ==== ====
"""

GROUP: Final = 32
"""Integers of 4 bits that share a scale."""

OUTPUTS: Final = 16
"""torch's products with integers of 4 bits take multiples of so many rows of weights."""


class PackedType(RepackedType):
    """Matrices of weights in the layout that oneDNN multiplies with: f32, bf16, and quantized ones decoded to f32,
    which keep their blocks too. A product then neither reorders nor decodes them."""

    decoded: DType = f32
    """The type of the values of quantized matrices."""

    @property
    def name(self) -> str:
        return f"{self.device.name}.packed"

    def computes_in(self, dtype: DType) -> DType:
        """The type of the products with a matrix of a dtype."""
        return self.decoded if dtype.is_quantized else dtype

    def alloc_size(self, tensor: Leaf) -> int:
        blocks = tensor.nbytes if tensor.dtype.is_quantized else 0
        return blocks + prod(tensor.shape) * self.computes_in(tensor.dtype).itemsize

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        if len(shape) != 2 or 0 in shape:
            return "it keeps matrices only"
        if dtype is bf16 and not multiplies_bf16():
            return "this processor has no instructions for bf16"
        if not (dtype.is_quantized or dtype in (f32, bf16)):
            return f"it keeps f32, bf16 and quantized types, not {dtype}"
        return None

    def _pays(self, step: Step, source: int) -> bool:
        x, w = step.srcs[0], step.srcs[source]
        if step.op != "linear" or source != 1:
            return False
        rows, size = prod(step.out.shape[:-1]), prod(w.shape)
        if rows > MOST_ROWS.value or x.dtype.name == "f64":
            return False
        if w.dtype.is_quantized:
            return True
        if w.dtype is bf16:  # also of a product in f32 that may be computed in bf16
            return size >= 1 << 14
        return x.dtype is f32 and rows * size >= (1 << 19 if size >= 1 << 18 else 1 << 21)

    def _pack(self, data: np.ndarray[Any, Any], dtype: DType, shape: Shape) -> PackedWeight:
        with torch.inference_mode():
            if dtype.is_quantized:
                blocks = data.copy().reshape(shape[0], -1)
                values = torch.from_numpy(dequantize(blocks, dtype)).to(torch_dtype(self.decoded))
                return PackedWeight(values, blocks)
            strides = (shape[1] * dtype.itemsize, dtype.itemsize)
            return PackedWeight(shaped(torch.from_numpy(data.copy()), dtype, shape, strides))

    def _unpack(self, packed: PackedWeight, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        if packed.blocks is not None:
            return packed.blocks
        return _bytes(packed.dense())


class RoundedType(PackedType):
    """Quantized matrices decoded to bf16, for programs that allow this precision."""

    decoded = bf16

    @property
    def name(self) -> str:
        return f"{self.device.name}.packed_bf16"

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        return super()._why_not(dtype, shape) if dtype.is_quantized else f"it keeps quantized types, not {dtype}"

    def _pays(self, step: Step, source: int) -> bool:
        return step.precision != "exact" and super()._pays(step, source)


class Int4Weight(NamedTuple):
    """What `Int4Type` makes of a tensor.

    Attributes:
        packed: the integers, in torch's order for this processor.
        scales: bf16, shape (blocks of a row, rows, 2): scale, and value of the integer 8.
        exact: scales and offsets of the blocks, f16 as stored: shape (rows, blocks of a row, 1 or 2).
    """

    packed: Tensor
    scales: Tensor
    exact: np.ndarray[Any, Any]


class Int4Type(RepackedType):
    """q4_0 and q4_1 in the form of torch's products in bf16 with integers of 4 bits. The scales are rounded to bf16, so
    only programs that allow this precision get such copies; the scales as they were are kept beside them."""

    @property
    def name(self) -> str:
        return f"{self.device.name}.int4"

    def alloc_size(self, tensor: Leaf) -> int:
        return tensor.nbytes + prod(tensor.shape) // GROUP * 2 * bf16.itemsize

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        if dtype.name not in ("q4_0", "q4_1"):
            return f"it keeps q4_0 and q4_1, not {dtype}"
        if len(shape) != 2 or 0 in shape or shape[0] % OUTPUTS:
            return f"it keeps matrices whose rows are a multiple of {OUTPUTS}"
        return None

    def _pays(self, step: Step, source: int) -> bool:
        rough = step.precision != "exact" and step.srcs[0].dtype.name in ("f32", "bf16", "f16")
        return rough and step.op == "linear" and source == 1 and prod(step.out.shape[:-1]) <= MOST_INT4_ROWS

    def _pack(self, data: np.ndarray[Any, Any], dtype: DType, shape: Shape) -> Int4Weight:
        rows = data.reshape(shape[0], -1)
        parts = block_parts(rows, dtype)
        signed = parts.offsets is None
        integers = torch.from_numpy(parts.integers.reshape(shape).astype(np.int32) + 8 * signed)
        scales = torch.from_numpy(parts.scales.reshape(shape[0], -1))
        middle = torch.zeros_like(scales)
        if parts.offsets is not None:
            middle = torch.from_numpy(parts.offsets.reshape(shape[0], -1)) + 8 * scales
        both = torch.stack([scales, middle], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
        heads = dtype.itemsize - GROUP // 2
        exact = rows.reshape(shape[0], -1, dtype.itemsize)[:, :, :heads].copy()
        with torch.inference_mode():
            return Int4Weight(int4_packed(integers), both, exact)

    def _unpack(self, packed: Int4Weight, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        # The order of the integers is torch's own: their products with rows of the identity are the integers less 8.
        outputs, inputs = shape
        blocks = inputs // GROUP
        found = np.empty((outputs, blocks, dtype.itemsize), np.uint8)
        heads = dtype.itemsize - GROUP // 2
        found[:, :, :heads] = packed.exact
        one = torch.zeros((blocks, outputs, 2), dtype=torch.bfloat16)
        one[:, :, 0] = 1
        with torch.inference_mode():
            for block in range(blocks):
                some = torch.zeros((GROUP, inputs), dtype=torch.bfloat16)
                some[:, block * GROUP : (block + 1) * GROUP] = torch.eye(GROUP)
                values = multiply_int4(some, packed._replace(scales=one)).to(torch.int16).t().numpy() + 8
                found[:, block, heads:] = values[:, : GROUP // 2] | values[:, GROUP // 2 :] << 4
        return found


def multiply_int4(x: Tensor, weight: Int4Weight) -> Tensor:
    """``x @ weight.T`` of rows in bf16, a new tensor."""
    return int4_product(x, weight.packed, GROUP, weight.scales)


@cache
def packed_types() -> tuple[type[BufferType], ...]:
    """The kinds of memory for which this torch and the processor have what it takes, tried out with a small product."""
    return tuple(
        [
            kind
            for kind, works in ((Int4Type, _int4_works), (RoundedType, _rounding_pays), (PackedType, _packing_works))
            if works()
        ]
    )


def _bytes(dense: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = dense.contiguous().view(torch.uint8).numpy()
    return array


def _rounding_pays() -> bool:
    return multiplies_bf16() and _packing_works()


def _packing_works() -> bool:
    matrix = torch.arange(64.0).reshape(8, 8)
    try:
        with torch.inference_mode():
            weight = PackedWeight(matrix)
            same = torch.equal(weight.dense(), matrix)
            product = packed_product(matrix, weight.packed, None)
            return bool(same and torch.allclose(product, matrix @ matrix.T))
    except Exception:  # whatever another version raises
        return False


def _int4_works() -> bool:
    integers = torch.arange(16 * GROUP, dtype=torch.int32).reshape(16, GROUP) % 16
    scales = torch.zeros((1, 16, 2), dtype=torch.bfloat16)
    scales[:, :, 0] = 1
    try:
        with torch.inference_mode():
            packed = int4_packed(integers)
            rows = torch.eye(GROUP, dtype=torch.bfloat16)
            product = multiply_int4(rows, Int4Weight(packed, scales, np.empty(0)))
            return bool(torch.equal(product.t().to(torch.int32), integers - 8))
    except Exception:
        return False
