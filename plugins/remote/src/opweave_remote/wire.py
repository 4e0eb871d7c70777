"""Frames and messages of the protocol: bytes to typed messages and back, without sockets and without decisions.

A frame, little-endian: 2 bytes ``MAGIC``; u8 kind; u8 zero; u32 length of the arguments; u64 length of the data; the
arguments, a list in msgpack without extension types; then the data, raw bytes. Every argument is checked against
`SCHEMA` before anybody uses it; arguments with parts of their own (steps, errors) are checked where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

import msgpack

from opweave.errors import FormatError

__all__ = [
    "HEAD", "MAGIC", "MAX_BEFORE_PROOF", "MAX_VERSION", "MIN_VERSION", "SCHEMA", "Frame", "FrameReader", "Kind",
    "checked", "encode", "encode_again", "fields",
]  # fmt: skip

MAGIC: Final = b"ow"
HEAD: Final = Struct("<2sBBIQ")

MIN_VERSION: Final = 1
MAX_VERSION: Final = 1
"""The versions of the protocol that this package speaks. Both sides take the highest that they share."""

MAX_BEFORE_PROOF: Final = 4096
"""Bytes of arguments of a frame before the other side has proved who it is; data is not accepted then."""

_BUFFERED: Final = 1 << 16
_LONGEST_KNOWN: Final = 64
_MOST_KNOWN: Final = 1024
_DEEPEST: Final = 24


class Kind(IntEnum):
    """What a message is."""

    __hash__ = int.__hash__  # that of `enum` is written in Python, and each message is looked up several times

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    ALLOC = 10
    FREE = 11
    WRITE = 12
    READ = 13
    FILL = 14
    COPY = 15
    ASK = 16
    INFO = 17
    ABORT = 18
    HAVE = 19
    GRANT = 20
    OPEN = 21
    FUSE = 22
    COMPILE = 23
    RUN = 24
    UPLOAD = 25
    DOWNLOAD = 26
    MOVE = 27
    PULL = 28
    RECORD = 29
    WAIT = 30
    SYNC = 31
    DROP = 32
    BIND = 33
    LAUNCH = 34
    PROBE = 35
    WRITE_PACKED = 36
    UPLOAD_PACKED = 37
    DONE = 40
    DATA = 41
    FAILED = 42


SCHEMA: Final[dict[Kind, str]] = {
    Kind.CHALLENGE: "uubu",  # least and greatest version, nonce, whether a token is asked for
    Kind.HELLO: "usbbb",  # version, role, session, nonce, proof
    Kind.WELCOME: "bbb*",  # proof, session, key of the session, description of the server
    Kind.REFUSED: "*",  # error
    # Of devices; the first argument of what is answered is a ticket.
    Kind.ALLOC: "usuus",  # ticket, device, number of the new buffer, bytes, usage
    Kind.FREE: "*",  # numbers of buffers
    Kind.WRITE: "uuu",  # ticket, buffer, offset; with data
    Kind.READ: "uuuu",  # ticket, buffer, offset, bytes
    Kind.FILL: "uuuuu",  # ticket, buffer, offset, bytes, value
    Kind.COPY: "uuuuuu",  # ticket, target, offset, source, offset, bytes
    Kind.ASK: "us*",  # ticket, device, unbound steps
    Kind.INFO: "us",  # ticket, device
    Kind.ABORT: "u",  # stream
    Kind.HAVE: "uuuub",  # ticket, buffer, offset, bytes, their SHA-256
    Kind.GRANT: "uuuu",  # ticket, buffer, offset, bytes: let another server read them once
    Kind.PROBE: "u",  # ticket; with data that is thrown away: shows how fast the connection is
    Kind.WRITE_PACKED: "uuuusu",  # ticket, buffer, offset, bytes, codec, bytes of a number; with compressed data
    # Of streams
    Kind.OPEN: "uus*",  # ticket, number of the new stream, device, parameters
    Kind.FUSE: "u*",  # ticket, unbound steps
    Kind.COMPILE: "uu*",  # ticket, number of the new plan, groups
    Kind.RUN: "u",  # plan
    Kind.UPLOAD: "uu",  # buffer, offset; with data
    Kind.UPLOAD_PACKED: "uuusu",  # buffer, offset, bytes, codec, bytes of a number; with compressed data
    Kind.DOWNLOAD: "uuuu",  # ticket, buffer, offset, bytes
    Kind.MOVE: "uuuuu",  # target, offset, source, offset, bytes
    Kind.PULL: "uusbu",  # target, offset, address of the other server, its grant, bytes
    Kind.RECORD: "u",  # ticket
    Kind.WAIT: "uu",  # stream, number of its event
    Kind.SYNC: "u",  # ticket
    Kind.DROP: "*",  # numbers of plans and launches
    Kind.BIND: "uu***",  # ticket, number of the new launch, ranges to write, numbers of plans, ranges to read
    Kind.LAUNCH: "uu",  # ticket, number of the launch; with the data of all that it writes
    # Answers
    Kind.DONE: "u*",  # ticket, value
    Kind.DATA: "u",  # ticket; with data
    Kind.FAILED: "u*",  # ticket, error
}
"""Kind -> one letter for each argument: ``u`` an integer from 0 to 2^63 - 1, ``s`` a text, ``b`` bytes, ``*`` a value
that is checked where it is read."""

_WITH_DATA: Final = frozenset({
    Kind.WRITE, Kind.UPLOAD, Kind.LAUNCH, Kind.DATA, Kind.PROBE, Kind.WRITE_PACKED, Kind.UPLOAD_PACKED,
})  # fmt: skip
_REPEATED: Final = frozenset({
    Kind.RUN, Kind.UPLOAD, Kind.DOWNLOAD, Kind.MOVE, Kind.RECORD, Kind.WAIT, Kind.SYNC, Kind.LAUNCH, Kind.DONE,
    Kind.DATA,
})  # fmt: skip
"""Messages that come again and again with the same arguments."""
_KINDS: Final = {int(kind): kind for kind in Kind}
_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "u": lambda value: type(value) is int and 0 <= value < 1 << 63,
    "s": lambda value: type(value) is str,
    "b": lambda value: type(value) is bytes,
    "*": lambda value: True,
}


class Frame(NamedTuple):
    """A received message, whose data is still to be read: ``size`` bytes."""

    kind: Kind
    args: list[Any]
    size: int


def encode(kind: Kind, *args: Any, size: int = 0) -> bytes:
    """A frame without its data, of which ``size`` bytes follow."""
    packed: bytes = msgpack.packb(args)
    return HEAD.pack(MAGIC, kind, 0, len(packed), size) + packed


encode_again: Final = lru_cache(4096)(encode)
"""`encode`, for messages that come again with the same numbers."""


def checked(kind: int, packed: bytes | memoryview, size: int) -> Frame:
    """The message of a frame.

    Raises:
        FormatError: an unknown kind, arguments other than `SCHEMA` tells, or data where none belongs.
    """
    known = _KINDS.get(kind)
    if known is None:
        raise FormatError(f"there is no message of kind {kind}")
    if size and known not in _WITH_DATA:
        raise FormatError(f"a message {known.name} carries no data, and this one {size:,} bytes")
    try:
        args = msgpack.unpackb(packed, raw=False, strict_map_key=True, use_list=True)
    except Exception as error:  # msgpack raises many kinds for bytes that are none of its own
        raise FormatError(f"the arguments of a message {known.name} are no msgpack: {error}") from None
    schema = SCHEMA[known]
    if type(args) is not list or len(args) != len(schema):
        raise FormatError(f"a message {known.name} has {len(schema)} arguments")
    for i, (letter, value) in enumerate(zip(schema, args, strict=True)):
        if not _CHECKS[letter](value):
            raise FormatError(f"argument {i} of a message {known.name} is {value!r:.60}")
        if letter == "*":
            _check_plain(value, 0)
    return Frame(known, args, size)


def _check_plain(value: Any, depth: int) -> None:
    """Refuse what is nested too deeply, and msgpack's extension types."""
    if depth > _DEEPEST:
        raise FormatError("a message is nested too deeply")
    if type(value) is list:
        for part in value:
            _check_plain(part, depth + 1)
    elif type(value) is dict:
        for part in value.values():
            _check_plain(part, depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str, bytes):
        raise FormatError(f"a message has a value of type {type(value).__name__}")


