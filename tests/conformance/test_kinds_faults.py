"""Faults in memory with a form of its own, each of which its check finds and no other one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from opweave.contract import BufferType, Step
from opweave.graph.dtypes import DType, f32
from opweave.graph.layout import Shape
from opweave.graph.tensor import Tensor
from opweave.registry import Registry
from opweave.runtime.host.repacked import RepackedType
from opweave_conformance.suite import Suite
from tests.support.sound_device import SoundBackend, SoundDevice

CHECKS = ["memory-kinds-*", "kinds-*", "memory-buffer-types"]


class Columns(RepackedType):
    """Matrices in f32, transposed."""

    @property
    def name(self) -> str:
        return f"{self.device.name}.columns"

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        return None if dtype is f32 and len(shape) == 2 else "it keeps matrices in f32"

    def _pack(self, data: np.ndarray[Any, Any], dtype: DType, shape: Shape) -> Any:
        return data.view(np.float32).reshape(shape).T.copy()

    def _unpack(self, packed: Any, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(packed.T)


class Packing(SoundDevice):
    def __init__(self) -> None:
        super().__init__()
        self._columns = Columns(self)

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        return self.default_buffer_type, self._columns

    def _reads(self, kind: BufferType) -> bool:
        return isinstance(kind, Columns)

    def _why_not(self, step: Step) -> str | None:
        packed = [i for i, arg in enumerate(step.srcs) if isinstance(arg.buffer_type, Columns)]
        if packed and (step.op != "linear" or packed != [1]):
            return "it reads packed weights of linear only"
        return super()._why_not(step)

    def run_step(self, step: Step) -> None:
        self.store(step, *[self.value(arg) for arg in step.srcs])

    def value(self, arg: Any) -> np.ndarray[Any, Any]:
        packed = isinstance(arg.buffer_type, Columns)
        return np.ascontiguousarray(arg.handle.value.T) if packed else np.array(self.view(arg))


class PackingBackend(SoundBackend):
    def devices(self) -> list[Any]:
        return [Packing()]


def failures() -> dict[str, str]:
    registry = Registry(environ={}, search=[])
    registry.register(PackingBackend)
    suite = Suite("sound", using=registry, only=CHECKS)
    results = [suite.perform(item) for item in suite.items]
    found = {result.id: result for result in results}
    assert len(found) == 5
    return {name: result.reason for name, result in found.items() if result.status != "passed"}


def test_sound_memory_passes() -> None:
    assert failures() == {}


def negated(self: Columns, packed: Any, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
    return -np.ascontiguousarray(packed.T)


def rounded(self: Columns, packed: Any, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(packed.T.astype(np.float16).astype(np.float32))


def half_of_it(self: Columns, tensor: Tensor) -> int:
    return tensor.nbytes // 2


def shifted(self: Columns, mem: Any, offset: int, size: int, at: int, out: memoryview) -> None:
    whole = memoryview(bytearray(size))
    self._download(mem, offset, whole)
    out[:] = bytes(len(out))


def as_it_lies(self: Packing, arg: Any) -> np.ndarray[Any, Any]:
    packed = isinstance(arg.buffer_type, Columns)
    return arg.handle.value.reshape(arg.shape) if packed else np.array(self.view(arg))


def any_tensor(self: Columns, tensor: Tensor) -> None:
    """Does not refuse what the memory does not keep."""


def any_usage(self: Columns, usage: Any) -> None:
    """Does not refuse what the memory is not for."""


@pytest.mark.parametrize(
    ("cls", "method", "fault", "found"),
    [
        (Columns, "_unpack", negated, {"memory-kinds-whole", "memory-buffer-types", "kinds-copies"}),
        (Columns, "_unpack", rounded, {"memory-kinds-whole", "memory-buffer-types", "kinds-copies"}),
        (Columns, "alloc_size", half_of_it, {"memory-kinds-whole", "memory-buffer-types"}),
        (Columns, "_read_part", shifted, {"memory-kinds-whole"}),
        (Columns, "check_tensor", any_tensor, {"memory-kinds-refused"}),
        (Columns, "check_usage", any_usage, {"memory-kinds-refused"}),
        (Packing, "value", as_it_lies, {"kinds-products"}),
        (Packing, "_reads", lambda self, kind: False, {"kinds-products"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_found_by_its_own_checks(
    cls: type, method: str, fault: Callable[..., Any], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, method, fault)
    assert set(failures()) >= found
    assert set(failures()) <= found | ({"kinds-products", "kinds-copies"} if method == "alloc_size" else set())
