"""`StreamChannel`: the connection of a client's stream, and the stream of the device that does its work.

What fails is kept: later work of the stream is dropped, and events recorded from then on fail, until the client has
asked to synchronize. Work of asynchronous devices goes on beside this: a second thread waits for its events and sends
what was to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter
from typing import Any, Final

import numpy as np

from opweave.contract import Buffer, Plan, StepError, Stream
from opweave.errors import FormatError, LifetimeError, OpweaveError
from opweave.runtime.device import stream_caps
from opweave_remote.failures import encode_error
from opweave_remote.server.channels import Channel, Serve
from opweave_remote.server.launches import BoundLaunch
from opweave_remote.server.session import Session, numbers_of
from opweave_remote.server.transfers import data_of, receive_into, receive_packed
from opweave_remote.steps import decode_groups, decode_steps
from opweave_remote.wire import Frame, Kind, encode
from opweave_remote.wires import Wire

__all__ = ["StreamChannel"]

_LONGEST_REMARK: Final = 2000
_FAILURES_KEPT: Final = 64

Errors = list[Any]


class StreamChannel(Channel):
    """The messages of one stream. The first one opens it."""

    def __init__(self, session: Session, wire: Wire) -> None:
        super().__init__(session, wire)
        self.number = 0
        self.stream: Stream | None = None
        self.broken: Errors | None = None  # the failure since which work is dropped
        self._failures = 0
        self._plans: Final[dict[int, Plan]] = {}
        self._launches: Final[dict[int, BoundLaunch]] = {}
        self._numbers: Final[dict[int, int]] = {}  # id of a plan -> its number
        self._working = False
        self._recorded = 0
        self._reached = 0
        self._failed: list[tuple[int, Errors]] = []  # event -> why it failed, the latest ones
        self._moved: Final = Condition()
        self._later: SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: Thread | None = None
        self._staged = 0
        self.served = {Kind.OPEN: self._open}

    def perform(self, work: Serve, frame: Frame) -> None:
        kind, args, size = frame
        if kind in _ANSWERED:
            self._answer(work, *args)
            return
        if self._out and (kind in _LONG or size > _BUFFERED):
            self.flush()  # answers that are ready do not wait for this message
        if kind in _ALWAYS:
            work(*args)
            return
        if self.broken is not None:
            if size:
                self.wire.reader.skip(size)
            if kind in _GIVING:
                self.later(partial(self.fail, args[0], self.broken))
            return
        self._working = True
        try:
            work(*args, size) if kind in _RECEIVING else work(*args)
        except StepError as error:
            plan = -1 if error.plan is None else self._numbers.get(id(error.plan), -1)
            self._break(error.error, plan, -1 if error.step is None else error.step)
        except (EOFError, OSError):
            raise
        except Exception as error:
            self._break(error)
        finally:
            self._working = False
        if self.broken is not None and kind in _GIVING:
            self.later(partial(self.fail, args[0], self.broken))

    def _answer(self, work: Serve, ticket: int, *args: Any) -> None:
        try:
            value = work(*args)
        except (EOFError, OSError):
            raise
        except Exception as error:
            self.fail(ticket, encode_error(error))
        else:
            self.answer(ticket, value)

    def _break(self, error: BaseException, plan: int = -1, step: int = -1) -> None:
        if self.broken is None:
            self._failures += 1
            self.broken = encode_error(error, self._failures, plan, step)

    # --- opening and closing ------------------------------------------------------------------------------------------

    def _open(self, number: int, device: str, params: Any) -> list[bool]:
        if self.stream is not None or number in self.session.streams:
            raise FormatError(f"stream {number} is open")
        plain = type(params) is dict and all(type(k) is str for k in params)
        if not plain or any(type(v) not in (bool, int, float, str) for v in params.values()):
            raise TypeError("parameters of devices on other machines are bools, numbers and texts")
        target = self.session.device(device)
        stream = self.stream = target.open(**params)
        self.number = number
        self.session.streams[number] = self
        if stream.is_async:
            self._later = SimpleQueue()
            self._thread = Thread(target=self._do_later, name="opweave answers", daemon=True)
            self._thread.start()
        self.served = {
            Kind.FUSE: self._fuse,
            Kind.COMPILE: self._compile,
            Kind.RUN: self._run,
            Kind.UPLOAD: self._upload,
            Kind.UPLOAD_PACKED: self._upload_packed,
            Kind.DOWNLOAD: self._download,
            Kind.MOVE: self._move,
            Kind.PULL: self._pull,
            Kind.RECORD: self._record,
            Kind.WAIT: self._wait,
            Kind.SYNC: self._sync,
            Kind.DROP: self._drop,
            Kind.BIND: self._bind,
            Kind.LAUNCH: self._launch,
        }
        return [stream_caps(type(stream)).fuse, stream.lists_operands]

    def close(self) -> None:
        """Wait for the work under way, and close the stream."""
        self.session.streams.pop(self.number, None)
        with self._moved:
            self._moved.notify_all()
        if self._later is not None and self._thread is not None:
            self._later.put(None)
            self._thread.join()
        if self.stream is not None:
            with suppress(Exception):  # its failures were reported, or nobody is left to receive them
                self.stream.close()
            _release_frames(self.stream.failure)
        self._plans.clear()
        self._launches.clear()

    def abort(self) -> None:
        """End work under way, from any thread."""
        if self.stream is not None and (self._working or self._staged):
            self.stream.abort()

    # --- later --------------------------------------------------------------------------------------------------------

    def later(self, work: Callable[[], None]) -> None:
        """Do something behind the answers that are still to be sent; at once where the device is synchronous."""
        if self._later is None:
            work()
        else:
            self._later.put(work)

    def _do_later(self) -> None:
        assert self._later is not None
        while (work := self._later.get()) is not None:
            try:
                work()
                if self._later.empty():
                    self.flush()
            except (OSError, EOFError):  # nobody is there any more
                continue

    # --- preparing ----------------------------------------------------------------------------------------------------

    def _fuse(self, rows: Any) -> list[list[Any]]:
        assert self.stream is not None
        steps = decode_steps(rows)
        index = {id(step): i for i, step in enumerate(steps)}
        return [[[index[id(s)] for s in group.steps], group.workspace] for group in self.stream.fuse(steps)]

    def _compile(self, number: int, rows: Any) -> list[Any]:
        assert self.stream is not None
        if number in self._plans or len(self._plans) >= self.session.limits.plans:
            raise FormatError(f"plan {number}: a stream keeps {self.session.limits.plans:,} plans, each by its number")
        plan = self.stream.compile(decode_groups(rows, self.session.buffer))
        self._plans[number] = plan
        self._numbers[id(plan)] = number
        self.session.metrics.add("plans_total")
        return ["; ".join(dict.fromkeys(plan.remarks))[:_LONGEST_REMARK], plan.library_bytes]

    def _drop(self, numbers: Any) -> None:
        for number in numbers_of(numbers):
            plan = self._plans.pop(number, None)
            if plan is not None:
                self._numbers.pop(id(plan), None)
                plan.close()
            self._launches.pop(number, None)

    # --- work ---------------------------------------------------------------------------------------------------------

    def _plan(self, number: int) -> Plan:
        plan = self._plans.get(number)
        if plan is None:
            raise LifetimeError(f"there is no plan {number}")
        return plan

    def _run(self, number: int) -> None:
        plan = self._plan(number)
        start = perf_counter()
        plan.run()
        self.session.metrics.ran(perf_counter() - start)

    def _bind(self, number: int, writes: Any, plans: Any, reads: Any) -> None:
        assert self.stream is not None
        if number in self._launches or len(self._launches) >= self.session.limits.plans:
            raise FormatError(f"launch {number}: a stream keeps {self.session.limits.plans:,}, each by its number")
        found = [self._plan(n) for n in numbers_of(plans)]
        self._launches[number] = BoundLaunch(self.session, self.stream, found, writes, reads)

    def _launch(self, ticket: int, number: int, size: int) -> None:
        launch = self._launches.get(number)
        if launch is None or size != launch.size:
            self.wire.reader.skip(size)
            raise LifetimeError(f"there is no launch {number} of {size:,} bytes")
        try:
            read, seconds = launch.run(self.wire.reader)
        except OpweaveError as error:
            self._break_by(error)  # an event may have brought it, with the step among its causes
            return
        self.session.metrics.ran(seconds)
        parts: list[bytes | memoryview] = [launch.answer(ticket), *read]
        if self._out or self.wire.reader.holds_more:
            self.send(parts)
        else:
            self.send_now(parts)

    def _upload(self, number: int, offset: int, size: int) -> None:
        stream, reader = self.stream, self.wire.reader
        assert stream is not None
        try:
            buffer = self.session.buffer(number)
            buffer.check(offset, size, write=True)
        except OpweaveError:
            reader.skip(size)
            raise
        if not stream.is_async:
            receive_into(self.wire, buffer, offset, size)
            return
        staging = np.empty(size, np.uint8).data
        self._stage(size)
        reader.into(staging)
        self._upload_staged(stream, buffer, offset, staging)

    def _upload_packed(self, number: int, offset: int, size: int, codec: str, width: int, packed: int) -> None:
        stream = self.stream
        assert stream is not None
        raw = receive_packed(self.session, self.wire, size, codec, width, packed)
        buffer = self.session.buffer(number)
        if not stream.is_async:
            buffer.upload(offset, raw)
            return
        buffer.check(offset, size, write=True)
        self._stage(size)
        self._upload_staged(stream, buffer, offset, raw)

    def _upload_staged(self, stream: Stream, buffer: Buffer, offset: int, staging: memoryview) -> None:
        stream.upload(buffer, offset, staging)
        self.later(partial(self._unstage, stream.record(), len(staging)))

    def _stage(self, size: int) -> None:
        """Wait until so many bytes more may be under way."""
        with self._moved:
            while self._staged and self._staged + size > self.session.limits.staging:
                self._moved.wait()
            self._staged += size

    def _unstage(self, event: Any, size: int) -> None:
        with suppress(OpweaveError):  # the next event reports it
            event.synchronize()
        with self._moved:
            self._staged -= size
            self._moved.notify_all()

    def _download(self, ticket: int, number: int, offset: int, size: int) -> None:
        stream = self.stream
        assert stream is not None
        buffer = self.session.buffer(number)
        buffer.check(offset, size)
        if size > self.session.limits.message:
            raise FormatError(f"{size:,} bytes are too many for one message")
        if not stream.is_async:
            self.send(data_of(ticket, buffer, offset, size))
            return
        staging = np.empty(size, np.uint8)
        self._stage(size)
        stream.download(buffer, offset, staging)
        self.later(partial(self._send_staged, ticket, stream.record(), staging))

    def _send_staged(self, ticket: int, event: Any, staging: np.ndarray[Any, Any]) -> None:
        try:
            event.synchronize()
        except OpweaveError as error:
            self._break(error)
            self.fail(ticket, self.broken or encode_error(error))
        else:
            self.send([encode(Kind.DATA, ticket, size=staging.size), staging.data])
        finally:
            with self._moved:
                self._staged -= staging.size
                self._moved.notify_all()

    def _move(self, dst: int, dst_offset: int, src: int, src_offset: int, size: int) -> None:
        stream, to, of = self.stream, self.session.buffer(dst), self.session.buffer(src)
        assert stream is not None
        stream.copy_from(to, dst_offset, of, src_offset, size)

    def _pull(self, dst: int, offset: int, address: str, secret: bytes, size: int) -> None:
        stream, buffer = self.stream, self.session.buffer(dst)
        assert stream is not None
        buffer.check(offset, size, write=True)
        stream.settle()
        self.session.puller.pull(buffer, offset, address, secret, size)

    # --- order --------------------------------------------------------------------------------------------------------

    def _record(self, ticket: int) -> None:
        self._recorded += 1
        number, broken = self._recorded, self.broken
        event = None
        if broken is None and self._later is not None and self.stream is not None:
            try:
                event = self.stream.record()
            except OpweaveError as error:
                self._break(error)
        self.later(partial(self._reach, ticket, number, event, self.broken))

    def _reach(self, ticket: int, number: int, event: Any, broken: Errors | None) -> None:
        if event is not None:
            try:
                event.synchronize()
            except Exception as error:
                self._break_by(error)
                broken = self.broken
        with self._moved:
            self._reached = number
            if broken is not None:
                self._failed = [*self._failed[-_FAILURES_KEPT:], (number, broken)]
            self._moved.notify_all()
        if broken is None:
            self.answer(ticket)
        else:
            self.fail(ticket, broken)

    def _break_by(self, error: BaseException) -> None:
        """Keep a failure that came to light while waiting: that of the step which caused it, where that is known."""
        at: BaseException | None = error
        while at is not None:
            if isinstance(at, StepError):
                plan = -1 if at.plan is None else self._numbers.get(id(at.plan), -1)
                self._break(at.error, plan, -1 if at.step is None else at.step)
                return
            last, at = at, at.__cause__
        self._break(last)

    def wait_for(self, number: int) -> Errors | None:
        """Wait until an event of this stream is reached; why it failed, or ``None``."""
        with self._moved:
            while self._reached < number and self.session.streams.get(self.number) is self:
                self._moved.wait()
            return next((why for at, why in self._failed if at == number), None)

    def _wait(self, stream: int, number: int) -> None:
        other = self.session.streams.get(stream)
        if other is None or other is self:
            return  # it was closed, when all its work was done; or this work is behind it anyway
        why = other.wait_for(number)
        if why is not None and self.broken is None:
            self._failures += 1
            self.broken = [*why[:2], self._failures, *why[3:]]

    def _sync(self, ticket: int) -> None:
        self.later(partial(self._settled, ticket)) if self._later is None else self._settle(ticket)

    def _settle(self, ticket: int) -> None:
        """Synchronize an asynchronous stream, behind the answers that are still to be sent."""
        done: SimpleQueue[None] = SimpleQueue()
        self.later(partial(done.put, None))
        done.get()
        self._settled(ticket)

    def _settled(self, ticket: int) -> None:
        stream = self.stream
        assert stream is not None
        stream.settle()
        if stream.failure is not None:
            self._break_by(stream.failure)
            stream.recover()
        broken, self.broken = self.broken, None
        if broken is None:
            self.answer(ticket)
        else:
            self.fail(ticket, broken)


def _release_frames(failure: BaseException | None) -> None:
    """Forget the calls that failed. A stream keeps its failure, which keeps their variables, and so the memory that
    they worked on until Python looks for cycles."""
    while failure is not None:
        failure.__traceback__ = None
        failure = failure.__cause__ or failure.__context__


_ANSWERED: Final = frozenset({Kind.OPEN, Kind.FUSE, Kind.COMPILE, Kind.BIND})
_RECEIVING: Final = frozenset({Kind.UPLOAD, Kind.UPLOAD_PACKED, Kind.LAUNCH})
"""Messages whose data is taken by whoever serves them."""
_GIVING: Final = frozenset({Kind.DOWNLOAD, Kind.LAUNCH})
_LONG: Final = frozenset({Kind.RUN, Kind.MOVE, Kind.PULL, Kind.WAIT, Kind.SYNC, Kind.LAUNCH})
_BUFFERED: Final = 1 << 14
_ALWAYS: Final = frozenset({Kind.RECORD, Kind.SYNC, Kind.DROP})
