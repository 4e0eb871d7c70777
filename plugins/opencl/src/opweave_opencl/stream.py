"""`OpenCLStream`: work in order on a device. What it is given runs while the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from struct import pack
from typing import TYPE_CHECKING, Any

from opweave.contract import Arg, Buffer, Call, Group, Plan, Step, Stream
from opweave.errors import ExecutionError, LifetimeError
from opweave.tracing import TRACE
from opweave_opencl import fusing
from opweave_opencl.clock import DeviceClock
from opweave_opencl.errors import translate
from opweave_opencl.indices import IndexChecks
from opweave_opencl.profiling import Profiler
from opweave_opencl.program import new_kernel, set_bytes
from opweave_opencl.queues import MANY, Queues, Touched, Work, complete

if TYPE_CHECKING:
    import pyopencl as cl

    from opweave_opencl.device import OpenCLDevice

__all__ = ["OpenCLStream"]

Sizes = tuple[int, ...]


class OpenCLStream(Stream):
    """Work in order on a device.

    Args:
        profiling: whether it tells when each kernel began and ended; ``None``: if somebody listens to events now.
        check_indices: whether an index outside of what it indexes is raised at the next wait; ``None``: unless the
            environment variable ``OPWEAVE_OPENCL_CHECK_INDICES`` is ``0``.

    Attributes:
        target: the device.
        queue: pyopencl's queue of kernels.
        queues: that queue and the one of transfers beside it.
        indices: the check of the indices that kernels pick by.
    """

    def __init__(
        self, device: OpenCLDevice, *, profiling: bool | None = None, check_indices: bool | None = None
    ) -> None:
        super().__init__(device)
        self.target = device
        profiling = TRACE.listening if profiling is None else profiling
        with device.errors("opening a stream"):
            self.queues = Queues(device.context, device.cl_device, profiling=profiling)
            clock = DeviceClock(device.context, device.cl_device) if profiling else None
        self.queue: cl.CommandQueue = self.queues.kernels
        self.indices = IndexChecks(device, self.queue, check_indices)
        self._profiler = None if clock is None else Profiler(device.name, clock)
        self._binding = ""  # what is being bound, for people
        # Dropping the event of a transfer waits for it, so they are kept until they are done.
        self._transfers: list[cl.Event] = []
        # Launch sizes: calls that share few tuples run a tenth faster than those with tuples of their own.
        self._sizes: dict[Sizes, Sizes] = {}

    # --- kernels ----------------------------------------------------------------------------------------------------

    def launch(
        self,
        program: cl.Program,
        kernel: str,
        size: Sizes,
        group: Sizes,
        operands: Sequence[Arg],
        words: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> Call:
        """The call that runs a kernel over ``size`` work-items (rounded up to whole groups).

        The kernel takes the operands' buffers in order and then one struct by value: ``words`` as 64-bit integers
        followed by ``floats`` as 32-bit ones, padded to a multiple of eight bytes.
        """
        import pyopencl as cl

        try:
            bound = new_kernel(program, kernel)
            for index, arg in enumerate(operands):
                bound.set_arg(index, self._memory(arg))
            if words or floats:
                padding = (0.0,) * (len(floats) % 2)
                values = pack(f"{len(words)}q{len(floats) + len(padding)}f", *words, *floats, *padding)
                set_bytes(bound, len(operands), values)
        except cl.Error as error:
            raise translate(error, self.device.name, f"preparing the kernel {kernel}") from error
        whole = tuple([-(-n // g) * g for n, g in zip(size, group, strict=True)])
        sizes = self._sizes.setdefault
        call = partial(cl.enqueue_nd_range_kernel, self.queue, bound, sizes(whole, whole), sizes(group, group))
        return call if self._profiler is None else self._profiler.timed(call, self._binding or kernel, kernel)

    def _memory(self, arg: Arg) -> Any:
        buffer = arg.buffer
        if buffer is None or buffer.freed or not self.device.reaches(buffer.space):
            raise LifetimeError(f"{self.device.name} cannot use {arg!r}: unbound, freed, or in another memory")
        return buffer.handle

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        calls: list[Call] = []
        indices = self.indices
        indices.begin()
        for number, group in enumerate(groups):
            indices.enter(number)
            self._binding = " ".join([step.op for step in group.steps])
            calls.append(self._bind(group))
        self._binding = ""
        if calls:
            # Setting an argument does not make the driver keep the buffer: `work` does, as long as there are the calls.
            work, queues, flush = Work(_ranges(groups)), self.queues, self.queue.flush
            last, sites = calls[-1], indices.bound()

            def submit() -> None:
                queues.after(work, self._event(last()))
                if sites:
                    indices.look(sites)
                flush()  # some drivers collect commands until they are told to begin

            calls[-1] = submit
            first = calls[0]

            def begin() -> None:
                queues.before(work)
                first()

            calls[0] = begin
        return calls

    def _compiled(self, plan: Plan) -> None:
        self.indices.belong(plan)

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        return fusing.fuse(self, steps)

    def _bind(self, group: Group) -> Call:
        return super()._bind(group) if len(group.steps) == 1 else fusing.bind(self, group)

    def _event(self, result: Any) -> cl.Event:
        """The event of a call; one that makes several launches may return nothing."""
        import pyopencl as cl

        return result if isinstance(result, cl.Event) else cl.enqueue_marker(self.queue)

    def _translate(self, error: Exception) -> Exception:
        return translate(error, self.device.name, "submitting a kernel")

    # --- order ------------------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        done, self._transfers = self._transfers, []
        with self.target.errors("running queued work"):
            self.queues.finish()
        done.clear()
        self.indices.check()
        if self._profiler is not None:
            self._profiler.tell()

    def _record(self) -> tuple[cl.Event, ...]:
        with self.target.errors("recording an event"):
            return self.queues.mark()

    def _wait(self, handle: Any) -> bool:
        if handle[0].context != self.queue.context:
            return False
        with self.target.errors("waiting for an event"):
            self.queues.wait(handle)
        return True

    def _join(self, handle: Any) -> None:
        import pyopencl as cl

        with self.target.errors("running queued work"):
            cl.wait_for_events(list(handle))
        self.indices.check()
        if self._profiler is not None:
            self._profiler.tell()

    def _query(self, handle: Any) -> bool:
        import pyopencl as cl

        with self.target.errors("running queued work"):
            states = [event.command_execution_status for event in handle]
        for status in states:
            if status < 0:
                name = self.device.name
                raise ExecutionError(f"work on {name} failed with OpenCL status {status}", device=name)
        reached = all(status == cl.command_execution_status.COMPLETE for status in states)
        if reached:
            self.indices.check()
        return reached

    # --- transfers --------------------------------------------------------------------------------------------------

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        import pyopencl as cl

        def write(queue: cl.CommandQueue, gate: list[cl.Event]) -> cl.Event:
            return cl.enqueue_copy(queue, buffer.handle, data, dst_offset=offset, is_blocking=False, wait_for=gate)

        self._transfer(f"uploading {len(data):,} bytes", [_range(buffer, offset, len(data), True)], write)

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        import pyopencl as cl

        def read(queue: cl.CommandQueue, gate: list[cl.Event]) -> cl.Event:
            return cl.enqueue_copy(queue, out, buffer.handle, src_offset=offset, is_blocking=False, wait_for=gate)

        self._transfer(f"downloading {len(out):,} bytes", [_range(buffer, offset, len(out), False)], read)

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        import pyopencl as cl

        source, same = src.handle, src.handle is dst.handle
        if not isinstance(source, cl.Buffer) or source.context != self.queue.context:
            return False
        if same and abs(dst_offset - src_offset) < size:
            return False  # drivers refuse ranges that overlap

        def copy(queue: cl.CommandQueue, gate: list[cl.Event]) -> cl.Event:
            return cl.enqueue_copy(
                queue, dst.handle, source, dst_offset=dst_offset, src_offset=src_offset, byte_count=size, wait_for=gate
            )

        ranges = [_range(dst, dst_offset, size, True), _range(src, src_offset, size, False)]
        self._transfer(f"copying {size:,} bytes from {src.device.name}", ranges, copy)
        return True

    def _transfer(
        self, doing: str, ranges: list[Touched], enqueue: Callable[[cl.CommandQueue, list[cl.Event]], cl.Event]
    ) -> None:
        if ranges[0].begin < ranges[0].end:
            with self.target.errors(doing):
                self._transfers.append(self.queues.transfer(Work(ranges), enqueue))
            if len(self._transfers) > MANY:
                self._transfers = [event for event in self._transfers if not complete(event)]

    def _close(self) -> None:
        self._transfers.clear()
        self.indices.close()


def _range(buffer: Buffer, offset: int, size: int, written: bool) -> Touched:
    return Touched(buffer.handle, offset, offset + size, written)


def _ranges(groups: Sequence[Group]) -> list[Touched]:
    """The bytes that steps touch, operand by operand."""
    args: dict[int, tuple[Arg, bool]] = {}
    for group in groups:
        for step in group.steps:
            for arg in step.srcs:
                args.setdefault(id(arg), (arg, False))
            args[id(step.out)] = (step.out, True)
        if group.scratch is not None:
            args[id(group.scratch)] = (group.scratch, True)
    return [
        Touched(arg.buffer.handle, arg.offset, arg.offset + arg.span, written)
        for arg, written in args.values()
        if arg.buffer is not None
    ]
