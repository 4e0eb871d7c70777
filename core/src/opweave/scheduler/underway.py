"""Which node an executor is computing, for messages when somebody stops waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from opweave.contract.worker import WorkerStream

if TYPE_CHECKING:
    from opweave.contract.submission import Submission
    from opweave.scheduler.run_list import Action
    from opweave.scheduler.runs import ProgramState
    from opweave.scheduler.target import Target

__all__ = ["step_under_way"]


def step_under_way(targets: Sequence[Target], ownership: Submission, programs: Iterable[ProgramState]) -> str:
    """The node that is being computed and its device, ``""`` where that is not known.

    Programs do not record the current node while they run; it follows from the position in the calls that are being
    made.
    """
    streams = [s.inner if isinstance(s, WorkerStream) else s for target in targets for s in target.streams]
    lists = [run_list for program in programs for run_list in program.lists]
    for submission in [*(stream._submission for stream in streams), ownership]:
        latest = submission.latest()
        if latest is not None:
            calls, index = latest
            for run_list in lists:
                if run_list.calls.calls is calls:
                    return _text(*run_list.calls.position(index))
                for action in run_list.actions.actions:
                    if action.plan is not None and action.plan._calls is calls:
                        return _text(action, index)
    return next(
        (f"work on {t.name}" for t in targets for s in t.streams if s.is_async and s._finished < s._sequence), ""
    )


def _text(action: Action, step: int | None) -> str:
    device = action.target.name
    if action.copy is not None:
        return f"{action.kind} of {action.copy.tensor.describe()} on {device}"
    if action.split is None:
        return f"work on {device}"
    groups = action.items or [(i,) for i in range(len(action.split.items))]
    node = action.split.items[groups[step][0]].node if step is not None and step < len(groups) else None
    return f"{node.describe()} on {device}" if node is not None else f"split {action.split.index} on {device}"
