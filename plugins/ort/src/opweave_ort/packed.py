"""`PackedType`: memory for quantized weights in the form of ``MatMulNBits`` (`opweave_ort.weights`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Step
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape, nbytes
from opweave.runtime.host.repacked import RepackedType
from opweave_ort.weights import FOUR_BITS, REVERSIBLE, Form, form_of, pack, pieces, unpack

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.tensor import Tensor

__all__ = ["PackedMatrix", "PackedType"]


class PackedMatrix:
    """What `PackedType` makes of a tensor.

    Attributes:
        arrays: name of a piece -> the piece, as sessions read it.
        stored: the tensor's bytes, where ``arrays`` do not determine them; else ``None``.
    """

    __slots__ = ("arrays", "stored")

    def __init__(self, data: np.ndarray[Any, Any], dtype: DType, form: Form) -> None:
        self.arrays: Final = pack(data, dtype, form)
        # NaN scales may lose bits on the way to f32 and back.
        numbers = [self.arrays[name] for name in ("scales", "offsets") if name in self.arrays]
        reversible = dtype.name in REVERSIBLE and all(np.isfinite(array).all() for array in numbers)
        self.stored: Final = None if reversible else data.copy()


class PackedType(RepackedType):
    """Quantized matrices of weights, repacked without rounding for ONNX Runtime's products: ``"ort:cpu.packed"``, or
    ``"ort:cpu.packed_int8"`` for products in int8 with types of more than 16 levels.

    Args:
        device: whose products read them.
        form: the form in which they are kept.
    """

    def __init__(self, device: Device, form: Form) -> None:
        super().__init__(device)
        self.form: Final = form

    @property
    def name(self) -> str:
        return f"{self.device.name}.packed{'_int8' if self.form == 'bytes' else ''}"

    def alloc_size(self, tensor: Tensor) -> int:
        packed = pieces(tensor.dtype, tensor.shape, self.form)
        stored = 0 if tensor.dtype.name in REVERSIBLE else tensor.nbytes
        return stored + sum([nbytes(piece.shape, piece.dtype) for piece in packed])

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        if not dtype.is_quantized:
            return f"it keeps quantized types, not {dtype}, which ONNX Runtime packs by itself, in each session"
        if self.form == "bytes" and dtype.name in FOUR_BITS:
            return f"products with {dtype} are of 4 bits in any precision"
        if len(shape) != 2 or 0 in shape:
            return "it keeps matrices only"
        return None

    def _pays(self, step: Step, source: int) -> bool:
        from opweave_ort.kernels import KERNELS

        if step.op != "linear" or source != 1:
            return False
        kernel = KERNELS.find(step)
        return kernel is not None and form_of(step.srcs[1].dtype, kernel.precision) == self.form

    def _pack(self, data: np.ndarray[Any, Any], dtype: DType, shape: Shape) -> PackedMatrix:
        return PackedMatrix(data.reshape(shape[0], -1), dtype, self.form)

    def _unpack(self, packed: PackedMatrix, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        return unpack(packed.arrays, dtype, self.form) if packed.stored is None else packed.stored
