"""Devices with memory of their own: `TorchAccelerator`, and what CUDA (ROCm), XPU and MPS have besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final
from weakref import finalize

import torch
from torch import Tensor

from opweave.contract import BufferType, Device, Kind, Offloading, Rows, Step, Stream, Usage
from opweave.errors import Unavailable, UnsupportedOpError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape, Strides, span
from opweave.runtime.host.memory import host_memory_info
from opweave.runtime.host.pinned import PinnedMemory
from opweave.runtime.host.reservations import RESERVATIONS
from opweave_torch.health import REMEDY, try_kernel, why_no_kernels
from opweave_torch.kernels import KERNELS, WITH_BF16, kernels_for_cpu
from opweave_torch.memory import byte_tensor, dense_bytes, row_tensor, shaped
from opweave_torch.native import inference_mode
from opweave_torch.options import Options, check_cublas
from opweave_torch.queues import FusingQueueStream, MpsStream, QueueStream

__all__ = [
    "CudaDevice", "MpsDevice", "PageLockedMemory", "PinningAccelerator", "SeparateCpuDevice", "TorchAccelerator",
    "XpuDevice",
]  # fmt: skip


_DLPACK_TYPES: Final = {"cuda": 10 if torch.version.hip else 2, "xpu": 14, "mps": 8}


class TorchAccelerator(Device):
    """A device of PyTorch with memory of its own; its memory is handed out by torch's allocator.

    Args:
        target: torch's name of the device.

    Attributes:
        target: as given.
        api: torch's module for devices of this type: ``torch.cuda``, ``torch.xpu``, ...
    """

    kernels = KERNELS
    stream_class: type[Stream] = QueueStream
    fusing_class: type[Stream] = FusingQueueStream
    parameters: tuple[str, ...] = ("deterministic", "compile")
    raises_index_errors = False

    def __init__(self, target: torch.device) -> None:
        self.target: Final = target
        self.api: Final[Any] = torch.get_device_module(target)
        self.id = target.type if target.index is None else f"{target.type}:{target.index}"
        self.description = f"PyTorch on {target}"
        self._offloading: Final = Offloading(self)
        kind = _DLPACK_TYPES.get(target.type)
        self.dlpack_device = None if kind is None else (kind, target.index or 0)

    def _probe(self) -> None:
        try_kernel(self.target)

    # --- properties -------------------------------------------------------------------------------------------------

    def mem_info(self) -> tuple[int, int]:
        """Bytes free and in all, as torch reports them; memory that its allocator caches counts as free."""
        try:
            free, total = torch.accelerator.get_memory_info(self.target)
            free += torch.accelerator.memory_reserved(self.target) - torch.accelerator.memory_allocated(self.target)
        except (AttributeError, RuntimeError, ValueError):
            return 0, 0
        return int(free), int(total)

    def features(self) -> Mapping[str, Any]:
        return {"torch": torch.__version__}

    # --- memory -----------------------------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> Tensor:
        try:
            with inference_mode():
                return torch.empty(size, dtype=torch.uint8, device=self.target)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).partition("\n")[0]) from error
        except RuntimeError as error:  # allocators of other devices, and sizes beyond all addresses
            if any(word in str(error).lower() for word in ("memory", "alloc", "size", "overflow")):
                raise MemoryError(str(error).partition("\n")[0]) from error
            raise

    def _upload(self, mem: Tensor, offset: int, data: memoryview) -> None:
        with inference_mode():
            mem[offset : offset + len(data)].copy_(byte_tensor(data))
        self._finish()

    def _download(self, mem: Tensor, offset: int, out: memoryview) -> None:
        with inference_mode():
            byte_tensor(out).copy_(mem[offset : offset + len(out)])
        self._finish()

    def _upload_2d(self, mem: Tensor, offset: int, pitch: int, rows: Rows) -> None:
        with inference_mode():
            mem.as_strided(rows.shape, (pitch, 1), offset).copy_(row_tensor(rows))
        self._finish()

    def _download_2d(self, mem: Tensor, offset: int, pitch: int, out: Rows) -> None:
        with inference_mode():
            row_tensor(out).copy_(mem.as_strided(out.shape, (pitch, 1), offset))
        self._finish()

    def _fill(self, mem: Tensor, offset: int, size: int, value: int) -> None:
        with inference_mode():
            mem[offset : offset + size].fill_(value)
        self._finish()

    def _copy(self, dst: Tensor, dst_offset: int, src: Tensor, src_offset: int, size: int) -> None:
        with inference_mode():
            source = src[src_offset : src_offset + size]
            if dst is src and abs(dst_offset - src_offset) < size:
                source = source.clone()
            dst[dst_offset : dst_offset + size].copy_(source)
        self._finish()

    def _finish(self) -> None:
        """Wait for what was queued beside the streams."""
        self.api.current_stream(self.target).synchronize()

    def _import_dlpack(self, array: Any) -> tuple[Tensor, DType, Shape]:
        try:
            return dense_bytes(torch.from_dlpack(array))
        except (BufferError, RuntimeError, ValueError) as error:
            raise UnsupportedOpError(f"{self.name} cannot take this {type(array).__name__}: {error}") from error

    def _export_dlpack(self, mem: Tensor, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        return shaped(mem[offset : offset + span(shape, strides, dtype)], dtype, shape, strides)

    def _address(self, mem: Tensor) -> int | None:
        return int(mem.data_ptr())

    # --- work -------------------------------------------------------------------------------------------------------

    def _open(self, **params: Any) -> Stream:
        options = Options.of(params, self.parameters)
        if options.deterministic and self.target.type == "cuda":
            check_cublas()
        cls: Any = self.fusing_class if options.compile else self.stream_class
        return cls(self, options)  # type: ignore[no-any-return]

    def _offload(self, step: Step) -> bool:
        return self._offloading.pays(step)


class SeparateCpuDevice(TorchAccelerator):
    """torch's kernels for the CPU, with memory of its own that no other device reaches, like an accelerator: code that
    copies is tested with it where there is no accelerator."""

    kind = Kind.ACCEL
    kernels = kernels_for_cpu()
    parameters = ("threads", "deterministic", "compile")
    raises_index_errors = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def mem_info(self) -> tuple[int, int]:
        return host_memory_info()

    def _alloc(self, size: int, usage: Usage) -> Tensor:
        # Systems promise more than there is, and end the process when it is used.
        RESERVATIONS.reserve(size)
        try:
            mem = super()._alloc(size, usage)
        except BaseException:
            RESERVATIONS.release(size)
            raise
        finalize(mem, RESERVATIONS.release, size).atexit = False
        return mem

    def _finish(self) -> None:
        pass


class PageLockedMemory(PinnedMemory):
    """Page-locked memory of the process, from which and to which a device's transfers need no further copy."""

    def _alloc(self, size: int, usage: Usage) -> Any:
        try:
            # The array keeps the tensor, whose memory goes back to torch with it.
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise MemoryError(str(error).partition("\n")[0]) from error

    def _free(self, mem: Any) -> None:
        pass


