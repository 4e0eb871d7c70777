"""`Channel`: a connection of a client, whose messages are served in order. `DeviceChannel`: those about devices."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from threading import Lock
from typing import Any, Final

from opweave.contract import Buffer, Step
from opweave.errors import FormatError, OpweaveError
from opweave.runtime.host.operands import copy_bytes
from opweave_remote.failures import encode_error
from opweave_remote.server.session import Session, numbers_of
from opweave_remote.server.transfers import data_of, receive_into, receive_packed
from opweave_remote.steps import decode_steps
from opweave_remote.wire import Frame, Kind, encode, encode_again
from opweave_remote.wires import Wire

__all__ = ["Channel", "DeviceChannel"]

Serve = Callable[..., Any]

_SMALL: Final = 1 << 14
_RECEIVING: Final = frozenset({Kind.WRITE, Kind.WRITE_PACKED, Kind.PROBE})
"""Messages whose data is taken by whoever serves them."""


class Channel:
    """A connection of a client.

    Args:
        session: of which client.
        wire: both sides have proved who they are.

    Attributes:
        served: kind of message -> what serves it, given the arguments, and the bytes of data if it has any. What it
            returns is the answer's value where the message has a ticket.
    """

    def __init__(self, session: Session, wire: Wire) -> None:
        self.session: Final = session
        self.wire: Final = wire
        self.served: dict[Kind, Serve] = {}
        self._out: list[bytes | memoryview] = []  # answers that leave together
        self._sending: Final = Lock()

    def serve(self) -> None:
        """Serve messages until the client ends the connection, or sends what this connection does not take: that is
        refused, and the connection is over. Raises ``EOFError`` or ``OSError`` at the end."""
        reader = self.wire.reader
        try:
            while True:
                if self._out and not reader.holds_more:
                    self.flush()
                frame = reader.frame()
                work = self.served.get(frame.kind)
                if work is None:
                    raise FormatError(f"a message {frame.kind.name} came where it does not belong")
                self.perform(work, frame)
        except FormatError as error:
            self.session.metrics.add("refused_total")
            self.send([encode(Kind.REFUSED, encode_error(error))])
            self.flush()
        finally:
            self.served = {}  # methods of this object: with them it would live until Python looks for cycles

    def perform(self, work: Serve, frame: Frame) -> None:
        """Serve one message and answer it."""
        raise NotImplementedError

    def answer(self, ticket: int, value: Any = None) -> None:
        """Send the answer to a message."""
        self.send([encode_again(Kind.DONE, ticket, None) if value is None else encode(Kind.DONE, ticket, value)])

    def fail(self, ticket: int, error: list[Any]) -> None:
        """Send what failed instead of an answer."""
        self.session.metrics.add("failures_total")
        self.send([encode(Kind.FAILED, ticket, error)])

    def send(self, parts: list[bytes | memoryview]) -> None:
        """Send an answer: if it is small, together with those behind it (`flush`); from any thread."""
        with self._sending:
            if sum(map(len, parts)) > _SMALL:
                out, self._out = [*self._out, *parts], []
                self.wire.send(out)
            else:
                self._out += map(bytes, parts)  # the memory may be written to before it is sent

    def send_now(self, parts: list[bytes | memoryview]) -> None:
        """Send an answer at once; only for callers that know that no earlier answer is queued."""
        with self._sending:
            self.wire.send(parts)

    def flush(self) -> None:
        """Send the answers that are ready."""
        if self._out:
            with self._sending:
                out, self._out = self._out, []
                if out:
                    self.wire.send(out)


class DeviceChannel(Channel):
    """The messages about devices: memory, what they run, what they are."""

    def __init__(self, session: Session, wire: Wire) -> None:
        super().__init__(session, wire)
        self.served = {
            Kind.ALLOC: self._alloc,
            Kind.FREE: self._free,
            Kind.WRITE: self._write,
            Kind.READ: self._read,
            Kind.FILL: self._fill,
            Kind.COPY: self._copy,
            Kind.ASK: self._ask,
            Kind.INFO: self._info,
            Kind.ABORT: self._abort,
            Kind.HAVE: self._have,
            Kind.GRANT: self._grant,
            Kind.PROBE: self._probe,
            Kind.WRITE_PACKED: self._write_packed,
        }

    def perform(self, work: Serve, frame: Frame) -> None:
        kind, args, size = frame
        if kind in (Kind.FREE, Kind.ABORT):
            work(*args)
            return
        ticket = args[0]
        try:
            value = work(*args[1:], size) if kind in _RECEIVING else work(*args[1:])
        except (EOFError, OSError):
            raise
        except Exception as error:
            self.fail(ticket, encode_error(error))
            return
        if kind is Kind.READ:
            self.send(data_of(ticket, *value))
        else:
            self.answer(ticket, value)

    def _alloc(self, device: str, number: int, size: int, usage: str) -> None:
        self.session.alloc(device, number, size, usage)

    def _free(self, numbers: Any) -> None:
        for number in numbers_of(numbers):
            self.session.free(number)

    def _write(self, number: int, offset: int, size: int) -> None:
        try:
            buffer = self.session.buffer(number)
            buffer.check(offset, size, write=True)
        except OpweaveError:
            self.wire.reader.skip(size)
            raise
        receive_into(self.wire, buffer, offset, size)
        self._wrote(buffer, offset, size)

    def _write_packed(self, number: int, offset: int, size: int, codec: str, width: int, packed: int) -> None:
        raw = receive_packed(self.session, self.wire, size, codec, width, packed)
        buffer = self.session.buffer(number)
        buffer.upload(offset, raw)
        self._wrote(buffer, offset, size)

    def _wrote(self, buffer: Buffer, offset: int, size: int) -> None:
        if self.session.cache is not None:
            self.session.cache.wrote(buffer, offset, size)

    def _probe(self, size: int) -> None:
        self.wire.reader.skip(size)

    def _read(self, number: int, offset: int, size: int) -> tuple[Buffer, int, int]:
        buffer = self.session.buffer(number)
        if size > self.session.limits.message:
            raise FormatError(f"{size:,} bytes are too many for one message")
        buffer.check(offset, size)
        return buffer, offset, size

    def _fill(self, number: int, offset: int, size: int, value: int) -> None:
        self.session.buffer(number).fill(value, offset, size)

    def _copy(self, dst: int, dst_offset: int, src: int, src_offset: int, size: int) -> None:
        copy_bytes(self.session.buffer(dst), dst_offset, self.session.buffer(src), src_offset, size)

    def _ask(self, name: str, rows: Any) -> list[list[Any]]:
        device = self.session.device(name)
        if type(rows) is not list:
            raise FormatError("steps are a list")
        answers: list[list[Any]] = []
        for row in rows:
            try:
                (step,) = decode_steps([row])
            except OpweaveError as error:
                answers.append([f"its server does not take the step: {error}", False, 0, "exact", False, False])
            else:
                answers.append(_told(device, step))
        return answers

    def _info(self, name: str) -> list[int]:
        return [*self.session.quota.seen(*self.session.device(name).mem_info())]

    def _abort(self, number: int) -> None:
        stream = self.session.streams.get(number)
        if stream is not None:
            stream.abort()

    def _have(self, number: int, offset: int, size: int, digest: bytes) -> bool:
        buffer, cache = self.session.buffer(number), self.session.cache
        buffer.check(offset, size, write=True)
        if len(digest) != sha256().digest_size:
            raise FormatError(f"a SHA-256 has 32 bytes, not {len(digest)}")
        found = cache is not None and cache.load(digest, buffer, offset, size)
        self.session.metrics.add("cache_hits_total" if found else "cache_misses_total")
        return found

    def _grant(self, number: int, offset: int, size: int) -> bytes:
        return self.session.grant(number, offset, size)


def _told(device: Any, step: Step) -> list[Any]:
    """What a device says of a step, as a row of an answer."""
    reason = device.why_not(step)
    if reason is not None:
        return [reason[:2000], False, 0, "exact", False, False]
    try:
        return [None, device.inplace(step), device._workspace(step), device.precision(step), device.wants(step),
                device.offloads(step)]  # fmt: skip
    except Exception as error:  # as `Device.why_not` does where a check fails
        return [f"its workspace or precision failed: {type(error).__name__}: {error}"[:2000], False, 0, "exact",
                False, False]  # fmt: skip
