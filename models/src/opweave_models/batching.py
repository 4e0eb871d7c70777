"""`Batcher`: answers of several clients, computed together: a thread that owns the model and one step for all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from opweave.errors import BoundsError, Cancelled, LifetimeError, OpweaveError, SchedulerError
from opweave_models.model import CHUNK, Model
from opweave_models.sampling import Answer, Piece, Sampling

__all__ = ["Batcher", "Request", "check_limits"]


def check_limits(queue: int, timeout: float) -> None:
    """Raise `BoundsError` for a number of requests that may wait, or seconds that one may take, that are none."""
    if isinstance(queue, bool) or not isinstance(queue, int) or queue < 0:
        raise BoundsError(f"queue is a number of requests from 0, not {queue!r:.60}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise BoundsError(f"timeout is a number of seconds above 0, not {timeout!r:.60}")


@dataclass(eq=False)
class Request:
    """One answer that a client waits for. Made by `Batcher.submit`; iterate over it for the pieces.

    Attributes:
        prompt: ids before the answer.
        cached: how many of them were not computed for this answer, since another one had begun with them.
        left: the ids that are fed next: the rest of the prompt, then the latest token of the answer.
        begun: there is a token of the answer.
    """

    prompt: Sequence[int]
    answer: Answer
    deadline: float
    cached: int = 0
    left: list[int] = field(default_factory=list)
    begun: bool = False
    pieces: queue.SimpleQueue[Piece | OpweaveError] = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """The client went away: the answer ends after the step in progress."""
        self.cancelled.set()

    @property
    def over(self) -> bool:
        """It was cancelled, or took too long."""
        return self.cancelled.is_set() or monotonic() > self.deadline

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self.pieces.get()
            if isinstance(piece, OpweaveError):
                raise piece
            yield piece
            if piece.reason is not None:
                return


class Batcher:
    """Runs the answers of several clients. Every step gives one token to all that are being answered; in between, one
    chunk of one prompt is computed, so that a long one delays the others by a chunk at a time. The beginning that a
    prompt has in common with another sequence is not computed again (`Model.join`). As many at a time as the model has
    sequences; others wait in order.

    Args:
        model: sessions of one's own take places from the clients.
        waiting: how many requests may wait for a sequence; 0: only those are taken that can begin at once.
        timeout: seconds after which a request is ended.
    """

    def __init__(self, model: Model, *, waiting: int = 16, timeout: float = 300.0) -> None:
        self.model: Final = model
        self._timeout: Final = timeout
        self._most: Final = waiting
        self._waiting: Final[list[Request]] = []
        self._running: Final[dict[int, Request]] = {}
        self._changed: Final = threading.Condition()
        self._closed = False
        self._thread: Final = threading.Thread(target=self._loop, name="opweave-models-batcher", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, *, stop: Sequence[str] = (),
        logprobs: int | None = None, schema: Mapping[str, Any] | str | None = None,
    ) -> Request:  # fmt: skip
        """Queue an answer. Arguments as of `Session.generate`.

        Raises:
            SchedulerError: too many requests wait; try again later.
            BoundsError: the prompt is empty, or leaves no room for an answer.
            LifetimeError: the batcher was closed.
        """
        answer = self.model.answer(prompt, max_tokens, sampling, stop, logprobs, schema)
        request = Request(prompt, answer, monotonic() + self._timeout)
        with self._changed:
            if self._closed:
                raise LifetimeError("the server is shutting down")
            if len(self._running) + len(self._waiting) >= self.model.plan.sequences + self._most:
                raise SchedulerError(f"no more than {self._most} requests may wait; try again later")
            self._waiting.append(request)
            self._changed.notify()
        return request

    def close(self) -> None:
        """End all answers and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def busy(self) -> tuple[int, int]:
        """How many requests are being answered, and how many wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def _loop(self) -> None:
        try:
            while self._pass():
                pass
        finally:  # also where an error of a kind that is not expected ends the thread
            with self._changed:
                self._closed = True
            for request in (*self._running.values(), *self._waiting):
                request.pieces.put(LifetimeError("the server is shutting down"))
            while self._running:
                self.model.release(self._running.popitem()[0])

    def _pass(self) -> bool:
        """A chunk of a prompt, and a step of all answers; ``False``: the batcher was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._closed)
            if self._closed:
                return False
            for request in [request for request in self._waiting if request.over]:
                self._waiting.remove(request)
                request.pieces.put(Cancelled("the request was ended before it began"))
            free = len(self._running) < self.model.plan.sequences
            # Prompts that come one after the other share their beginnings, also if they came together.
            joins = self._waiting and free and all(request.begun for request in self._running.values())
            joining = self._waiting[0] if joins else None
        if joining is not None:
            self._join(joining)
        for begun in (False, True):
            self._advance([sequence for sequence, request in self._running.items() if request.begun is begun])
        return True

    def _join(self, request: Request) -> None:
        try:
            sequence = self.model.join(request.prompt)
        except OpweaveError as error:
            with self._changed:
                self._waiting.remove(request)
            request.pieces.put(error)
            return
        request.cached = int(self.model.decoder_cache().lengths[sequence])
        request.left = list(request.prompt[request.cached :])
        with self._changed:  # at every time it is among those that wait or those that run, which `submit` counts
            self._waiting.remove(request)
            self._running[sequence] = request

    def _advance(self, sequences: Sequence[int]) -> None:
        """Feed what comes next: a chunk of a prompt, or the latest tokens of answers; give what follows."""
        if not sequences:
            return
        try:
            found = self.model.advance({sequence: self._running[sequence].left[:CHUNK] for sequence in sequences})
        except OpweaveError as error:  # none of these answers can go on
            for sequence in sequences:
                self._end(sequence, error)
            return
        for sequence, logits in found.items():
            request = self._running[sequence]
            del request.left[:CHUNK]
            if request.left:
                if request.over:
                    self._end(sequence, Cancelled("the request was ended before its first token"))
                continue
            try:
                piece = request.answer.accept(logits, cancelled=request.over)
            except OpweaveError as error:
                self._end(sequence, error)
                continue
            request.left, request.begun = [piece.token], True
            if piece.reason is None:
                request.pieces.put(piece)
            else:
                self._end(sequence, piece)

    def _end(self, sequence: int, last: Piece | OpweaveError) -> None:
        self.model.release(sequence)
        self._running.pop(sequence).pieces.put(last)
