"""`Batcher`: answers of several clients, computed together: a thread that owns the model and one step for all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from opweave.errors import Cancelled, LifetimeError, OpweaveError, SchedulerError
from opweave_models.model import Model
from opweave_models.sampling import Answer, Piece, Sampling

__all__ = ["Batcher", "Request"]


@dataclass
class Request:
    """One answer that a client waits for. Made by `Batcher.submit`; iterate over it for the pieces.

    Attributes:
        prompt: ids before the answer.
    """

    prompt: Sequence[int]
    answer: Answer
    deadline: float
    pieces: queue.SimpleQueue[Piece | OpweaveError] = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """The client went away: the answer ends after the step in progress."""
        self.cancelled.set()

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self.pieces.get()
            if isinstance(piece, OpweaveError):
                raise piece
            yield piece
            if piece.reason is not None:
                return


class Batcher:
    """Runs the answers of several clients. Prompts are fed one at a time, in between the others' steps; every step
    gives one token to all that are being answered. As many at a time as the model has sequences; others wait in order.

    Args:
        model: it must not be used otherwise meanwhile.
        waiting: how many requests may wait.
        timeout: seconds after which a request is ended.
    """

    def __init__(self, model: Model, *, waiting: int = 16, timeout: float = 300.0) -> None:
        self.model: Final = model
        self._timeout: Final = timeout
        self._most: Final = waiting
        self._waiting: Final[list[Request]] = []
        self._running: dict[int, tuple[Request, int]] = {}  # sequence -> its request, and its latest token
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
            if len(self._waiting) >= self._most:
                raise SchedulerError(f"{self._most} requests wait already; try again later")
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
        return len(self._running), len(self._waiting)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closed):
                    self._changed.wait()
                if self._closed:
                    break
                free = len(self._running) < self.model.plan.sequences
                joining = self._waiting.pop(0) if self._waiting and free else None
            if joining is not None:
                self._join(joining)
            if self._running:
                self._step()
        for request, _ in self._running.values():
            request.pieces.put(LifetimeError("the server is shutting down"))
        for request in self._waiting:
            request.pieces.put(LifetimeError("the server is shutting down"))

    def _join(self, request: Request) -> None:
        """Compute a prompt, and the first token of its answer."""
        if request.cancelled.is_set() or monotonic() > request.deadline:
            request.pieces.put(Cancelled("the request was ended before it began"))
            return
        sequence = self.model.decoder_cache().join()
        try:
            logits = self.model.advance({sequence: request.prompt})[sequence]
            piece = request.answer.accept(logits)
        except OpweaveError as error:
            self.model.decoder_cache().release(sequence)
            request.pieces.put(error)
            return
        self._running[sequence] = request, piece.token
        self._give(sequence, request, piece)

    def _step(self) -> None:
        """One token for every answer."""
        for sequence, (request, _) in list(self._running.items()):
            if request.cancelled.is_set() or monotonic() > request.deadline:
                self._end(sequence)
                request.pieces.put(Piece("", 0, reason="cancelled"))
        if not self._running:
            return
        try:
            found = self.model.advance({sequence: [token] for sequence, (_, token) in self._running.items()})
        except OpweaveError as error:  # nobody's answer can go on
            for sequence, (request, _) in list(self._running.items()):
                self._end(sequence)
                request.pieces.put(error)
            return
        for sequence, (request, _) in list(self._running.items()):
            piece = request.answer.accept(found[sequence])
            self._running[sequence] = request, piece.token
            self._give(sequence, request, piece)

    def _give(self, sequence: int, request: Request, piece: Piece) -> None:
        if piece.reason is not None:
            self._end(sequence)
        request.pieces.put(piece)

    def _end(self, sequence: int) -> None:
        del self._running[sequence]
        self.model.decoder_cache().release(sequence)
