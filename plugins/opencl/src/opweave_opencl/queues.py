"""`Queues`: a queue for kernels and one for transfers beside it, which together keep one order where it matters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["MANY", "SMALL", "Queues", "Touched", "Work", "complete"]

SMALL: Final = 256 << 10
"""Bytes below which a transfer is not worth a queue of its own."""

MANY: Final = 64
"""Pieces of work that are remembered before it is asked which of them are done."""


class Touched(NamedTuple):
    """Bytes ``begin .. end`` of a buffer that some work reads, or also writes."""

    memory: Any
    begin: int
    end: int
    written: bool


class Work:
    """Something to submit, once or many times, with the bytes that it touches."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Iterable[Touched]) -> None:
        self.ranges: Final = _joined(ranges)

    def meets(self, other: Work) -> bool:
        """Whether the order of the two matters."""
        return any(
            a.memory is b.memory and a.begin < b.end and b.begin < a.end and (a.written or b.written)
            for a in self.ranges
            for b in other.ranges
        )

    @property
    def size(self) -> int:
        return sum(r.end - r.begin for r in self.ranges)


def _joined(ranges: Iterable[Touched]) -> list[Touched]:
    """The ranges, with those that meet as one."""
    result: list[Touched] = []
    for new in sorted(ranges, key=lambda r: (id(r.memory), r.written, r.begin)):
        last = result[-1] if result else None
        if last and last.memory is new.memory and last.written is new.written and new.begin <= last.end:
            result[-1] = last._replace(end=max(last.end, new.end))
        else:
            result.append(new)
    return result


class Queues:
    """Two in-order command queues of a device that act as one.

    Work that touches the same bytes keeps its order; a large transfer that touches none of the bytes of kernels under
    way, as when the next input is uploaded meanwhile, runs beside them. One thread submits; waiting is allowed in any.

    Attributes:
        kernels: the queue of kernels, and of transfers that need its order.
    """

    def __init__(self, context: cl.Context, device: cl.Device, *, profiling: bool = False) -> None:
        import pyopencl as cl

        properties: Any = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
        self._make: Final[Callable[[], cl.CommandQueue]] = partial(cl.CommandQueue, context, device, properties)
        self.kernels: Final = self._make()
        self._transfers: cl.CommandQueue | None = None
        # What may still be under way on either queue, oldest first: the last event of each piece of work. Work that is
        # repeated replaces its former run, which is over before it.
        self._computing: dict[Work, cl.Event] = {}
        self._moving: dict[Work, cl.Event] = {}
        self._gate: list[cl.Event] = []  # what the next transfer has to wait for besides
        self._lock: Final = Lock()

    @property
    def split(self) -> bool:
        """Whether transfers have been given the queue of their own."""
        return self._transfers is not None

    def before(self, work: Work) -> None:
        """Have the next kernels wait for transfers under way that touch the same bytes."""
        import pyopencl as cl

        if not self._moving:
            return
        with self._lock:
            events = [event for moved, event in self._moving.items() if moved.meets(work)]
        if events:
            # The queue is in order: the last of them is over when all are.
            cl.enqueue_barrier(self.kernels, wait_for=events[-1:])

    def after(self, work: Work, event: cl.Event) -> None:
        """Note kernels that were just submitted, by their last event."""
        self._note(self._computing, work, event)

    def transfer(self, work: Work, enqueue: Callable[[cl.CommandQueue, list[cl.Event]], cl.Event]) -> cl.Event:
        """Submit a transfer to either queue; ``enqueue`` gets the queue and what to wait for."""
        if work.size < SMALL or self._follows(work):
            self.before(work)
            event = enqueue(self.kernels, [])
            self.after(work, event)
            return event
        if self._transfers is None:
            self._transfers = self._make()
        gate, self._gate = self._gate, []
        event = enqueue(self._transfers, gate)
        # Kernels that wait for what was never submitted would wait for ever.
        self._transfers.flush()
        self._note(self._moving, work, event)
        return event

    def _note(self, pending: dict[Work, cl.Event], work: Work, event: cl.Event) -> None:
        with self._lock:
            pending.pop(work, None)
            pending[work] = event
            if len(pending) > MANY:
                for past, done in list(pending.items()):
                    if not complete(done):
                        break
                    pending.pop(past, None)

    def _follows(self, work: Work) -> bool:
        """Whether kernels under way touch the same bytes."""
        with self._lock:
            for past, event in reversed(self._computing.items()):
                if complete(event):
                    return False  # and so are those before it
                if past.meets(work):
                    return True
        return False

    def mark(self) -> tuple[cl.Event, ...]:
        """Events that are reached when everything submitted so far is done."""
        import pyopencl as cl

        mark = cl.enqueue_marker(self.kernels)
        # Another queue that waits for a mark which was never submitted would wait for ever.
        self.kernels.flush()
        with self._lock:
            return (mark, *list(self._moving.values())[-1:])

    def wait(self, events: Sequence[cl.Event]) -> None:
        """Have all later work wait for events of the same context."""
        import pyopencl as cl

        cl.enqueue_barrier(self.kernels, wait_for=list(events))
        self._gate += events
        if len(self._gate) > MANY:
            self._gate = [event for event in self._gate if not complete(event)]

    def finish(self) -> None:
        """Wait on the host until everything submitted is done."""
        with self._lock:
            done, moved = self._computing.copy(), self._moving.copy()
        self.kernels.finish()
        if self._transfers is not None:
            self._transfers.finish()
        with self._lock:
            # What was submitted meanwhile stays.
            for pending, past in ((self._computing, done), (self._moving, moved)):
                for work, event in past.items():
                    if pending.get(work) is event:
                        pending.pop(work, None)


def complete(event: cl.Event) -> bool:
    """Whether what an event stands for is done."""
    import pyopencl as cl

    return bool(event.command_execution_status == cl.command_execution_status.COMPLETE)
