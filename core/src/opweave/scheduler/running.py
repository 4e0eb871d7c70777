"""`Progress`: how far a scheduler's runs are. `Run`: one of them, from feeding to the results, maybe beside others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.concurrency import Lock
from opweave.errors import Cancelled, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from opweave.contract.event import Event
    from opweave.scheduler.actions import Feed
    from opweave.scheduler.lower import RunList
    from opweave.scheduler.program import Program

__all__ = ["Progress", "Run"]

Array = np.ndarray[Any, Any]


class Progress:
    """How far a scheduler's runs are.

    Attributes:
        lock: held while one is submitted, and by whoever builds or changes something.
        runner: the thread that is in a run, 0: none is.
        rest: the iterator over the calls of a run's list, where they are not made in one row.
        cut: why a run was ended early, ``""``: it was not.
        ready: the program that can be run again without looking at anything but what is fed.
        last: the program whose values are in memory.
        queued: runs that were submitted as a whole and have not ended.
        begun: runs that began.
        copied: bytes that they copied between memories.
    """

    # One object, as `Submission` is one.
    __slots__ = ("begun", "copied", "cut", "last", "lock", "queued", "ready", "rest", "runner")

    def __init__(self) -> None:
        self.lock: Final = Lock()
        self.runner = 0
        self.rest: Any = None
        self.cut = ""
        self.ready: Program | None = None
        self.last: Program | None = None
        self.queued: Collection[object] = ()
        self.begun = 0
        self.copied = 0


class Run:
    """A run under way.

    Attributes:
        program: whose run it is.
        feeding: the input that is being set just now.
        error: why it failed, once that is known.
        ended: whether it is known to have ended, well or not.
        ends: marks of all its streams, behind everything.
    """

    __slots__ = ("_arrays", "ended", "ends", "error", "feeding", "listed", "program")

    def __init__(self, program: Program, listed: RunList) -> None:
        self.program: Final = program
        self.listed: Final = listed
        self.error: BaseException | None = None
        self.ended = False
        self.feeding: Feed | None = None
        self._arrays: Final[list[Any]] = [None] * len(listed.fetches)
        self.ends: list[Event] = []

    def feed(self, ready: list[tuple[Feed, Array]], *, snapshot: bool) -> None:
        """Set the inputs. With ``snapshot`` the arrays may be overwritten when this returns."""
        for wait in self.listed.before:
            wait()
        for feed, value in ready:
            self.feeding = feed
            if feed.view is not None:
                feed.view[...] = value
            elif feed.put is not None:
                leaf = feed.tensor.leaf
                own = snapshot and feed.queued and not (leaf is not None and leaf.borrowed)
                feed.put(np.array(value, copy=True) if own else value)
        self.feeding = None

    def close(self) -> None:
        """Queue what follows the calls: fetching, and the marks by which the end is known."""
        if not self.listed.streams:
            return
        for i, fetch in enumerate(self.listed.fetches):
            if fetch.stream is not None:
                fetch.stream.call(partial(_store, self._arrays, i, fetch.read))
        for mark in self.listed.after:
            mark()
        self.ends = [stream.record() for stream in self.listed.streams]

    def wait(self) -> None:
        """Wait for the end; raises what a stream failed with."""
        for end in self.ends:
            end.synchronize()

    def arrays(self) -> list[Any]:
        """The outputs of a run that has ended."""
        if self.error is not None:
            raise self.error
        for i, fetch in enumerate(self.listed.fetches):
            if fetch.stream is None:
                self._arrays[i] = fetch.get()
        return self._arrays

    def fail(self, error: BaseException) -> None:
        self.error, self.ended = error, True

    def fail_with(self, other: BaseException) -> None:
        """End, because a run under way at the same time failed."""
        if isinstance(other, Cancelled):
            self.fail(other)
            return
        error = ExecutionError(f"this run was under way when another one failed: {other}")
        error.__cause__ = other
        self.fail(error)


def _store(arrays: list[Any], index: int, read: Callable[[], Any]) -> None:
    arrays[index] = read()
