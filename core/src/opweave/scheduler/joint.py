"""`Joint`: the calls of a run's plans in one row, so that a split costs no more than its calls.

Plans of synchronous streams need not take turns: what one stream sets up for its calls (`Stream._run`) mostly suits the
others too, and is then set up once a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opweave.errors import Cancelled
from opweave.host.storage import CallSequence

if TYPE_CHECKING:
    from opweave.contract.step import Call
    from opweave.contract.stream import Stream
    from opweave.scheduler.actions import Action

__all__ = ["Joint", "join"]


class Joint:
    """A run list in one row of calls.

    Attributes:
        stream: of those whose plans were taken apart the one that makes the calls of all.
        submission: theirs.
        calls: steps and copies.
        starts: where in ``calls`` each of ``actions`` begins.
    """

    __slots__ = ("_actions", "calls", "starts", "stream", "submission")

    def __init__(self, stream: Stream, calls: list[Call], starts: list[int], actions: Sequence[Action]) -> None:
        self.stream: Final = stream
        self.submission: Final = stream._submission
        self.calls: Final = calls
        self.starts: Final = starts
        self._actions: Final = actions

    def blame(self, index: int, error: BaseException) -> tuple[BaseException, Action]:
        """What a failure of call number ``index`` is, as if its plan had told of it, and the action it happened in."""
        at = bisect_right(self.starts, index) - 1
        action = self._actions[at]
        plan = action.plan
        if plan is None or not isinstance(error, Exception) or isinstance(error, Cancelled):
            return error, action
        end = self.starts[at + 1] if at + 1 < len(self.starts) else len(self.calls)
        step = index - self.starts[at] if end - self.starts[at] == plan.size else None
        return plan.stream._step_error(plan, step, error), action


def join(calls: Sequence[Call], actions: Sequence[Action]) -> Joint | None:
    """The calls of ``actions`` in one row, where all their streams are synchronous and go together.

    Streams that others may submit to do not: they look whose turn it is. Nor do runs that somebody observes: what
    others wrote is not called in the state that kernels need.
    """
    streams: dict[Stream, None] = {}
    for action in actions:
        stream = action.target.stream
        if action.kind not in ("plan", "copy") or not action.target.owned or stream.is_async:
            return None
        if action.plan is not None:
            streams[stream] = None
    leaders = [s for s in streams if all(other is s or s._inlines(other) for other in streams)]
    if not leaders:
        return None
    row: list[Call] = []
    starts: list[int] = []
    for call, action in zip(calls, actions, strict=True):
        starts.append(len(row))
        if action.plan is not None:
            row += action.plan._calls or ()
        elif isinstance(call, CallSequence):
            row += call.calls
        else:
            row.append(call)
    return Joint(leaders[0], row, starts, actions)