class PinningAccelerator(TorchAccelerator):
    """An accelerator for which torch pins host memory."""

    @cached_property
    def _pinned(self) -> PageLockedMemory:
        return PageLockedMemory(self)

    @property
    def host_buffer_type(self) -> BufferType:
        """Pinned memory of the process."""
        return self._pinned

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        return self.default_buffer_type, self._pinned


class CudaDevice(PinningAccelerator):
    """A GPU of NVIDIA (CUDA) or AMD (ROCm, which torch shows under the same name).

    ``device.open(graphs=False)`` keeps plans from being captured as CUDA graphs.
    """

    alignment = 256
    parameters = ("deterministic", "compile", "graphs")

    def __init__(self, target: torch.device) -> None:
        super().__init__(target)
        found = torch.cuda.get_device_properties(target)
        self.description = str(found.name)
        self.kind = Kind.IGPU if getattr(found, "is_integrated", False) else Kind.GPU
        self.hardware_id = _pci_address(found)
        hip = torch.version.hip
        if hip or found.major >= 8:  # matrix units for bf16; torch emulates it on others
            self.kernels = WITH_BF16
        self._architecture = str(found.gcnArchName).partition(":")[0] if hip else f"sm_{found.major}{found.minor}"

    def _probe(self) -> None:
        # A kernel would take a context on each card, some hundred MB and as many milliseconds, used or not.
        built_for = torch.cuda.get_arch_list()
        why = why_no_kernels(self._architecture, built_for)
        if why is not None:
            raise Unavailable(why, remedy=REMEDY)
        if not built_for:
            super()._probe()

    def mem_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.target)
        kept = torch.cuda.memory_reserved(self.target) - torch.cuda.memory_allocated(self.target)
        return int(free + kept), int(total)

    def features(self) -> Mapping[str, Any]:
        """Versions, compute capability, multiprocessors, and number formats of its matrix units."""
        found = torch.cuda.get_device_properties(self.target)
        hip = torch.version.hip
        return {
            "torch": torch.__version__,
            **({"rocm": hip, "architecture": found.gcnArchName} if hip else {"cuda": torch.version.cuda}),
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "peers": [n for n in range(torch.cuda.device_count()) if self._reaches_peer(n)],
        }

    def _reaches_peer(self, number: int) -> bool:
        other = number != self.target.index
        return other and bool(torch.cuda.can_device_access_peer(self.target, number))


class XpuDevice(PinningAccelerator):
    """A GPU of Intel."""

    def __init__(self, target: torch.device) -> None:
        super().__init__(target)
        found = torch.xpu.get_device_properties(target)
        self.description = str(found.name)
        if torch.xpu.is_bf16_supported():
            self.kernels = WITH_BF16
        self.kind = Kind.GPU if getattr(found, "type", "gpu") == "gpu" else Kind.ACCEL

    def features(self) -> Mapping[str, Any]:
        """Versions, compute units and number formats."""
        found = torch.xpu.get_device_properties(self.target)
        wanted = ("driver_version", "max_compute_units", "has_fp16", "has_fp64")
        return {"torch": torch.__version__, **{n: getattr(found, n) for n in wanted if hasattr(found, n)}}


class MpsDevice(TorchAccelerator):
    """The GPU of an Apple processor, in the memory of the machine. It has one queue, which all streams share."""

    kind = Kind.IGPU
    description = "Apple GPU (Metal)"
    stream_class = MpsStream
    parameters = ("deterministic",)

    def __init__(self, target: torch.device) -> None:
        super().__init__(target)
        self.description = type(self).description

    def mem_info(self) -> tuple[int, int]:
        total = int(torch.mps.recommended_max_memory())
        return max(total - int(torch.mps.driver_allocated_memory()), 0), total

    def _address(self, mem: Tensor) -> None:
        return None  # torch shows a handle of Metal, and no address

    def _finish(self) -> None:
        torch.mps.synchronize()

    def _why_not(self, step: Step) -> str | None:
        if any(arg.dtype.name == "f64" for arg in (step.out, *step.srcs)):
            return "Metal has no f64"
        return super()._why_not(step)


def _pci_address(found: Any) -> str | None:
    """The address on the bus, ``0000:01:00.0``, where torch reports it."""
    parts = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
