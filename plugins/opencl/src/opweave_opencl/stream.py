"""`OpenCLStream`: an in-order command queue. What it is given runs while the host goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from struct import pack
from typing import TYPE_CHECKING, Any

from opweave.contract import Arg, Buffer, Call, Group, Stream
from opweave.errors import ExecutionError, LifetimeError

if TYPE_CHECKING:
    import pyopencl as cl

    from opweave_opencl.device import OpenCLDevice

__all__ = ["OpenCLStream"]


class OpenCLStream(Stream):
    """An in-order command queue of a device.

    Attributes:
        target: the device.
        queue: pyopencl's.
    """

    def __init__(self, device: OpenCLDevice) -> None:
        import pyopencl as cl

        super().__init__(device)
        self.target = device
        with device.errors("opening a stream"):
            self.queue = cl.CommandQueue(device.context)
        # Dropping the event of a transfer waits for it, so they are kept until the queue is drained.
        self._transfers: list[cl.Event] = []

    # --- kernels ----------------------------------------------------------------------------------------------------

    def launch(
        self,
        program: cl.Program,
        kernel: str,
        size: tuple[int, ...],
        group: tuple[int, ...],
        operands: Sequence[Arg],
        words: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> Call:
        """The call that runs a kernel over ``size`` work-items (rounded up to whole groups).

        The kernel takes the operands' buffers in order and then one struct by value: ``words`` as 64-bit integers
        followed by ``floats`` as 32-bit ones, padded to a multiple of eight bytes.
        """
        import pyopencl as cl

        with self.target.errors(f"preparing the kernel {kernel}"):
            bound = cl.Kernel(program, kernel)
            memory = [self._memory(arg) for arg in operands]
            for index, mem in enumerate(memory):
                bound.set_arg(index, mem)
            if words or floats:
                padding = (0.0,) * (len(floats) % 2)
                values = pack(f"{len(words)}q{len(floats) + len(padding)}f", *words, *floats, *padding)
                bound.set_arg(len(memory), values)
        whole = tuple(-(-n // g) * g for n, g in zip(size, group, strict=True))
        call = partial(cl.enqueue_nd_range_kernel, self.queue, bound, whole, group)
        # Setting an argument does not make the driver keep the buffer.
        vars(call)["memory"] = memory
        return call

    def _memory(self, arg: Arg) -> Any:
        buffer = arg.buffer
        if buffer is None or buffer.freed or not self.device.reaches(buffer.space):
            raise LifetimeError(f"{self.device.name} cannot use {arg!r}: unbound, freed, or in another memory")
        return buffer.handle

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        calls = [self._bind(group) for group in groups]
        if calls:
            last, flush = calls[-1], self.queue.flush

            def submit() -> None:
                # Some drivers collect commands until they are told to begin.
                last()
                flush()

            calls[-1] = submit
        return calls

    # --- order ------------------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        with self.target.errors("running queued work"):
            self.queue.finish()
            self._transfers.clear()

    def _record(self) -> cl.Event:
        import pyopencl as cl

        with self.target.errors("recording an event"):
            mark = cl.enqueue_marker(self.queue)
            # Another queue that waits for a mark which was never submitted would wait for ever.
            self.queue.flush()
            return mark

    def _wait(self, handle: Any) -> bool:
        import pyopencl as cl

        if handle.context != self.queue.context:
            return False
        with self.target.errors("waiting for an event"):
            cl.enqueue_barrier(self.queue, wait_for=[handle])
        return True

    def _join(self, handle: Any) -> None:
        with self.target.errors("running queued work"):
            handle.wait()

    def _query(self, handle: Any) -> bool:
        import pyopencl as cl

        with self.target.errors("running queued work"):
            status = handle.command_execution_status
        if status < 0:
            name = self.device.name
            raise ExecutionError(f"work on {name} failed with OpenCL status {status}", device=name)
        return bool(status == cl.command_execution_status.COMPLETE)

    # --- transfers --------------------------------------------------------------------------------------------------

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        import pyopencl as cl

        if len(data):
            with self.target.errors(f"uploading {len(data):,} bytes"):
                self._transfers.append(
                    cl.enqueue_copy(self.queue, buffer.handle, data, dst_offset=offset, is_blocking=False)
                )

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        import pyopencl as cl

        if len(out):
            with self.target.errors(f"downloading {len(out):,} bytes"):
                self._transfers.append(
                    cl.enqueue_copy(self.queue, out, buffer.handle, src_offset=offset, is_blocking=False)
                )

    def _close(self) -> None:
        self._transfers.clear()
