"""Streams of devices that work asynchronously: `QueueStream`, a queue of torch's, and `MpsStream`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opweave.contract import Buffer, Call, Group, Rows
from opweave.errors import DeviceLostError
from opweave.tracing import TRACE
from opweave_torch.capture import CapturedPlan
from opweave_torch.fusing import FusingStream
from opweave_torch.memory import byte_tensor, row_tensor
from opweave_torch.native import inference_mode
from opweave_torch.options import Options
from opweave_torch.stream import TorchStream

if TYPE_CHECKING:
    from opweave_torch.accelerator import TorchAccelerator

__all__ = ["FusingQueueStream", "MpsStream", "QueueStream"]

_LOST = ("device-side assert", "illegal memory access", "unspecified launch failure", "device lost", "DEVICE_LOST")


class QueueStream(TorchStream):
    """A queue of torch's: ``torch.cuda.Stream``, ``torch.xpu.Stream``, ...

    Plans of several steps are captured as a CUDA graph when they run for the second time, where the device has them
    and ``graphs`` was not switched off. (Not on streams that are opened while somebody traces every step.)

    Attributes:
        queue: torch's.
        pool: memory that captured plans share; they never run at the same time. ``None`` until there is one.
        capturing: the queue on which plans are captured.
    """

    def __init__(self, device: TorchAccelerator, options: Options) -> None:
        super().__init__(device, options)
        self.api = device.api
        self.target = device.target
        self.queue = self.api.Stream() if device.target.type == "cpu" else self.api.Stream(device.target)
        self.pool: Any = None
        self._captures = device.target.type == "cuda" and options.graphs and not (TRACE.listening and TRACE.detailed)

    # --- running ----------------------------------------------------------------------------------------------------

    @cached_property
    def capturing(self) -> Any:
        return self.api.Stream(self.target)

    @property
    def shares_calls(self) -> bool:
        return False  # a captured plan is one call

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        with self.api.stream(self.queue):  # constants that kernels put on the device are made in order
            calls = super()._compile(groups)
        if self._captures and len(calls) > 1:
            return [CapturedPlan(self, calls, [group.steps[-1] for group in groups])]
        return calls

    def _make(self, calls: Iterator[Call]) -> None:
        with self.api.stream(self.queue):
            super()._make(calls)

    def _translate(self, error: Exception) -> Exception:
        """`MemoryError` or `DeviceLostError` for an error of torch that means this, else the error itself."""
        first = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError):
            return MemoryError(first)
        if isinstance(error, RuntimeError) and any(sign in first for sign in _LOST):
            return DeviceLostError(f"{self.device.name} stopped answering: {first}; start the process anew")
        return error

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            typed = self._translate(error)
            if typed is error:
                raise
            raise typed from error

    # --- order ------------------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        if self.target.type != "cpu":  # whose streams do the work while they are called
            with self._typed_errors():
                self.queue.synchronize()

    def _record(self) -> Any:
        event = self.api.Event()
        event.record(self.queue)
        return event

    def _wait(self, handle: Any) -> bool:
        if not isinstance(handle, self.api.Event):
            return False  # an event of another type of devices
        self.queue.wait_event(handle)
        return True

    def _join(self, handle: Any) -> None:
        with self._typed_errors():
            handle.synchronize()

    def _query(self, handle: Any) -> bool:
        with self._typed_errors():
            return bool(handle.query())

    # --- transfers --------------------------------------------------------------------------------------------------
    # From and to pinned memory they run beside the host; for other memory drivers take a copy of it first, or wait.

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        if len(data):
            self._copy(buffer.handle[offset : offset + len(data)], byte_tensor(data))

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        if len(out):
            self._copy(byte_tensor(out), buffer.handle[offset : offset + len(out)])

    def _upload_2d(self, buffer: Buffer, offset: int, pitch: int, rows: Rows) -> None:
        self._copy(buffer.handle.as_strided(rows.shape, (pitch, 1), offset), row_tensor(rows))

    def _download_2d(self, buffer: Buffer, offset: int, pitch: int, out: Rows) -> None:
        self._copy(row_tensor(out), buffer.handle.as_strided(out.shape, (pitch, 1), offset))

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        source = src.handle
        if not isinstance(source, Tensor) or source.device.type != self.target.type:
            return False
        window = source[src_offset : src_offset + size]
        if source is dst.handle and abs(dst_offset - src_offset) < size:
            return False
        # Between two devices torch copies on the source's side, after what this queue waits for, and has this queue
        # wait for the copy.
        self._copy(dst.handle[dst_offset : dst_offset + size], window)
        return True

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        with self.api.stream(self.queue), inference_mode():
            dst.copy_(src, non_blocking=True)


class FusingQueueStream(FusingStream, QueueStream):
    """A queue on which each run of pointwise steps is one kernel."""


class MpsStream(TorchStream):
    """The only queue of Metal, which all streams share; so what one has queued is in order for the others."""

    def _synchronize(self) -> None:
        torch.mps.synchronize()
