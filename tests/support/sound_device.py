"""A device that does everything right, every part of it a method that a test can replace by a wrong one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from opweave.contract import Arg, Backend, Call, Device, Group, Kind, Step, Stream, Usage
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from opweave_conformance.trial import array_of

CAPACITY = 1 << 30


class Block:
    """A block of the device's memory."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.data = np.empty(size, np.uint8)


class SoundStream(Stream):
    def _bind(self, group: Group) -> Call:
        return self.device.bind_step(group.steps[0])  # type: ignore[attr-defined]


class SoundDevice(Device):
    """Runs references on memory of its own, which has addresses, reuses freed ranges and counts free bytes."""

    kind = Kind.ACCEL
    description = "does everything right"
    stream_class = SoundStream
    kernels = HostDevice.kernels

    def __init__(self) -> None:
        self.used = 0
        self.end = 1 << 20
        self.pool: dict[int, list[Block]] = {}

    def mem_info(self) -> tuple[int, int]:
        return CAPACITY - self.used, CAPACITY

    # --- memory -----------------------------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> Block:
        if self.used + size > CAPACITY:
            raise MemoryError("the device is full")
        self.used += size
        waiting = self.pool.get(size)
        if waiting:
            return waiting.pop()
        block = Block(self.end, size)
        self.end += -(-size // self.alignment) * self.alignment
        return block

    def _free(self, mem: Block) -> None:
        self.used -= mem.size
        self.pool.setdefault(mem.size, []).append(mem)

    def _address(self, mem: Block) -> int:
        return mem.address

    def _upload(self, mem: Block, offset: int, data: memoryview) -> None:
        mem.data[offset : offset + len(data)] = data

    def _download(self, mem: Block, offset: int, out: memoryview) -> None:
        out[:] = mem.data[offset : offset + len(out)].data

    def _fill(self, mem: Block, offset: int, size: int, value: int) -> None:
        mem.data[offset : offset + size] = value

    def _copy(self, dst: Block, dst_offset: int, src: Block, src_offset: int, size: int) -> None:
        dst.data[dst_offset : dst_offset + size] = src.data[src_offset : src_offset + size].copy()

    # --- work -------------------------------------------------------------------------------------------------------

    def _why_not(self, step: Step) -> str | None:
        return None if step.op in OPS else f"no definition of {step.op}"

    def _inplace(self, step: Step) -> bool:
        return True

    def _workspace(self, step: Step) -> int:
        return 0

    def bind_step(self, step: Step) -> Call:
        return partial(self.run_step, step)

    def run_step(self, step: Step) -> None:
        self.store(step, *[np.array(self.view(arg)) for arg in step.srcs])

    def view(self, arg: Arg) -> np.ndarray[Any, Any]:
        return array_of(arg.mem.data, arg.offset, arg)

    def store(self, step: Step, *sources: np.ndarray[Any, Any]) -> None:
        definition, target = OPS[step.op], self.view(step.out)
        with np.errstate(all="ignore"):
            if definition.writes:
                definition.reference(target, *sources, **step.attrs)
            else:
                np.copyto(target, definition.reference(*sources, **step.attrs), casting="unsafe")


class SoundBackend(Backend):
    name = "sound"

    def devices(self) -> list[Device]:
        return [SoundDevice()]
