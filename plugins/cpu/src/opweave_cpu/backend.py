"""`CpuBackend`: what the plugin registers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opweave.contract import Arg, Backend, Call, CollectiveSupport, Device, Stream, check_threads
from opweave.contract.collectives import CollectiveKind
from opweave.errors import Broken
from opweave.graph.dtypes import DType
from opweave.runtime.host.sums import Sum
from opweave_cpu.device import CpuDevice, IsolatedCpuDevice
from opweave_cpu.gathering import Gathering
from opweave_cpu.hardware import cpu_features
from opweave_cpu.threads import THREADS

__all__ = ["DEVICES_VARIABLE", "CpuBackend"]

DEVICES_VARIABLE: Final = "OPWEAVE_CPU_DEVICES"


class CpuBackend(Backend):
    """One device, ``cpu``; or several with memories of their own, where ``OPWEAVE_CPU_DEVICES`` asks for them."""

    def devices(self) -> Sequence[Device]:
        """``cpu``, or ``cpu:0 ... cpu:N-1`` where ``OPWEAVE_CPU_DEVICES=N`` with N of at least 2.

        Raises:
            Broken: the variable holds no positive whole number.
        """
        count = _count(os.environ.get(DEVICES_VARIABLE, "").strip() or "1")
        if count == 1:
            return (CpuDevice(),)
        return tuple(IsolatedCpuDevice(number) for number in range(count))

    def why_no_device(self, id: str) -> str:
        """Which value of the variable shows a device of this number."""
        if not (id.isascii() and id.isdigit()):
            return ""
        return f"With {DEVICES_VARIABLE}={max(2, int(id) + 1)} there are cpu:0 to cpu:{max(1, int(id))}."

    def set_threads(self, n: int | None) -> None:
        """Use ``n`` threads in streams that were opened without ``threads``; ``None``: as many as there are cores.

        This holds for products from the next run on, and for other kernels in plans compiled from now on. BLAS has one
        limit for the whole process: other users of NumPy get it too.

        Raises:
            PluginError: ``n`` is no positive whole number.
        """
        THREADS.default = None if n is None else check_threads(n)

    def collective_support(
        self, kind: CollectiveKind, devices: Sequence[Device], dtype: DType, size: int
    ) -> CollectiveSupport | None:
        """``None`` for block types. Each device adds, or puts together, what it reads in the memory of the others."""
        return CollectiveSupport("shards", together=False) if dtype.block == 1 else None

    def bind_collective(self, kind: CollectiveKind, stream: Stream, outs: Sequence[Arg], parts: Sequence[Arg]) -> Call:
        """The call by which one device does its share of a collective; see `opweave.contract.Collectives`."""
        make = Gathering if kind == "all_gather" else Sum
        return make(outs[0].view, [part.view for part in parts])

    def features(self) -> Mapping[str, Any]:
        """BLAS, its threads and the CPU's instruction sets."""
        return cpu_features()


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise Broken(
        f"{DEVICES_VARIABLE}={text!r} is no number of devices",
        remedy=f"unset {DEVICES_VARIABLE}, or set it to a whole number: 2 shows cpu:0 and cpu:1",
    )
