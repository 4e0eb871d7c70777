"""A backend for a device with memory of its own, which computes in NumPy where real ones call a driver."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from opweave.contract import Arg, Backend, Call, Device, Kind, Step, Stream, Usage
from opweave.contract.kernels import KernelTable

kernels = KernelTable(dtypes="f32", layout="dense")
UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "exp": np.exp}


class Block:
    """A block of the device's memory, which only this module accesses."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)


class ExampleDevice(Device):
    kind = Kind.ACCEL
    kernels = kernels

    def _alloc(self, size: int, usage: Usage) -> Block:
        return Block(size)

    def _upload(self, mem: Block, offset: int, data: memoryview) -> None:
        mem.data[offset : offset + len(data)] = data

    def _download(self, mem: Block, offset: int, out: memoryview) -> None:
        out[:] = memoryview(mem.data)[offset : offset + len(out)]


class ExampleBackend(Backend):
    name = "example"

    def devices(self) -> list[Device]:
        return [ExampleDevice()]


def operand(arg: Arg) -> np.ndarray[Any, Any]:
    return np.frombuffer(arg.mem.data, np.float32, arg.size, arg.offset).reshape(arg.shape)


@kernels("add", "sub", "mul", "exp", inplace=True)
def pointwise(stream: Stream, op: str, out: Arg, *srcs: Arg) -> Call:
    return partial(UFUNCS[op], *map(operand, srcs), operand(out))


def without_bias(step: Step) -> str | None:
    return "a bias is not supported" if len(step.srcs) > 2 else None


@kernels("linear", when=without_bias)
def linear(stream: Stream, op: str, out: Arg, x: Arg, w: Arg) -> Call:
    return partial(np.matmul, operand(x), operand(w).T, operand(out))
