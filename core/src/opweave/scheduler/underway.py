"""What a scheduler is doing at this moment, for who gives up waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from opweave.contract.worker import WorkerStream

if TYPE_CHECKING:
    from opweave.scheduler.actions import Action
    from opweave.scheduler.program import Program
    from opweave.scheduler.running import Progress
    from opweave.scheduler.target import Target

__all__ = ["step_under_way"]


def step_under_way(targets: Sequence[Target], progress: Progress, programs: Iterable[Program]) -> str:
    """The node that is being computed and its device, ``""`` where that is not known.

    Nothing is noted while programs run: what is looked at are the iterators over the calls that are still to be made.
    """
    streams = [s.inner if isinstance(s, WorkerStream) else s for target in targets for s in target.streams]
    programs = list(programs)
    for rest in [*(stream._submission.remaining for stream in streams), progress.rest]:
        for calls, index in _position(rest):
            for program in programs:
                for listed in program._lists:
                    if listed.joint is not None and listed.joint.calls is calls:
                        _, action = listed.joint.blame(index, RuntimeError())
                        start = max(i for i in listed.joint.starts if i <= index)
                        return _text(action, index - start)
                    for action in listed.actions:
                        if action.plan is not None and action.plan._calls is calls:
                            return _text(action, index)
    return next(
        (f"work on {t.name}" for t in targets for s in t.streams if s.is_async and s._finished < s._sequence), ""
    )


def _position(rest: Any) -> Iterator[tuple[Any, int]]:
    """The list behind an iterator, and the index of what it gave last."""
    if rest is not None:
        _, (calls, *_), *index = rest.__reduce__()
        if calls and index and index[0]:
            yield calls, index[0] - 1


def _text(action: Action, step: int) -> str:
    device = action.target.name
    if action.copy is not None:
        return f"{action.kind} of {action.copy.tensor.describe()} on {device}"
    if action.split is None:
        return f"work on {device}"
    groups = action.items or [(i,) for i in range(len(action.split.items))]
    node = action.split.items[groups[step][0]].node if step < len(groups) else None
    return f"{node.describe()} on {device}" if node is not None else f"split {action.split.index} on {device}"