def fields(value: Any, letters: str, what: str) -> list[Any]:
    """``value`` as a list of the types that ``letters`` name, as those of `SCHEMA`; further ones: ``i`` any integer of
    64 bits, ``?`` a bool, ``l`` a list, ``U`` a list of what ``u`` is.

    Raises:
        FormatError: it is something else.
    """
    if type(value) is not list or len(value) != len(letters):
        raise FormatError(f"{what} has {len(letters)} parts, not {value!r:.60}")
    for letter, part in zip(letters, value, strict=True):
        if not (_CHECKS.get(letter) or _FURTHER[letter])(part):
            raise FormatError(f"{what} has a part {part!r:.60}")
    return value


_FURTHER: Final[dict[str, Callable[[Any], bool]]] = {
    "i": lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63,
    "?": lambda value: type(value) is bool,
    "l": lambda value: type(value) is list,
    "U": lambda value: type(value) is list and all(map(_CHECKS["u"], value)),
}


Receive = Callable[[memoryview, list[int]], None]


class FrameReader:
    """Takes frames from a source of bytes, and their data straight into the memory that it is for.

    An interrupt of the main thread (Ctrl-C) at any moment of a call loses nothing: what was received is noted by the
    same call into C that receives it, and a frame stays `current` until whoever takes it has dealt with it. Interrupts
    come after calls, so that assignments beside each other are made together.

    Args:
        receive: receives at least one byte into a buffer and appends their number to the list; 0 at the end.
        receive_all: as ``receive``, but may wait until the buffer is full: for data, whose size is known.

    Attributes:
        max_args, max_data: the most bytes of arguments and of data of a frame; settable.
        current: the frame that `peek` found, until it is set to ``None``.
        received: bytes so far.
    """

    def __init__(self, receive: Receive, max_args: int, max_data: int, receive_all: Receive | None = None) -> None:
        self.max_args = max_args
        self.max_data = max_data
        self.current: Frame | None = None
        self.received = 0
        self._receive: Final = receive
        self._receive_all: Final = receive_all or receive
        self._memory = memoryview(bytearray(_BUFFERED))
        self._start = self._end = 0
        self._filled = 0  # bytes of the current frame's data that are where they belong
        self._got: Final[list[int]] = []  # bytes behind `_end`, or behind `_filled` while data comes
        self._known: Final[dict[bytes, Frame]] = {}
        self._latest, self._latest_frame = b"?", Frame(Kind.DONE, [], 0)  # the latest of these; b"?": none yet

    @property
    def holds_more(self) -> bool:
        """Whether bytes of a further frame are here already."""
        return self._end > self._start

    def frame(self) -> Frame:
        """The next message. Its data has to be taken (`into`, `scatter`, `skip`) before the next call.

        Raises:
            EOFError: the other side has ended, between two frames or within one.
            FormatError: bytes that are no frame, a frame above the limits, or arguments of other types.
        """
        found = self.peek()
        self.current = None
        return found

    def peek(self) -> Frame:
        """The next message, again and again until ``current`` is set to ``None``; raises as `frame`."""
        if self.current is not None:
            return self.current
        if self._end - self._start < HEAD.size:
            self._fill(HEAD.size)
        last = self._start + len(self._latest)
        if last <= self._end and self._memory[self._start : last] == self._latest:
            frame = self._latest_frame
        else:
            frame, last = self._parse()
        self._start, self._filled, self.current = last, 0, frame
        if self._start == self._end:
            self._start = self._end = 0
        return frame

    def _parse(self) -> tuple[Frame, int]:
        """The next message, where it is not a repetition of `_latest`, and the offset of its end."""
        magic, kind, zero, length, size = HEAD.unpack_from(self._memory, self._start)
        if magic != MAGIC or zero:
            raise FormatError("these bytes are no message of opweave")
        if length > self.max_args or size > self.max_data:
            raise FormatError(f"a message of {length:,} and {size:,} bytes is above the limits of "
                              f"{self.max_args:,} and {self.max_data:,}")  # fmt: skip
        if self._end - self._start < HEAD.size + length:
            self._fill(HEAD.size + length)
        first = self._start + HEAD.size
        last = first + length
        if length > _LONGEST_KNOWN:
            frame = checked(kind, self._memory[first:last], size)
        else:
            # Runs of a program send the same frames again and again.
            raw = bytes(self._memory[self._start : last])
            known = self._known.get(raw)
            if known is None:
                known = checked(kind, raw[HEAD.size :], size)
                if known.kind in _REPEATED and (known.args[-1] is None or type(known.args[-1]) is int):
                    if len(self._known) >= _MOST_KNOWN:
                        self._known.clear()
                    self._known[raw] = known
            else:
                self._latest, self._latest_frame = raw, known
            frame = known
        return frame, last

    def _fill(self, need: int) -> None:
        """Receive until ``need`` bytes are here."""
        got = self._got
        while True:
            if got:  # also those of a call that was interrupted
                self._end += got[0]
                self.received += got[0]
                del got[0]
            have = self._end - self._start
            if have >= need:
                return
            if self._start + need > len(self._memory):
                memory = memoryview(bytearray(max(need, _BUFFERED)))
                memory[:have] = self._memory[self._start : self._end]
                self._memory, self._start, self._end = memory, 0, have
            self._receive(self._memory[self._end :], got)
            if not got[0]:
                del got[0]
                raise EOFError("the other side has ended the connection")

    def into(self, target: memoryview) -> None:
        """Fill ``target`` with the data of the latest frame, from where an interrupt left off; raises ``EOFError`` as
        `frame`."""
        size, got = len(target), self._got
        at = min(size, self._end - self._start)
        if at and not self._filled:
            target[:at] = self._memory[self._start : self._start + at]
            self._start, self._filled = self._start + at, at
            if self._start == self._end:
                self._start = self._end = 0
        while True:
            if got:
                self._filled += got[0]
                self.received += got[0]
                del got[0]
            if self._filled >= size:
                return
            self._receive_all(target[self._filled :], got)
            if not got[0]:
                del got[0]
                raise EOFError("the other side has ended the connection")

    def scatter(self, targets: Sequence[memoryview]) -> None:
        """Fill each of ``targets`` in turn with the data of the latest frame; after an interrupt it cannot go on."""
        for target in targets:
            last = self._start + len(target)
            if last < self._end:
                target[:] = self._memory[self._start : last]
                self._start = last
            else:
                self._filled = 0
                self.into(target)

    def skip(self, size: int) -> None:
        """Receive ``size`` bytes and discard them."""
        scratch = memoryview(bytearray(min(size, 1 << 20)))
        for at in range(0, size, len(scratch) or 1):
            self._filled = 0
            self.into(scratch[: size - at])
