"""A CPU device on its own, and a way to run one operation on arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opweave.contract import Arg, Step, Stream
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides
from opweave_cpu import CpuDevice

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _declining(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about NumPy's kernels; those of compiled ones decide otherwise."""
    monkeypatch.setenv("OPWEAVE_CPU_JIT", "0")


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled where they can be."""
    monkeypatch.delenv("OPWEAVE_CPU_JIT", raising=False)


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice()


def place(device: CpuDevice, array: Array) -> Arg:
    """The array in memory of the device: transposed, if its last two axes are."""
    dtype = as_dtype(array.dtype)
    buffer = device.alloc(array.nbytes)
    turned = array.ndim > 1 and array.strides[-1] > array.strides[-2]
    packed = np.ascontiguousarray(array.swapaxes(-1, -2) if turned else array)
    buffer.upload(0, packed)
    strides = dense_strides(packed.shape, dtype)
    if turned:
        strides = (*strides[:-2], strides[-1], strides[-2])
    return Arg(buffer, 0, dtype, array.shape, strides)


@pytest.fixture
def apply(device: CpuDevice) -> Callable[..., Array]:
    """``apply(op, out, *srcs, **attrs)``: run ``op`` into an array like ``out`` and return it."""

    def run(op: str, out: Array, *srcs: Array, stream: Stream | None = None, **attrs: Any) -> Array:
        target = place(device, out)
        step = Step(op, target, tuple([place(device, src) for src in srcs]), attrs)
        (stream or device.open()).run([step])
        return target.view

    return run


@pytest.fixture
def bind(device: CpuDevice) -> Callable[..., Any]:
    """``bind(op, out, *srcs, **attrs)``: the call that a plan would make."""

    def call(op: str, out: Array, *srcs: Array, **attrs: Any) -> Any:
        step = Step(op, place(device, out), tuple([place(device, src) for src in srcs]), attrs)
        return device.open().compile([step]).calls[0]

    return call
