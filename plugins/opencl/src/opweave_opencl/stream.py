"""`OpenCLStream`: an in-order command queue of a device, which works while the host goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from struct import pack
from typing import TYPE_CHECKING, Any, Final

from opweave.contract import Arg, Buffer, Call, Group, Plan, Rows, Step, Stream, first_equals, flat_rows
from opweave.errors import ExecutionError, LifetimeError
from opweave.graph.opdef import OPS
from opweave.tracing import TRACE
from opweave_opencl.clock import DeviceClock
from opweave_opencl.errors import translate
from opweave_opencl.events import complete
from opweave_opencl.fusing import fuse
from opweave_opencl.indices import IndexChecks
from opweave_opencl.kernel_objects import new_kernel, set_bytes
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.pointwise import bind_pointwise
from opweave_opencl.mapping import rectangle
from opweave_opencl.profiling import Profiler
from opweave_opencl.tuning import GROUPS

if TYPE_CHECKING:
    import pyopencl as cl

    from opweave_opencl.device import OpenCLDevice

__all__ = ["MANY", "OpenCLStream"]

Sizes = tuple[int, ...]

MANY: Final = 64
"""Events of transfers that are kept before those of complete transfers are dropped: it decides when the driver's memory
becomes free, not what is computed."""


class OpenCLStream(Stream):
    """Kernels and transfers in order on a device.

    Args:
        profiling: whether each kernel emits a trace event; ``None``: if tracing is on now.
        check_indices: whether an index outside of what it indexes is raised at the next wait; ``None``: unless the
            environment variable ``OPWEAVE_OPENCL_CHECK_INDICES`` is ``0``.

    Attributes:
        target: the device.
        queue: pyopencl's, in order, of kernels and transfers.
        indices: the check of indices that kernels read.
    """

    def __init__(
        self, device: OpenCLDevice, *, profiling: bool | None = None, check_indices: bool | None = None
    ) -> None:
        import pyopencl as cl

        super().__init__(device)
        self.target = device
        profiling = TRACE.listening if profiling is None else profiling
        with device.errors("opening a stream"):
            properties: Any = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
            self.queue: Final = cl.CommandQueue(device.context, device.cl_device, properties)
            clock = DeviceClock(device.context, device.cl_device) if profiling else None
        self.indices = IndexChecks(device, self.queue, check_indices)
        self._profiler = None if clock is None else Profiler(device.name, clock)
        self._binding = ""  # operations of the group that is being bound, for trace events
        # Dropping the event of a transfer waits for the transfer, so they are kept until it is complete.
        self._transfers: list[cl.Event] = []
        # Launch sizes, shared between calls: a plan runs 10 % faster than with tuples of each call's own.
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

        Every device takes as many groups as ``GROUPS`` may be along the second and the third axis; a range of more is
        launched in parts, which have the global ids of the whole.

        The kernel takes the operands' buffers in order and then one struct by value: ``words`` as 64-bit integers
        followed by ``floats`` as 32-bit ones, padded to a multiple of eight bytes.
        """
        import pyopencl as cl

        try:
            bound = new_kernel(program, kernel)
            memory = [self._memory(arg) for arg in operands]
            for index, buffer in enumerate(memory):
                bound.set_arg(index, buffer)
            if words or floats:
                padding = (0.0,) * (len(floats) % 2)
                values = pack(f"{len(words)}q{len(floats) + len(padding)}f", *words, *floats, *padding)
                set_bytes(bound, len(operands), values)
        except cl.Error as error:
            raise translate(error, self.device.name, f"preparing the kernel {kernel}") from error
        whole = tuple([-(-n // g) * g for n, g in zip(size, group, strict=True)])
        sizes = self._sizes.setdefault
        calls: list[Call] = []
        for begin, part in _parts(whole, group):
            call = partial(cl.enqueue_nd_range_kernel, self.queue, bound, sizes(part, part), sizes(group, group))
            if any(begin):
                call = partial(call, begin)
            # Setting an argument does not make the driver keep the buffer; the call does.
            vars(call)["memory"] = memory
            timed = None if self._profiler is None else self._profiler.timed(call, self._binding or kernel, kernel)
            calls.append(timed or call)
        return in_order(calls)

    def _memory(self, arg: Arg) -> Any:
        buffer = arg.buffer
        if buffer is None or buffer.freed or not self.device.reaches(buffer.space):
            raise LifetimeError(f"{self.device.name} cannot use {arg!r}: unbound, freed, or in another memory")
        return buffer.handle

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        indices = self.indices
        # The sites of kernels that read indices belong to one plan, and to one of its groups.
        own = [any(OPS[step.op].indices for step in group.steps) for group in groups]
        groups = [group._replace(call=None) if alone else group for group, alone in zip(groups, own, strict=True)]
        firsts = [i if own[i] else first for i, first in enumerate(first_equals(groups))]
        bound = dict.fromkeys(firsts)
        indices.begin([number for number in bound if groups[number].call is None])
        try:
            made = dict(zip(bound, super()._compile([groups[i] for i in bound]), strict=True))
            calls = [made[first] for first in firsts]
        finally:
            self._binding = ""
        if calls:
            last, sites, flush = calls[-1], indices.bound(), self.queue.flush

            def submit() -> None:
                last()
                if sites:
                    indices.read_back(sites)
                flush()  # some drivers collect commands until they are flushed

            submit.remark = getattr(last, "remark", "")  # type: ignore[attr-defined]
            calls[-1] = submit
        return calls

    @property
    def shares_calls(self) -> bool:
        return True

    @property
    def lists_operands(self) -> bool:
        return False  # groups are bound by their steps alone

    def _compiled(self, plan: Plan) -> None:
        self.indices.attach(plan)

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        return fuse(self, steps)

    def _bind(self, group: Group) -> Call:
        self.indices.enter_group()
        self._binding = " ".join([step.op for step in group.steps])
        if len(group.steps) > 1:
            return bind_pointwise(self, group.steps)
        call = super()._bind(group)
        step = group.steps[0]
        if (group.kernel is None or group.kernel.precision == "exact") and (why := self.target.why_exact(step)):
            call.remark = why  # type: ignore[attr-defined]  # for `Program.explain`
        return call

    def _translate(self, error: Exception) -> Exception:
        return translate(error, self.device.name, "submitting a kernel")

    # --- order ------------------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        done, self._transfers = self._transfers, []
        with self.target.errors("running queued work"):
            self.queue.finish()
        done.clear()
        self._report()

    def _report(self) -> None:
        """Raise what kernels recorded, and emit the trace events of kernels, of work that is complete."""
        self.indices.check(self.fail)
        if self._profiler is not None:
            self._profiler.emit()

    def _record(self) -> cl.Event:
        import pyopencl as cl

        with self.target.errors("recording an event"):
            event = cl.enqueue_marker(self.queue)
            self.queue.flush()  # a queue that waits for an event which was never submitted waits for ever
        return event

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
        self._report()

    def _query(self, handle: Any) -> bool:
        import pyopencl as cl

        with self.target.errors("running queued work"):
            status = handle.command_execution_status
        if status < 0:
            name = self.device.name
            raise ExecutionError(f"work on {name} failed with OpenCL status {status}", device=name)
        reached = bool(status == cl.command_execution_status.COMPLETE)
        if reached:
            self.indices.check(self.fail)
        return reached

    # --- transfers --------------------------------------------------------------------------------------------------

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        self._transfer("uploading", len(data), buffer.handle, data, dst_offset=offset, is_blocking=False)

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        self._transfer("downloading", len(out), out, buffer.handle, src_offset=offset, is_blocking=False)

    def _upload_2d(self, buffer: Buffer, offset: int, pitch: int, rows: Rows) -> None:
        where = rectangle(offset, pitch, rows)
        self._transfer("uploading", rows.size, buffer.handle, flat_rows(rows), is_blocking=False, **where)

    def _download_2d(self, buffer: Buffer, offset: int, pitch: int, out: Rows) -> None:
        where = rectangle(offset, pitch, out)
        self._transfer("downloading", out.size, flat_rows(out), buffer.handle, is_blocking=False, **where)

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        import pyopencl as cl

        source, target = src.handle, dst.handle
        if not isinstance(source, cl.Buffer) or source.context != self.queue.context:
            return False
        if source is target and abs(dst_offset - src_offset) < size:
            return False  # drivers refuse ranges that overlap
        self._transfer("copying", size, target, source, dst_offset=dst_offset, src_offset=src_offset, byte_count=size)
        return True

    def _transfer(self, doing: str, size: int, target: Any, source: Any, **options: Any) -> None:
        import pyopencl as cl

        if not size:
            return
        with self.target.errors(f"{doing} {size:,} bytes"):
            self._transfers.append(cl.enqueue_copy(self.queue, target, source, **options))
        if len(self._transfers) > MANY:
            self._transfers = [event for event in self._transfers if not complete(event)]

    def _close(self) -> None:
        self._transfers.clear()
        self.indices.close()


def _parts(size: Sizes, group: Sizes) -> list[tuple[Sizes, Sizes]]:
    """Where each part of a range begins, and its work-items: one part, but for ranges of very many groups."""
    most = GROUPS.largest
    if all(n <= most * g for n, g in zip(size[1:], group[1:], strict=True)):
        return [((0,), size)]
    cuts = [[(0, size[0])]]
    for n, g in zip(size[1:], group[1:], strict=True):
        cuts.append([(begin, min(most * g, n - begin)) for begin in range(0, n, most * g)])
    return [(tuple([begin for begin, _ in cut]), tuple([n for _, n in cut])) for cut in product(*cuts)]
