"""A device of immutable arrays: it computes by functions over `Array` objects, which stand for those of a library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opweave.contract import Arg, Backend, Device, Kind, Step, Stream
from opweave.functional import ArrayDevice, ArrayLibrary, evaluate
from opweave.graph.layout import array_shape
from opweave.graph.opdef import OPS

DLPACK = (12, 7)
"""A type of device for extensions of DLPack, whose memory the host does not read."""


class Array:
    """An array that nothing writes. Once it was donated it cannot be read any more."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values: np.ndarray[Any, Any] | None = values
        self.shape, self.dtype = values.shape, values.dtype

    @property
    def values(self) -> np.ndarray[Any, Any]:
        if self._values is None:
            raise RuntimeError("this array was donated")
        return self._values

    def donate(self) -> None:
        if self._values is not None and self._values.flags.owndata:
            self._values.fill(0)  # whoever reads the memory nevertheless sees that
        self._values = None

    def __dlpack__(self, **params: Any) -> Any:
        return self.values.__dlpack__(**params)

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK


class Library(ArrayLibrary):
    """NumPy behind `Array`. ``moved`` counts bytes that were copied from and to the host."""

    def __init__(self) -> None:
        self.moved = 0

    def from_host(self, array: np.ndarray[Any, Any], borrowed: bool) -> Array:
        self.moved += array.nbytes
        return Array(np.array(array))

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        self.moved += array.values.nbytes
        return array.values

    def adopt(self, array: Any) -> Array:
        if not isinstance(array, Array):
            raise BufferError("not one of this library")
        return array

    def copy(self, array: Array) -> Array:
        return Array(array.values.copy())

    def reshape(self, array: Array, shape: Sequence[int]) -> Array:
        return Array(array.values.reshape(shape))

    def transpose(self, array: Array, axes: Sequence[int]) -> Array:
        return Array(array.values.transpose(axes))

    def broadcast_to(self, array: Array, shape: Sequence[int]) -> Array:
        return Array(np.broadcast_to(array.values, shape))

    def take(self, array: Array, index: Any) -> Array:
        return Array(array.values[index])

    def updated(self, array: Array, index: Any, values: Array) -> Array:
        result = array.values.copy()
        result[index] = values.values
        return Array(result)


class ArrayStream(Stream):
    """Computes by the references of operations."""

    compiled: list[Sequence[Step]]

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.compiled = device.compiled  # type: ignore[attr-defined]

    def _compile_functional(
        self, steps: Sequence[Step], inputs: Sequence[Arg], outputs: Sequence[Arg], donated: Sequence[int]
    ) -> Callable[..., Sequence[Array]]:
        self.compiled.append(steps)
        library = self.device.library  # type: ignore[attr-defined]

        def function(*arrays: Array) -> Sequence[Array]:
            results = evaluate(library, self.apply, steps, inputs, outputs, arrays)
            results = [Array(np.array(result.values, order="C")) for result in results]
            for i in donated:
                arrays[i].donate()
            return results

        return function

    @staticmethod
    def apply(step: Step, *sources: Array) -> Array:
        definition, arrays = OPS[step.op], [source.values for source in sources]
        with np.errstate(all="ignore"):
            if definition.writes:
                target = arrays[0].copy()
                definition.reference(target, *arrays[1:], **step.attrs)
            else:
                target = np.empty(array_shape(step.out.shape, step.out.dtype), step.out.dtype.numpy)
                np.copyto(target, definition.reference(*arrays, **step.attrs), casting="unsafe")
        return Array(target)


class FunctionalDevice(ArrayDevice):
    """Runs every operation. ``compiled`` has the steps of each structure that was compiled."""

    kind = Kind.ACCEL
    stream_class = ArrayStream
    dlpack_device = DLPACK
    library: Library

    def __init__(self) -> None:
        self.library = Library()
        self.compiled: list[Sequence[Step]] = []

    def _why_not(self, step: Step) -> str | None:
        return None if step.op in OPS else f"no definition of {step.op}"


class FunctionalBackend(Backend):
    name = "functional"

    def devices(self) -> list[Device]:
        return [FunctionalDevice()]
