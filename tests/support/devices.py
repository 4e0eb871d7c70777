"""Devices for tests of the scheduler: NumPy kernels, each device with memory that no other one sees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from opweave.contract import Kind, MemorySpace, Step
from opweave.contract.kernels import KernelTable
from opweave.graph.opdef import OPS
from opweave.runtime.host.memory import HostMemory, NumPyMemory
from opweave_conformance.companions import SeparateMemory

BASIC = ("add", "sub", "mul", "neg", "exp", "relu", "scale", "matmul", "linear", "concat", "assign", "index_copy")


def reference_kernel(stream: Any, op: str, out: Any, *srcs: Any, **attrs: Any) -> Any:
    """The op's reference as a kernel that writes to the given operand."""
    definition, target, arrays = OPS[op], out.view, [s.view for s in srcs]

    def run() -> None:
        with np.errstate(all="ignore"):  # overflow gives infinities on every device
            if definition.writes:
                definition.reference(target, *arrays, **attrs)
            else:
                np.copyto(target, definition.reference(*arrays, **attrs), casting="unsafe")

    return run


def table(ops: Iterable[str] = BASIC, layout: Any = "strided", pack: bool = False) -> KernelTable:
    kernels = KernelTable("f32", layout)
    kernels(*ops, inplace=True)(reference_kernel)
    if pack:
        kernels("contiguous", layout="strided")(reference_kernel)
    return kernels


class Separate(NumPyMemory):
    """A device with a memory space of its own. For the ops in ``offload`` it asks for weights in host memory."""

    kind = Kind.GPU

    def __init__(
        self,
        name: str,
        ops: Iterable[str] = BASIC,
        *,
        layout: str = "strided",
        pack: bool = False,
        offload: Iterable[str] = (),
        max_buffer_size: int | None = None,
    ) -> None:
        self.name = name
        self.space = MemorySpace(name)
        self.kernels = table(ops, layout, pack)
        self.max_buffer_size = max_buffer_size
        self._offloaded = set(offload)

    def mem_info(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def _offload(self, step: Step) -> bool:
        return step.op in self._offloaded


class Beside(HostMemory):
    """An accelerator in the host's memory that wants some ops."""

    kind = Kind.ACCEL

    def __init__(self, name: str, ops: Iterable[str] = BASIC, want: Iterable[str] = ()) -> None:
        self.name = name
        self.kernels = table(ops)
        self._wanted = set(want)

    def _wants(self, step: Step) -> bool:
        return step.op in self._wanted


class Plain(HostMemory):
    """NumPy in the host's memory."""

    kind = Kind.CPU

    def __init__(self, name: str = "plain", ops: Iterable[str] = BASIC) -> None:
        self.name = name
        self.kernels = table(ops)


class Member(SeparateMemory):
    """Runs every operation, in memory of its own, under a name of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


__all__ = ["BASIC", "Beside", "Member", "Plain", "Separate", "reference_kernel", "table"]
