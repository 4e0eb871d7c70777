"""Special memory: kernels are asked with the kind of memory that each source lies in, and get what it prepared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import BufferType, Step
from opweave.contract.kernels import KernelTable
from opweave.contract.space import as_bytes
from opweave.graph.tensor import Tensor
from opweave.host.device import HostDevice
from tests.support.devices import Separate, reference_kernel

F = np.float32


class Transposed(BufferType):
    """Keeps matrices transposed, and remembers their shape as the handle of the tensor."""

    @property
    def is_raw(self) -> bool:
        return False

    def _init(self, mem: Any, offset: int, tensor: Tensor) -> Any:
        return tensor.shape

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        matrix = np.frombuffer(data, F).reshape(4, 4)
        super()._upload(mem, offset, as_bytes(np.ascontiguousarray(matrix.T)))

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        raw = np.empty((4, 4), F)
        super()._download(mem, offset, as_bytes(raw, writable=True))
        out[:] = as_bytes(np.ascontiguousarray(raw.T))


def is_transposed(step: Step) -> str | None:
    return None if isinstance(step.srcs[1].buffer_type, Transposed) else "the weight is not transposed"


def is_ordinary(step: Step) -> str | None:
    return "the weight is transposed" if isinstance(step.srcs[1].buffer_type, Transposed) else None


class Repacking(Separate):
    """Multiplies transposed weights with one kernel, ordinary ones with another."""

    def __init__(self, name: str, *, ordinary: bool = True) -> None:
        super().__init__(name)
        self.seen: list[str] = []
        self.kernels = KernelTable("f32", "strided")

        @self.kernels("linear", when=is_transposed)
        def transposed(stream, op, out, x, w):
            assert w.handle == (4, 4)
            self.seen.append("transposed")
            return lambda: np.copyto(out.view, x.view @ w.view)

        if ordinary:

            @self.kernels("linear", when=is_ordinary)
            def plain(stream, op, out, x, w):
                self.seen.append("ordinary")
                return reference_kernel(stream, op, out, x, w)


def weight_in(kind: BufferType, values: np.ndarray) -> Tensor:
    w = ow.weights({"w": ow.Spec((4, 4))})["w"]
    buffer = kind.alloc(64)
    ow.place(w, buffer)
    buffer.upload(0, values)
    return w


@pytest.fixture
def values() -> np.ndarray:
    return np.arange(16, dtype=F).reshape(4, 4)


def test_each_kind_of_memory_gets_its_kernel(values):
    device = Repacking("g")
    x = ow.input("x", (2, 4))
    special = weight_in(Transposed(device, "g.transposed"), values)
    usual = ow.weights({"w": values}, device=device)["w"]
    s = ow.Scheduler([device, HostDevice()])
    v = np.ones((2, 4), F)
    np.testing.assert_array_equal(s.build(ow.linear(x, special)).run(x=v), v @ values.T)
    np.testing.assert_array_equal(s.build(ow.linear(x, usual)).run(x=v), v @ values.T)
    assert device.seen == ["transposed", "ordinary"]
    np.testing.assert_array_equal(ow.read(special), values)


def test_a_device_that_takes_only_repacked_weights_refuses_ordinary_ones(values):
    device = Repacking("g", ordinary=False)
    x = ow.input("x", (2, 4))
    special = weight_in(Transposed(device, "g.transposed"), values)
    s = ow.Scheduler([device, HostDevice()])
    assert s.partition(ow.linear(x, special)).device_of(ow.linear(x, special)) is device
    usual = ow.linear(x, ow.weights({"w": values})["w"])
    plan = s.partition(usual)
    assert plan.device_of(usual) is not device
    assert "not on g: the weight is not transposed" in plan.explain()


def test_special_memory_is_unpacked_for_a_device_that_cannot_reach_it(values):
    device, other = Repacking("g"), Repacking("h")
    x = ow.input("x", (2, 4))
    y = ow.linear(x, weight_in(Transposed(device, "g.transposed"), values))
    program = ow.Scheduler([other, device]).build(y, {y: other})
    v = np.ones((2, 4), F)
    np.testing.assert_array_equal(program.run(x=v), v @ values.T)
    assert other.seen == ["ordinary"]
