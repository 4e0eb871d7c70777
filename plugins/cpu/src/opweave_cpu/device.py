"""`CpuDevice`: the processor and the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from opweave.contract import BufferType, Caps, Kind, Limit, MemorySpace, Stream, Tunable, check_threads
from opweave.contract.kernels import import_kernels
from opweave.runtime.host.memory import HostMemory, NumPyMemory
from opweave.runtime.host.processor import cpu_name
from opweave.runtime.host.threads import ThreadPool
from opweave_cpu.decoded import DecodedType
from opweave_cpu.hardware import cpu_features
from opweave_cpu.huge_pages import HugePageType, has_huge_pages
from opweave_cpu.jit.compiler import why_not
from opweave_cpu.kernels import KERNELS
from opweave_cpu.node_memory import NodeType, memory_nodes
from opweave_cpu.stream import CpuStream
from opweave_cpu.tunables import TUNABLES, TUNABLES_OF_COMPILED, limit

__all__ = ["CpuDevice", "IsolatedCpuDevice"]


class _Processor(NumPyMemory):
    """The kernels of the CPU. ``device.open(threads=2)`` limits the threads of a stream."""

    kind = Kind.CPU
    threaded = True
    kernels = KERNELS

    def __init__(self) -> None:
        self.description = cpu_name()

    @cached_property
    def _decoded(self) -> DecodedType:
        return DecodedType(self)  # made when asked for: its space is that of the device

    @cached_property
    def _huge_pages(self) -> tuple[HugePageType, ...]:
        return (HugePageType(self),) if has_huge_pages() else ()

    @cached_property
    def _nodes(self) -> tuple[NodeType, ...]:
        return tuple(NodeType(self, node) for node in memory_nodes())

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        """Ordinary memory, weights kept decoded, memory in huge pages where the system has them, and memory of each
        NUMA node where there are several."""
        return self.default_buffer_type, self._decoded, *self._huge_pages, *self._nodes

    @property
    def tunables(self) -> Sequence[Tunable]:
        """The tunables of `opweave_cpu.tunables`, which all CPU devices of the process share."""
        return TUNABLES if why_not() is not None else (*TUNABLES, *TUNABLES_OF_COMPILED)

    @property
    def limits(self) -> Sequence[Limit]:
        """The limits of all kernels, and the tunables."""
        if why_not() is None:
            import_kernels("opweave_cpu.jit")
        return (*self.tunables, *limit)

    @property
    def caps(self) -> Caps:
        """Streams fuse where there is a compiler, although those of `stream_class` do not."""
        return super().caps if why_not() is not None else self._compiling

    @cached_property
    def _compiling(self) -> Caps:
        return super().caps._replace(fuse=True)

    @property
    def reads_block_tables(self) -> bool:
        """Compiled functions do."""
        if why_not() is not None:
            return False
        from opweave_cpu.jit.compiler import has_fma

        return has_fma()

    def features(self) -> Mapping[str, Any]:
        return cpu_features()

    def _open(self, *, threads: int | str | ThreadPool | None = None, **params: Any) -> Stream:
        if params:
            return super()._open(**params)  # which refuses unknown parameters
        count = check_threads(threads) if isinstance(threads, str) else threads
        if why_not() is None:
            from opweave_cpu.jit.stream import CompilingStream

            return CompilingStream(self, count)
        return CpuStream(self, count)


class CpuDevice(_Processor, HostMemory):
    """The CPU, computing in host memory."""


class IsolatedCpuDevice(_Processor):
    """A CPU device whose memory is a space of its own, which neither the host nor another device reaches, like that of
    a GPU. It is for testing code for several devices on any machine.

    Args:
        number: the part of its name after the colon.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.id = str(number)
        self.space = MemorySpace(f"cpu:{number}")
