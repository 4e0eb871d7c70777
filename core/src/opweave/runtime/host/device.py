"""The built-in backend ``host``: a device that runs the references of operations in the memory of this process.

A scheduler uses it for nodes that no other device supports: every operation runs here, correctly but slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract.backend import Backend
from opweave.contract.device import Kind
from opweave.contract.kernels import Kernel, KernelTable
from opweave.graph.opdef import OPS
from opweave.runtime.device import Device
from opweave.runtime.host.memory import HostMemory, NumPyMemory
from opweave.runtime.stream import Stream

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Call, Group, Step

__all__ = ["HostBackend", "HostDevice", "ReferenceKernels"]


class _References(KernelTable):
    """One kernel for every operation in `OPS`, which calls its reference."""

    def ops(self) -> set[str]:
        return {name for name, op in OPS.items() if not op.is_view}

    def candidates(self, op: str) -> list[Kernel]:
        known = OPS.get(op)
        return [_REFERENCE] if known is not None and not known.is_view else []


def _bind_reference(stream: Stream, op: str, out: Arg, *srcs: Arg, **attrs: Any) -> Call:
    definition = OPS[op]
    reference, target, arrays = definition.reference, out.view, [s.view for s in srcs]
    if definition.writes:
        return lambda: reference(target, *arrays, **attrs)

    def call() -> None:
        # Float64 results beyond the range of a narrower output become infinities, as on every device: no warning.
        with np.errstate(all="ignore"):
            np.copyto(target, reference(*arrays, **attrs), casting="unsafe")

    return call


class ReferenceKernels(NumPyMemory):
    """Device that runs the reference of any operation on any layout, in a memory space of its own."""

    kernels: KernelTable = _References("f32", "strided")

    def _why_not(self, step: Step) -> str | None:
        return None if self.kernels.candidates(step.op) else f"no definition of {step.op}"

    def _inplace(self, step: Step) -> bool:
        # A reference returns a new array before anything is written.
        return True

    def _workspace(self, step: Step) -> int:
        return 0

    def _open(self, **params: Any) -> Stream:
        return _HostStream(self) if not params else super()._open(**params)


class HostDevice(ReferenceKernels, HostMemory):
    """Device that runs the reference of any operation in host memory."""

    kind = Kind.HOST
    description = "NumPy references"


class _HostStream(Stream):
    def _bind(self, group: Group) -> Call:
        step = group.steps[0]
        return _bind_reference(self, step.op, step.out, *step.srcs, **step.attrs)


_REFERENCE: Final = Kernel(_bind_reference, frozenset(), frozenset(), "strided", True, None, None)


class HostBackend(Backend):
    """The backend of the core. It is always available and has the lowest priority."""

    name = "host"
    priority = -1000

    def devices(self) -> Sequence[Device]:
        return (HostDevice(),)
