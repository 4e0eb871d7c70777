"""A device that really works asynchronously: each stream is a thread, and the device's memory is not the host's."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from opweave.contract import Arg, Buffer, Call, Device, Group, Kind, Step, Stream, Usage
from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import f32
from opweave.graph.layout import dense_strides

kernels = KernelTable("f32", "strided")


class Boom(Exception):
    """What a planted failure raises."""


class Block:
    """A block of the device's memory. Freed memory is overwritten, so that a late read gives wrong values."""

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)


def array(arg: Arg) -> np.ndarray:
    return np.ndarray(arg.shape, arg.dtype.numpy, arg.mem.data, arg.offset, arg.strides)


@kernels("add", "mul", inplace=True)
def pointwise(stream: ThreadStream, op: str, out: Arg, *srcs: Arg) -> Call:
    return stream.later(partial({"add": np.add, "mul": np.multiply}[op], *map(array, srcs), array(out)))


@kernels("neg")
def neg(stream: ThreadStream, op: str, out: Arg, x: Arg) -> Call:
    return stream.later(partial(np.negative, array(x), array(out)))


@kernels("exp")
def fails_later(stream: ThreadStream, op: str, out: Arg, x: Arg) -> Call:
    def fail() -> None:
        raise Boom("planted")

    return stream.later(fail)


@kernels("tanh")
def fails_at_once(stream: ThreadStream, op: str, out: Arg, x: Arg) -> Call:
    def fail() -> None:
        raise Boom("at once")

    return fail


class ThreadStream(Stream):
    """A queue whose work a thread does. After a failure it drops work, as drivers do, until it recovers.

    Args:
        delay: seconds that each call takes, so that code that does not wait gives wrong results.
    """

    def __init__(self, device: Device, delay: float = 0.002) -> None:
        super().__init__(device)
        self.delay = delay
        self.failed: list[BaseException] = []
        self.log: list[str] = []
        self.queue: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.thread = threading.Thread(target=_work_off, args=(self.queue,), daemon=True)
        self.thread.start()

    def later(self, work: Callable[[], Any]) -> Call:
        return partial(self.enqueue, work)

    def enqueue(self, work: Callable[[], Any]) -> None:
        failed, delay = self.failed, self.delay  # queued work must not keep the stream alive

        def run() -> None:
            if not failed:
                time.sleep(delay)
                try:
                    work()
                except Boom as error:
                    failed.append(error)

        self.queue.put(run)

    def _synchronize(self) -> None:
        self._join(self._record())

    def _record(self) -> threading.Event:
        mark = threading.Event()
        self.queue.put(mark.set)  # reached also after a failure, so that no wait hangs
        return mark

    def _join(self, handle: threading.Event) -> None:
        assert handle.wait(10), "hangs"
        if self.failed:
            raise self.failed.pop()

    def _query(self, handle: threading.Event) -> bool:
        return handle.is_set()

    def _wait(self, handle: threading.Event) -> bool:
        self.log.append("wait")
        self.queue.put(partial(handle.wait, 10))
        return True

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        self.enqueue(partial(self.device._upload, buffer.handle, offset, data))

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        self.enqueue(partial(self.device._download, buffer.handle, offset, out))

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        if not isinstance(src.device, AsyncDevice):
            return False
        self.log.append("copy_from")
        self.enqueue(partial(self.device._copy, dst.handle, dst_offset, src.handle, src_offset, size))
        return True

    def _close(self) -> None:
        self.queue.put(None)
        self.thread.join(10)


def _work_off(work: queue.Queue[Callable[[], Any] | None]) -> None:
    while (call := work.get()) is not None:
        call()


class OtherThreadStream(ThreadStream):
    """A class of its own: `ThreadStream` cannot wait for its events."""


class FusingThreadStream(ThreadStream):
    """Fuses whatever ``groups`` says."""

    groups: Callable[[Sequence[Step]], Sequence[Group]] = staticmethod(lambda steps: [Group(tuple(steps))])

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        return type(self).groups(steps)


class AsyncDevice(Device):
    kind = Kind.GPU
    kernels = kernels
    stream_class: type[Stream] = ThreadStream

    def _alloc(self, size: int, usage: Usage) -> Block:
        return Block(size)

    def _free(self, mem: Block) -> None:
        mem.data[:] = 0xFF

    def _upload(self, mem: Block, offset: int, data: memoryview) -> None:
        mem.data[offset : offset + len(data)] = data

    def _download(self, mem: Block, offset: int, out: memoryview) -> None:
        out[:] = mem.data[offset : offset + len(out)].tobytes()

    def _copy(self, dst: Block, dst_offset: int, src: Block, src_offset: int, size: int) -> None:
        dst.data[dst_offset : dst_offset + size] = src.data[src_offset : src_offset + size]


class OtherAsyncDevice(AsyncDevice):
    stream_class = OtherThreadStream


def vector(buffer: Buffer, n: int = 16, offset: int = 0) -> Arg:
    return Arg(buffer, offset, f32, (n,), dense_strides((n,), f32))
