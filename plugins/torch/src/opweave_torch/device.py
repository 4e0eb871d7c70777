"""`TorchCpuDevice`: torch's kernels for the CPU, in the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from opweave.contract import BufferType, Kind, Limit, Step, Stream, Tunable, flops
from opweave.graph.opdef import OPS
from opweave.runtime.host.memory import HostMemory
from opweave.runtime.host.processor import cpu_name
from opweave_torch.fusing import FusingCpuStream
from opweave_torch.groups import TorchCpuStream
from opweave_torch.kernels import kernels_for_cpu
from opweave_torch.options import Options
from opweave_torch.packed import packed_types
from opweave_torch.tunables import TUNABLES, limit

__all__ = ["TorchCpuDevice", "cpu_features", "is_worth_a_switch"]

SWITCH_FLOPS: Final = 1 << 20
"""Floating-point operations from which on a step saves more than the change of devices costs (some microseconds)."""


def is_worth_a_switch(step: Step) -> bool:
    """Whether torch's kernel for the CPU saves more time than the change of devices costs: of large products,
    attention and convolutions."""
    op = OPS.get(step.op)
    return op is not None and op.product and flops(step) >= SWITCH_FLOPS


class TorchCpuDevice(HostMemory):
    """torch's kernels for the CPU. Shares memory with every device that computes in this process: nothing is copied
    between it and ``cpu``, and large products, attention and convolutions of nodes placed on ``cpu`` are moved to it.

    ``device.open(threads=2, deterministic=True, compile=True)`` sets torch for the runs of a stream.
    """

    id = "cpu"
    kind = Kind.ACCEL
    threaded = True
    survives_fork = False  # torch's threads are OpenMP's, which a child would wait for
    kernels = kernels_for_cpu()
    stream_class: type[Stream] = TorchCpuStream

    def __init__(self) -> None:
        self.description = f"PyTorch on {cpu_name()}"
        self._packed = tuple([kind(self) for kind in packed_types()])

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        """The memory of the process, and weights packed for torch's products."""
        return (self.default_buffer_type, *self._packed)

    @property
    def tunables(self) -> Sequence[Tunable]:
        """Those of `opweave_torch.tunables`."""
        return TUNABLES

    @property
    def limits(self) -> Sequence[Limit]:
        """The limits of all kernels, and the tunables."""
        return (*self.tunables, *limit)

    def features(self) -> Mapping[str, Any]:
        """torch's version, the capability level and threads of its kernels, and its libraries."""
        return cpu_features()

    def _open(self, **params: Any) -> Stream:
        options = Options.of(params, ("threads", "deterministic", "compile"))
        return (FusingCpuStream if options.compile else TorchCpuStream)(self, options)

    def _wants(self, step: Step) -> bool:
        return is_worth_a_switch(step)


def cpu_features() -> dict[str, Any]:
    """torch's version, and its settings and libraries for the CPU."""
    backends = torch.backends
    return {
        "torch": torch.__version__,
        "capability": backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "mkl": backends.mkl.is_available(),
        "onednn": backends.mkldnn.is_available(),
        "openmp": backends.openmp.is_available(),
    }
