"""Errors of failed runs: which node, device and states a failing call concerns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from opweave.errors import Cancelled, ExecutionError, LifetimeError, chain_of
from opweave.runtime.plan import StepError

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.compile.run_list import Action
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.splits import Split

__all__ = ["damage_states", "settle_failure", "written_by"]


def settle_failure(
    error: BaseException,
    action: Action | None,
    actions: Iterable[Action],
    targets: Sequence[Target],
    splits: Sequence[Split],
    *,
    anywhere: bool = False,
) -> BaseException:
    """Make everything usable again after a run failed: wait for all streams, mark half-written states.

    Args:
        error: what was raised.
        action: which call raised it; ``None``: it was found while waiting for the end.
        actions: all actions of the run, to find the one whose work failed.
        splits: those that may have been under way.
        anywhere: the failure may concern any of them, and not only those on streams whose queued work failed.

    Returns:
        What to raise: an error that names the node, its device and those states. An error that is no ``Exception`` (an
        interrupt), `Cancelled` and `LifetimeError` are returned as they are.
    """
    unfinished = _finish(targets)
    step = _failed_step(error)
    if step is not None:
        action = next((a for a in actions if a.plan is step.plan and step.plan is not None), action)
    cause = step.error if step is not None else error
    while isinstance(cause, ExecutionError) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__  # reported by a stream of its queued work: that is the cause
    on_purpose = (Cancelled, LifetimeError)
    ended = next((r for r in chain_of(error) if not isinstance(r, Exception) or isinstance(r, on_purpose)), None)
    node = action.tensor if action is not None else None
    writers: list[Tensor] = []
    if action is not None and action.copy is not None:
        node = action.copy.tensor
        writers += [node] if action.copy.cause == "write-back" else []
    elif action is not None and action.kind == "plan" and action.split is not None:
        first, last = 0, len(action.split.steps)
        if step is not None and step.step is not None:
            indices = action.groups[step.step].indices
            first, last = indices[0], indices[-1] + 1
            node = action.split.steps[first].node
        writers += [item.node for item in action.split.steps[first:last] if item.node is not None]
    writers += written_by([split for split in splits if anywhere or split.target in unfinished])
    states = {w.key: w.memory for w in writers if w.state is not None}
    failed = action.target if action is not None else unfinished[0] if unfinished else None
    kind = f"{action.kind} of " if action is not None else ""
    if action is None or action.kind == "sync":  # whose split is the one that waits, not the one that failed
        kind, failed = "", unfinished[0] if unfinished else failed
        splits = [split for split in splits if split.target is failed]
    else:
        splits = [action.split] if action.split is not None else []
    what = node.describe() if node is not None else _describe(splits)
    device = failed.name if failed is not None else ""
    message = f"{kind}{what} failed{device and f' on {device}'}: {type(cause).__name__}: {cause}"
    damage_states(writers, message)
    if ended is not None:
        return ended
    if action is not None and action.kind == "observe":
        return error  # the observer's own
    if states:
        message += f"; half written: {', '.join(states)}"
    result = ExecutionError(message, node=what, device=device, states=states)
    result.__cause__ = cause
    return result


def damage_states(writers: Iterable[Tensor], why: str, pending: Callable[[], object] | None = None) -> None:
    """Let the states that nodes write refuse to be read until they are written anew.

    Args:
        why: what happened.
        pending: waits for the work that may still write them; called before they are written.
    """
    for leaf in {w.memory.leaf: None for w in writers if w.state is not None}:
        assert leaf is not None
        leaf.damaged = f"state {leaf.name!r} may be half written ({why}); write it anew to use it"
        leaf.pending = pending


def written_by(splits: Iterable[Split]) -> list[Tensor]:
    """The nodes of splits, those that write states among them."""
    return [node for split in splits for node in split.nodes]


def _describe(splits: Sequence[Split]) -> str:
    """Splits of which one has failed: its step if there is one only."""
    if len(splits) == 1 and len(splits[0].steps) == 1 and (node := splits[0].steps[0].node) is not None:
        return node.describe()
    return " or ".join(dict.fromkeys(f"split {split.index}" for split in splits)) or "the run"


def _failed_step(error: BaseException) -> StepError | None:
    """The failure of the step that caused ``error``, perhaps on another stream than the one that raised it."""
    return next((reason for reason in reversed([*chain_of(error)]) if isinstance(reason, StepError)), None)


def _finish(targets: Sequence[Target]) -> list[Target]:
    """Wait for all streams; returns those whose queued work failed, first those that did not fail by waiting for
    others."""
    failed: list[tuple[bool, Target]] = []
    for target in targets:
        for stream in target.streams:
            stream.settle()
            if stream.is_async and stream.failure is not None:
                reasons = [r.device for r in chain_of(stream.failure) if isinstance(r, ExecutionError)]
                failed.append((any(device not in ("", target.name) for device in reasons), target))
            stream.recover()
    return [target for _, target in sorted(failed, key=lambda row: row[0])]
