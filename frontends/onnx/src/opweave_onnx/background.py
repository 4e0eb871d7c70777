"""`Background`: a thread that builds programs while others run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from opweave.concurrency import Latch, start_thread
from opweave.lifecycle import close_at_exit

__all__ = ["Background"]


class Background:
    """Runs jobs on a thread, one after the other, until one raises an exception or `close` is called.

    Attributes:
        ended: set when no further job will begin.
    """

    def __init__(self, jobs: Sequence[Callable[[], object]]) -> None:
        self.ended: Final = Latch()
        self._closed = False
        self._error: BaseException | None = None
        start_thread(self._work, list(jobs), name="opweave onnx buckets")
        close_at_exit(self, first=True)

    def check(self) -> None:
        """Raise the exception of a job, the first time that this is called after it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Begin no further job, and wait for the one that runs."""
        self._closed = True
        self.ended.wait()

    def _work(self, jobs: Sequence[Callable[[], object]]) -> None:
        try:
            for job in jobs:
                if self._closed:
                    break
                job()
        except BaseException as error:
            self._error = None if self._closed else error
        finally:
            self.ended.set()

    def describe_pending(self) -> str:
        return "building programs for buckets"
