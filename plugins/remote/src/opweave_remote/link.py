"""`Link`: one connection of a client. Messages go out in order.

Whoever waits for an answer takes what arrives. A thread does that where several wait, where nobody waits for what is
under way, and for the connection that shows whether the server is there.

Ctrl-C may interrupt the main thread after any call: nothing that was sent or received is lost by that (`FrameReader`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import get_ident, local
from typing import Any, Final

from opweave.concurrency import Latch, Lock, Worker, start_thread
from opweave.errors import DeviceLostError, FormatError, LifetimeError, OpweaveError
from opweave.lifecycle import INHERITED
from opweave_remote.failures import Failure, decode_error, lost
from opweave_remote.wire import Kind, encode, encode_again
from opweave_remote.wires import Wire

__all__ = ["CARRYING", "Fate", "Link", "Reply"]

_SENT_AT_ONCE: Final = 1 << 16
"""Bytes from which on queued messages are sent without `Link.flush`; a thread sends them if they are twice as many."""
_FITS: Final = 1 << 14
"""Bytes that the system takes without waiting, also if the other side receives nothing."""

_NOTHING: Final = memoryview(b"")

_OWN: Final = 1 << 32
"""From here on tickets belong to messages that are sent again and again."""


class Carrying(local):
    """Whether this thread carries messages. Finalisers may run in it too, and must not wait for those messages."""

    active = False


CARRYING: Final = Carrying()


def _begin() -> None:
    CARRYING.active = True


class Fate:
    """Whether a connection to a server is alive; shared by its links, its heartbeat and its devices.

    Args:
        name: of the server, for messages.

    Attributes:
        error: why it is lost; ``None``: it is alive.
        ended: set when it is lost or was closed.
        links: those that have not ended.
        explain: says what is known of the cause when it is lost; ``""``: nothing.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.error: DeviceLostError | None = None
        self.ended: Final = Latch()
        self.explain: Callable[[], str] = str
        self._lock: Final = Lock()
        self._ends: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self.links: tuple[Link, ...] = ()

    def at_end(self, end: Callable[[], object], in_child: Callable[[], object]) -> None:
        """Call ``end`` when the connection is over, or now if it is; and ``in_child`` instead in forked processes."""
        with self._lock:
            self._ends.append((end, in_child))
        if self.error is not None:
            end()

    def join(self, link: Link) -> None:
        """Add a link, which ends with the connection."""
        with self._lock:
            self.links = (*self.links, link)
        if self.error is not None:
            link.end()

    def leave(self, link: Link) -> None:
        """A link has ended."""
        with self._lock:
            self.links = tuple([other for other in self.links if other is not link])

    def lose(self, why: str, *, wanted: bool = False) -> None:
        """The server is lost: everybody who waits is woken, and later calls are refused. May be called from any
        thread; only the first reason counts.

        Args:
            wanted: this side has ended the connection.
        """
        with self._lock:
            if self.error is None:
                self.error = lost(self.name, why if wanted else self.explain() or why)
            ends, self._ends = self._ends, []
            links = self.links
        self.ended.set()
        for end in (*[end for end, _ in ends], *[link.end for link in links]):
            end()

    def leave_to_parent(self) -> None:
        """In a forked process: it is over here, and stays as it is for the parent. Sockets are only closed; shutting
        them down would end the connection, and as long as they are open here, the server does not see the parent's
        end."""
        self.error = DeviceLostError(f"{self.name} {INHERITED}")
        ends, self._ends = self._ends, []
        links, self.links = self.links, ()
        for close in (*[close for _, close in ends], *[link.wire.sock.close for link in links]):
            close()
        self.ended.set()

    def check(self) -> None:
        """Raise `DeviceLostError` where it is over."""
        if self.error is not None:
            raise DeviceLostError(*self.error.args)


