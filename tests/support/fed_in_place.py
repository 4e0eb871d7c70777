"""A device in host memory whose calls read inputs where they are fed, and know the addresses of their operands only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_char
from typing import Any

import numpy as np

from opweave.contract import Arg, Backend, Call, Device, Group, Kind, Step, Stream
from opweave.graph.opdef import OPS
from opweave.runtime.host.memory import HostMemory
from opweave.runtime.host.storage import array_shape


def array_at(address: int, arg: Arg) -> np.ndarray[Any, Any]:
    """An operand whose first element lies at an address."""
    memory = np.frombuffer(memoryview((c_char * arg.span).from_address(address)), np.uint8)
    return np.ndarray(array_shape(arg.shape, arg.dtype), arg.dtype.numpy, memory, 0, arg.strides)


class InPlaceCall:
    """A step by its reference. ``fed`` says where values lie that were fed: number -> (operand, address)."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.fed: dict[int, tuple[Arg, int]] = {}

    def read(self, arg: Arg) -> np.ndarray[Any, Any]:
        if arg.value not in self.fed:
            return arg.view
        whole, address = self.fed[arg.value]
        return array_at(address + arg.offset - whole.offset, arg)

    def __call__(self) -> None:
        definition, target = OPS[self.step.op], self.step.out.view
        sources = [self.read(src) for src in self.step.srcs]
        with np.errstate(all="ignore"):
            if definition.writes:
                definition.reference(target, *sources, **self.step.attrs)
            else:
                np.copyto(target, definition.reference(*sources, **self.step.attrs), casting="unsafe")


class InPlaceStream(Stream):
    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        return [Group((step,)) for step in steps]

    def _bind(self, group: Group) -> Call:
        return InPlaceCall(group.steps[0])

    def _bind_feed(self, call: Call, arg: Arg) -> Callable[[int], bool] | None:
        assert isinstance(call, InPlaceCall)

        def read(address: int) -> bool:
            call.fed[arg.value] = arg, address
            self.device.fed.append(address)  # type: ignore[attr-defined]
            return True

        return read


class InPlaceDevice(HostMemory):
    """Runs every operation. ``fed`` has the addresses that its calls were told."""

    kind = Kind.ACCEL
    stream_class = InPlaceStream

    def __init__(self) -> None:
        self.fed: list[int] = []

    def _why_not(self, step: Step) -> str | None:
        return None if step.op in OPS else f"no definition of {step.op}"


class InPlaceBackend(Backend):
    name = "in-place"

    def devices(self) -> list[Device]:
        return [InPlaceDevice()]
