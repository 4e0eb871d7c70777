"""A backend that is not finished: it adds rightly, its exp is wrong, and it lists a kernel that it never runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from opweave.contract import Arg, Backend, Call, Device, Kind, Step, Stream
from opweave.contract.kernels import KernelTable
from opweave.runtime.host.memory import HostMemory

kernels = KernelTable(dtypes="f32", layout="dense")


class HalfDone(HostMemory):
    kind = Kind.ACCEL
    kernels = kernels

    def mem_info(self) -> tuple[int, int]:
        return 2, 1


class HalfDoneBackend(Backend):
    def devices(self) -> list[Device]:
        return [HalfDone()]


@kernels("add")
def add(stream: Stream, op: str, out: Arg, a: Arg, b: Arg) -> Call:
    return partial(np.add, a.view, b.view, out.view)


@kernels("exp")
def exp(stream: Stream, op: str, out: Arg, x: Arg, **attrs: Any) -> Call:
    return partial(np.exp2, x.view, out.view)


def never(step: Step) -> str | None:
    return "not yet"


@kernels("tanh", when=never)
def tanh(stream: Stream, op: str, out: Arg, x: Arg) -> Call:
    return partial(np.tanh, x.view, out.view)
