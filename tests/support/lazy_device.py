"""The sound device with streams that work only while they are waited for: code that does not wait always fails.

Where a driver would be late now and then, these streams are as late as can be, without threads and without delays.
Every part is a method that a test can replace by a wrong one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

from opweave.contract import Buffer, Call, Device, Group, Usage
from tests.support.sound_device import Block, SoundBackend, SoundDevice, SoundStream

WORKING = RLock()
"""One for all streams: work of one that waits for another one does that one's work."""


class Mark(NamedTuple):
    """A point of a stream: ``at`` calls were submitted before it."""

    stream: LazyStream
    at: int


class LazyStream(SoundStream):
    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.work: deque[Callable[[], Any]] = deque()
        self.submitted = self.done = 0
        self.error: Exception | None = None

    def put(self, job: Callable[[], Any]) -> None:
        with WORKING:
            self.work.append(job)
            self.submitted += 1

    def work_off(self, upto: int) -> None:
        """Make the submitted calls, up to so many in all. After a failure calls are dropped."""
        with WORKING:
            while self.done < upto:
                job = self.work.popleft()
                self.done += 1
                if self.error is None:
                    try:
                        job()
                    except Exception as error:
                        self.error = error
                del job  # what it held may be freed by this, which waits for the rest of the work

    def tell(self) -> None:
        with WORKING:
            error, self.error = self.error, None
        if error is not None:
            raise error

    # --- the contract -----------------------------------------------------------------------------------------------

    def _bind(self, group: Group) -> Call:
        return partial(self.put, super()._bind(group))

    def _synchronize(self) -> None:
        self.work_off(self.submitted)
        self.tell()

    def _record(self) -> Mark:
        return Mark(self, self.submitted)

    def _join(self, handle: Mark) -> None:
        self.work_off(handle.at)
        self.tell()

    def _query(self, handle: Mark) -> bool:
        with WORKING:
            if self.done >= handle.at:
                self.tell()
                return True
            self.work_off(self.done + 1)  # asking again and again gets there
            return False

    def _wait(self, handle: Mark) -> bool:
        self.put(partial(handle.stream.work_off, handle.at))
        return True

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        self.put(partial(self.device._upload, buffer.handle, offset, data))

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        self.put(partial(self.device._download, buffer.handle, offset, out))

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        if not isinstance(src.device, SoundDevice):
            return False
        self.put(partial(self.device._copy, dst.handle, dst_offset, src.handle, src_offset, size))
        return True

    def _abort(self) -> None:
        """Queued work is short, so it is left to end."""


class LazyDevice(SoundDevice):
    stream_class = LazyStream

    def _alloc(self, size: int, usage: Usage) -> Block:
        block = super()._alloc(size, usage)
        block.data[:] = 0xEE
        return block

    def _free(self, mem: Block) -> None:
        mem.data[:] = 0xDD
        super()._free(mem)


class LazyBackend(SoundBackend):
    def devices(self) -> list[Device]:
        return [LazyDevice()]
