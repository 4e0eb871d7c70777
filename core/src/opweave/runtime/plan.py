"""`Plan`: steps compiled for one stream; `StepError`: a call of a plan failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from opweave.errors import ExecutionError, LifetimeError

if TYPE_CHECKING:
    from opweave.contract.step import Call
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.stream import Stream

__all__ = ["Plan", "StepError"]


class Plan:
    """Steps compiled for one stream, to be run many times. Made by `Stream.compile`.

    Args:
        calls: functions without arguments, called in this order by `run`.
        size: number of groups; there is one call for each unless the stream compiled several groups into one call.
        buffers: the memory that the calls use; once one of them is freed the plan can no longer be run.

    Attributes:
        stream, size: where it runs, and as given.
    """

    __slots__ = ("__weakref__", "_calls", "_ended", "size", "stream")

    def __init__(self, stream: Stream, calls: Sequence[Call], size: int, buffers: Iterable[Buffer] = ()) -> None:
        self.stream: Final = stream
        self.size: Final = size
        self._calls: list[Call] | None = list(calls)
        self._ended = "its stream was closed"
        for buffer in buffers:
            buffer.add_dependent(self)

    def run(self, around: Callable[[int, Call], Call] | None = None) -> None:
        """Submit every call in order. On a synchronous stream the work is complete when this returns.

        Args:
            around: for tools: receives the index of each call and the call, returns the call to make instead.

        Raises:
            StepError: a call failed; ``__cause__`` is what it raised and ``.step`` the index of the failing group.
            Cancelled: another thread called `Stream.abort`.
            LifetimeError: the plan or its stream was closed, one of its buffers was freed, or another thread is
                submitting to the stream.
        """
        calls, stream = self._calls, self.stream
        if calls is None or stream.closed:
            stream.check_inherited()
            raise LifetimeError(f"{self!r} cannot run: {self._ended}")
        if around is not None:
            calls = [around(i, call) for i, call in enumerate(calls)]
        submission = stream.submission
        if submission.busy:
            raise stream.busy_error()
        with submission.lock:
            try:
                stream.make_calls(self, calls)
            finally:
                stream.progress.sequence += 1

    def close(self) -> None:
        """Wait for the stream's work and drop the calls. Closing twice does nothing.

        Failures of that work are not raised here; they stay on the stream (`Stream.failure`).
        """
        if self._calls is not None:
            self.stream.settle()
            self._calls, self._ended = None, "it was closed"

    @property
    def n_calls(self) -> int:
        """How many calls a run makes: ``size``, unless the stream compiled several groups into one call."""
        return len(self._calls or ())

    @property
    def calls(self) -> list[Call]:
        """What `run` calls; empty once the plan was closed."""
        return self._calls or []

    @property
    def remarks(self) -> list[str]:
        """The texts that calls carry in an attribute ``remark``, for reports: "runs as one graph", for example."""
        return [remark for call in self._calls or () if (remark := getattr(call, "remark", ""))]

    @property
    def library_bytes(self) -> int:
        """Bytes that the libraries of its calls have taken for themselves (``library_bytes`` of the calls)."""
        calls = {id(call): call for call in self._calls or ()}  # equal steps may share one
        return sum(getattr(call, "library_bytes", 0) for call in calls.values())

    def invalidate(self, why: str) -> None:
        """Refuse further runs with the reason ``why``: memory that the calls use is gone."""
        if self._calls is not None:
            self._calls, self._ended = None, why

    when_idle: Final = None
    """Waiting for the device is enough; see `Dependent` in `opweave.runtime.buffer`."""

    @property
    def keeps_copies(self) -> bool:
        """Whether one of the calls keeps another form of read-only memory."""
        return any(getattr(call, "refresh", None) is not None for call in self._calls or ())

    def refresh(self, token: object) -> None:
        """Read-only memory of the calls was written: those that keep copies of it make them again (``refresh``)."""
        for call in self._calls or ():
            refresh = getattr(call, "refresh", None)
            if refresh is not None:
                refresh(token)

    def give_up(self) -> None:
        """Drop the calls of a plan that can no longer run; `invalidate` has already done so."""

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<Plan of {self.size} groups on {self.stream.device.name}>"


class StepError(ExecutionError):
    """A call of a plan failed.

    Args:
        step: index of the failing group in the plan, ``None`` where the stream compiled several into one call.
        error: what the call raised.
        plan: the plan, which `Stream._compiled` receives.
    """

    def __init__(self, step: int | None, error: Exception, plan: Plan | None = None) -> None:
        self.step, self.error, self.plan = step, error, plan
        super().__init__(f"{type(error).__name__}: {error}")