class Reply:
    """An answer that is waited for. All methods may be called from any thread.

    Attributes:
        link: where it comes from.
        stream, number: of an event: its stream's number, and how many events were recorded there up to it.
        value: what came, once ``arrived`` is set.
        failure: what failed instead, or ``None``.
    """

    __slots__ = ("__weakref__", "arrived", "failure", "into", "link", "number", "stream", "value")

    def __init__(self, link: Link, into: memoryview | None = None, stream: int = 0, number: int = 0) -> None:
        self.link: Final = link
        self.into = into
        self.stream: Final = stream
        self.number: Final = number
        self.arrived: Final = Latch()
        self.value: Any = None
        self.failure: Failure | None = None

    def wait(self) -> None:
        """Wait for the answer, or the failure."""
        if not self.arrived.is_set():
            self.link.wait_for(self)

    def result(self) -> Any:
        """Wait, then return the value or raise the failure."""
        self.wait()
        if self.failure is not None:
            raise self.failure.error
        return self.value


class Link:
    """One connection to a server.

    Args:
        fate: of the whole connection to that server. If this link breaks, all is lost.
        wire: connected, both sides have proved who they are.
        device: name of the device whose errors come this way.
        watches: its own thread takes all that arrives, and so notices at once when the server is gone.
    """

    def __init__(self, fate: Fate, wire: Wire, device: str = "", *, watches: bool = False) -> None:
        self.fate: Final = fate
        self.wire: Final = wire
        self.device: Final = device
        self._recorded = 0
        self._lock: Final = Lock()
        self._out: list[bytes | memoryview] = []
        self._size = 0
        self._left = _NOTHING  # what is being sent
        self._sent: Final[list[int]] = []  # bytes of it that are sent
        self._asked: Final[dict[int, Reply]] = {}
        self._new = 0  # questions that were not flushed yet
        self._answered: Reply | None = None  # the latest whose answer was taken
        self._tickets: list[int] = []  # those that are free again: frames that come again are known
        self._more_tickets: Final = count(1)
        self._sender: Worker | None = None
        self._closing = False
        self._ended: Final = Latch()
        self._watches: Final = watches
        self._reader = 0  # the thread that takes what arrives, 0: none
        self._waiting = 0
        self._wake: Final[SimpleQueue[None]] = SimpleQueue()
        fate.join(self)
        start_thread(self._read, name=f"opweave {fate.name}")

    # --- out ----------------------------------------------------------------------------------------------------------

    def post(self, frame: bytes | memoryview, data: memoryview | None = None) -> None:
        """Queue an encoded message, and data that stays unchanged until its effect is known. It is sent with `flush`,
        or when much is queued."""
        with self._lock:
            self._check()
            frames, size = ((frame,), len(frame)) if data is None else ((frame, data), len(frame) + len(data))
            self._queue(frames, size)

    def ask(
        self, kind: Kind, *args: Any, data: memoryview | None = None, into: memoryview | None = None, event: int = 0
    ) -> Reply:
        """Queue a message that is answered.

        Args:
            args: those behind the ticket.
            into: where the answer's data goes.
            event: the number of the stream whose event it records.
        """
        with self._lock:
            self._check()
            reply = Reply(self, into, event, self._recorded + 1)
            ticket = self._tickets.pop() if self._tickets else next(self._more_tickets)
            make = encode_again if kind in _REPEATED else encode
            size = 0 if data is None else len(data)
            frame = make(kind, ticket, *args, size=size)
            self._queue((frame,) if data is None else (frame, data), len(frame) + size, ticket, reply)
            return reply  # an interrupt before this loses nothing: the answer still finds the reply

    def ticket(self) -> int:
        """A ticket for messages that are sent by `ask_again`."""
        with self._lock:
            return _OWN + next(self._more_tickets)

    def ask_again(self, ticket: int, message: memoryview, into: memoryview) -> Reply:
        """Send a message that was encoded once, with a ticket of its own, and whose data has changed since.

        Args:
            message: is not written to until the answer is there.
            into: where the answer's data goes.
        """
        latest = self._asked.get(ticket)
        if latest is not None:  # its run was interrupted
            latest.wait()
        with self._lock:
            self._check()
            reply = Reply(self, into)
            self._queue((message,), len(message), ticket, reply)
            return reply

    def _check(self) -> None:
        """Raise what keeps messages from being queued."""
        if self.fate.error is not None:
            self.fate.check()
        if self._closing:
            raise LifetimeError(f"a connection to {self.fate.name} was closed")

    def _queue(
        self, frames: tuple[bytes | memoryview, ...], size: int, ticket: int = 0, reply: Reply | None = None
    ) -> None:
        """Queue frames of ``size`` bytes, and note who waits for their answer."""
        # Interrupts come after calls: without one between them these lines are executed all or not at all. A reply that
        # is noted without its message would never arrive, and an event that is counted without being recorded would
        # make the server wait for ever.
        if reply is not None:
            self._asked[ticket] = reply
            self._new += 1
            if reply.stream:
                self._recorded += 1
        self._out += frames
        self._size += size
        if self._size >= _SENT_AT_ONCE:
            self.flush()

    def call(self, kind: Kind, *args: Any, data: memoryview | None = None, into: memoryview | None = None) -> Any:
        """Send a message and wait for its answer; raises what failed, `DeviceLostError` where nothing comes."""
        return self.ask(kind, *args, data=data, into=into).result()

    def flush(self) -> None:
        """Send what is queued."""
        with self._lock:
            if not self._out and not self._left:
                if self._sender is not None and self._sender.jobs:
                    self._sender.wake()  # an interrupt may have come before
                return
            # The server may be sending answers that nobody takes, and take no messages meanwhile.
            if not self._reader and (len(self._asked) > self._new or (self._asked and self._size > _FITS)):
                self._wake.put(None)
            self._new = 0
            if self._size < 2 * _SENT_AT_ONCE and (self._sender is None or not self._sender.jobs):
                self._push()
                return
            if self._sender is None:
                self._sender = Worker(f"opweave to {self.fate.name}", _begin)
            jobs = self._sender.jobs
            out: list[bytes | memoryview] = [self._left[sum(self._sent) :], *self._out]
            job = partial(self._send, out)
            # Without a call between them: an interrupt leaves the messages here or there.
            jobs += (job,)
            self._left, self._out, self._size = _NOTHING, [], 0
            del self._sent[:]
            self._sender.wake()

    def _push(self) -> None:
        """Send a few bytes at once. An interrupt leaves the rest for the next time."""
        sent = self._sent
        try:
            while True:
                if sent:
                    self._left = self._left[sent[0] :]
                    del sent[0]
                if not self._left:
                    if not self._out:
                        return
                    joined = memoryview(self._out[0] if len(self._out) == 1 else b"".join(self._out))
                    self._left, self._out, self._size = joined, [], 0
                self.wire.push(self._left, sent)
                if sent and sent[0] == len(self._left):  # all of it, as nearly always
                    self._left = _NOTHING
                    del sent[:]
                    if not self._out:
                        return
        except OSError as error:
            self.fate.lose(f"sending failed: {error}")

    def _send(self, out: list[bytes | memoryview]) -> None:
        try:
            self.wire.send(out)
        except OSError as error:  # TLS's too
            # Whoever waits for the effect receives the loss; the caller only queues.
            self.fate.lose(f"sending failed: {error}")

    # --- in -----------------------------------------------------------------------------------------------------------

    def wake_reader(self) -> None:
        """Have answers taken that are waited for, if nobody does it."""
        if self._asked and not self._reader:
            self._wake.put(None)

    def wait_for(self, reply: Reply) -> None:
        """Wait for the answer to a message of this link."""
        self.flush()
        for other in self.fate.links:
            # What is waited for may be behind work whose results have to be taken first.
            if other is not self:
                other.wake_reader()
        me, carrying, counted = get_ident(), CARRYING.active, False
        failed = True
        try:
            self._waiting += 1
            counted = True
            if not self._reader and not self._watches:
                self._reader = me
            if self._reader == me:
                CARRYING.active = True
                self._tell()
                while not reply.arrived.is_set():
                    self._take()
            else:
                reply.arrived.wait()
            failed = False
        except Exception:
            pass  # the thread meets it too, and ends the link
        finally:
            if self._reader == me:
                self._reader = 0
            self._waiting -= counted
            CARRYING.active = carrying
            if failed or self._waiting:
                self._wake.put(None)
        reply.arrived.wait()

    def query(self, reply: Reply) -> bool:
        """Whether an answer is there; does not wait."""
        if not reply.arrived.is_set() and not self._reader:
            self.flush()
            self._wake.put(None)
        return reply.arrived.is_set()

    def end(self) -> None:
        """Nothing more is sent or received; from any thread."""
        self.wire.end()
        self._wake.put(None)

    def _read(self) -> None:
        _begin()
        me, why = get_ident(), "the connection ended"
        try:
            while True:
                if not self._watches:
                    self._wake.get()
                    self._tell()
                while self._watches or self._asked or self._closing or self.fate.error is not None:
                    if not self._reader:
                        self._reader = me
                    if self._reader != me:
                        break  # whoever it is wakes this thread at the end, if others wait
                    self._take()
                    while self._asked or self._watches:
                        self._take()
                    self._reader = 0
        except EOFError:
            pass
        except (FormatError, OSError) as error:
            why = str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if not self._closing:
            self.fate.lose(why)
        self._stop_reading(why)

    def _stop_reading(self, why: str) -> None:
        """Fail what waits for an answer, which will not come, and close the connection."""
        self.fate.leave(self)
        self.wire.end()
        with self._lock:
            self._closing = True
            left = list(self._asked.values())
            self._asked.clear()
            sender, self._sender = self._sender, None
        failure = Failure(self.fate.error or lost(self.fate.name, why))
        for reply in left:
            reply.failure = failure
            reply.arrived.set()
        if sender is not None:
            sender.close()
            sender.ended.wait()
        self.wire.close()
        self._ended.set()

    def _take(self) -> None:
        """Take one message. After an interrupt within this method, the message is taken again."""
        reader = self.wire.reader
        frame = reader.peek()
        if frame.kind is Kind.REFUSED:
            raise FormatError(f"it refused a message: {decode_error(frame.args[0]).error}")
        ticket = frame.args[0]
        reply = self._asked.get(ticket) if frame.kind in _ANSWERS else None
        if reply is None:
            raise FormatError(f"it sent {frame.kind.name}, which nobody asked for")
        if frame.kind is Kind.DATA:
            if reply.into is None or frame.size != len(reply.into):
                raise FormatError(f"it sent {frame.size:,} bytes, which nobody asked for")
            reader.into(reply.into)
        elif frame.kind is Kind.DONE:
            if reply.into is not None:
                raise FormatError("it sent no data where some was asked for")
            reply.value = frame.args[1]
        else:
            reply.failure = decode_error(frame.args[1], self.device)
        reply.into = None
        # No call lies between these lines, so that no interrupt leaves an answer half taken: it would be taken again,
        # and given to the next question with this ticket.
        if ticket < _OWN:
            self._tickets += (ticket,)
        del self._asked[ticket]
        self._answered = reply
        reader.current = None
        self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for the latest answer. If an interrupt comes before, the next reader does it."""
        if self._answered is not None:
            self._answered.arrived.set()

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what is queued, then end the connection and its threads. The server is not lost by that."""
        if CARRYING.active:
            start_thread(self.close, name=f"opweave end {self.fate.name}")
            return
        with self._lock:
            try:
                if self.fate.error is None:
                    self.flush()
            except OpweaveError:
                pass
            self._closing = True
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
            sender.ended.wait()
        self.end()
        self._ended.wait()


_REPEATED: Final = frozenset({Kind.DOWNLOAD, Kind.RECORD, Kind.SYNC})
_ANSWERS: Final = frozenset({Kind.DONE, Kind.DATA, Kind.FAILED})
