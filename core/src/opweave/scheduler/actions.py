"""What a program's run list is made of, and what is said and done when one of its calls fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from opweave.contract.execution import StepError
from opweave.errors import Cancelled, ExecutionError, LifetimeError, OpweaveError

if TYPE_CHECKING:
    from opweave.scheduler.lanes import Lane
    from opweave.scheduler.split import Copy, Split
    from opweave.tensor import Tensor

__all__ = ["Action", "Feed", "settle_failure"]

Array = np.ndarray[Any, Any]


class Feed(NamedTuple):
    """How an input gets its values: an array to copy into, or a call that takes a dense array; neither if unread."""

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    view: Array | None
    upload: Callable[[Array], None] | None


class Action(NamedTuple):
    """What a call of the run list is, for messages and traces.

    Attributes:
        kind: running a plan, making a copy, waiting for a lane's stream.
        lane: whose stream does it.
        split: to which split it belongs.
        copy: the copy, of copies.
        items: of plans, the items of each fused group; ``None``: one each.
        pending: of waits, the splits whose work may still be under way.
    """

    kind: Literal["plan", "copy", "sync"]
    lane: Lane
    split: Split
    copy: Copy | None = None
    items: tuple[tuple[int, ...], ...] | None = None
    pending: tuple[Split, ...] = ()


def settle_failure(
    action: Action, error: BaseException, lanes: Sequence[Lane], splits: Sequence[Split]
) -> BaseException:
    """Leave everything usable after ``action`` failed: finish the other streams, mark half-written states.

    Returns:
        What to raise: an error that names the node, its device and those states. What is no ``Exception`` (an
        interrupt), what ended the run on purpose (`Cancelled`) and what was freed or closed before (`LifetimeError`)
        stays what it is.
    """
    unfinished = _finish(lanes)
    cause = error.error if isinstance(error, StepError) else error
    node = action.copy.tensor if action.copy is not None else None
    writers: list[Tensor] = []
    if action.kind == "plan":
        first, last = 0, len(action.split.items)
        if isinstance(error, StepError) and error.step is not None:
            group = (error.step,) if action.items is None else action.items[error.step]
            first, last = group[0], group[-1] + 1
            node = action.split.items[first].node
        writers = _written(action.split, first, last)
    elif action.kind == "copy" and action.copy is not None and action.copy.cause == "write-back":
        writers = [action.copy.tensor]
    for split in action.pending:
        writers += _written(split, 0, len(split.items))
    for split in splits[: action.split.index + 1]:
        if split.lane in unfinished:
            writers += _written(split, 0, len(split.items))
    states = {w.memory.name: w.memory for w in writers if w.state is not None}
    what = node.describe() if node is not None else f"split {action.split.index}"
    message = f"{action.kind} of {what} failed on {action.lane.name}: {type(cause).__name__}: {cause}"
    for state in states.values():
        assert state.leaf is not None
        state.leaf.damaged = f"state {state.name!r} may be half written ({message}); write it anew to use it"
    if not isinstance(cause, Exception) or isinstance(cause, (Cancelled, LifetimeError)):
        return cause
    if states:
        message += f"; half written: {', '.join(states)}"
    result = ExecutionError(message, node=what, device=action.lane.name, states=states)
    result.__cause__ = cause
    return result


def _finish(lanes: Sequence[Lane]) -> list[Lane]:
    """Wait for all streams; gives those whose queued work failed too, beside the failure that is known."""
    failed = []
    for lane in lanes:
        lane.stream.recover()
        try:
            lane.stream.synchronize()
        except OpweaveError:
            failed.append(lane)
        lane.stream.recover()
    return failed


def _written(split: Split, first: int, last: int) -> list[Tensor]:
    return [i.node for i in split.items[first:last] if i.node is not None]
