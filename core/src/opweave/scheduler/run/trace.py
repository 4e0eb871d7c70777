"""The calls of a run, each of which emits a trace event when it has been made. Used only while somebody listens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from opweave.runtime.worker import WorkerStream
from opweave.scheduler.compile.run_list import CallList
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.contract.step import Call
    from opweave.runtime.submission import Submission
    from opweave.scheduler.compile.run_list import Action, RunList
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.run.runs import ProgramState

__all__ = ["step_under_way", "traced_calls"]


def traced_calls(run_list: RunList) -> CallList:
    """The calls of a run, one for each action, which emit what it was and how long it took."""
    calls, actions = run_list.actions.calls, run_list.actions.actions
    return CallList([_traced(call, action) for call, action in zip(calls, actions, strict=True)], actions)


def _traced(call: Call, action: Action) -> Call:
    if action.kind == "event":
        return call
    stream = action.target.stream
    data: dict[str, Any] = {"device": action.target.name}
    name = f"split {action.split.index}" if action.split is not None else ""
    if action.copy is not None:
        name = action.copy.tensor.name
        data |= {"bytes": action.copy.nbytes, "cause": action.copy.cause}
        if action.copy.cause == "weight-fetch" and action.target.copier is not None:
            stream = action.target.copier
            data["queue"] = "copies"
    if action.plan is not None:
        data["steps"] = action.plan.size
        if TRACE.detailed and call == action.plan.run:
            call = partial(action.plan.run, _timed(action))
    if isinstance(stream, WorkerStream) and action.kind in ("plan", "copy"):
        return partial(_emit_from, stream, call, action.kind, name, data)
    return partial(_emit, call, action.kind, name, data)


def _emit(call: Call, kind: str, name: str, data: dict[str, Any]) -> None:
    start = perf_counter_ns()
    call()
    TRACE.emit(kind, name, start, perf_counter_ns(), **data)


def _emit_from(stream: WorkerStream, call: Call, kind: str, name: str, data: dict[str, Any]) -> None:
    """The call only queues work: the worker records when it begins and ends."""
    begun: list[int] = []
    stream.call(lambda: begun.append(perf_counter_ns()))
    call()
    stream.call(lambda: TRACE.emit(kind, name, begun[0], perf_counter_ns(), **data))


def _timed(action: Action) -> Any:
    """For `Plan.run`: emits each step, where it is done when its call returns."""
    stream = action.target.stream
    inner = stream.inner if isinstance(stream, WorkerStream) else stream
    split, plan = action.split, action.plan
    assert split is not None
    assert plan is not None
    groups = action.groups

    def around(index: int, call: Call) -> Call:
        if inner.is_async or len(groups) != plan.size:
            return call
        planned = [split.steps[i] for i in groups[index].indices]
        last = planned[-1].node
        name = last.name if last is not None else "pack"
        data = {"device": action.target.name, "op": "+".join(item.op for item in planned)}
        return partial(_emit, call, "step", name, data)

    return around


def step_under_way(targets: Sequence[Target], ownership: Submission, programs: Iterable[ProgramState]) -> str:
    """The node that is being computed and its device, ``""`` where that is not known.

    Programs do not record the current node while they run; it follows from the position in the calls that are being
    made.
    """
    streams = [s.inner if isinstance(s, WorkerStream) else s for target in targets for s in target.streams]
    lists = [run_list for program in programs for run_list in program.lists]
    for submission in [*(stream.submission for stream in streams), ownership]:
        latest = submission.latest()
        if latest is not None:
            calls, index = latest
            for run_list in lists:
                if run_list.calls.calls is calls:
                    return _text(*run_list.calls.position(index))
                for action in run_list.actions.actions:
                    if action.plan is not None and action.plan.calls is calls:
                        return _text(action, index)
    return next(
        (f"work on {t.name}" for t in targets for s in t.streams if s.is_async and s.progress.unfinished),
        "",
    )


def _text(action: Action, step: int | None) -> str:
    device = action.target.name
    if action.copy is not None:
        return f"{action.kind} of {action.copy.tensor.describe()} on {device}"
    if action.split is None:
        return f"work on {device}"
    groups = action.groups
    node = action.split.steps[groups[step].indices[0]].node if step is not None and step < len(groups) else None
    return f"{node.describe()} on {device}" if node is not None else f"split {action.split.index} on {device}"
