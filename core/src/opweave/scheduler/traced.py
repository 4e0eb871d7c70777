"""The calls of a run, each of which emits a trace event when it has been made. Used only while somebody listens."""

from __future__ import annotations

from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from opweave.contract.worker import WorkerStream
from opweave.scheduler.run_list import CallList
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.contract.step import Call
    from opweave.scheduler.run_list import Action, RunList

__all__ = ["traced_calls"]


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
    groups = action.items or [(i,) for i in range(len(split.items))]

    def around(index: int, call: Call) -> Call:
        if inner.is_async or len(groups) != plan.size:
            return call
        items = [split.items[i] for i in groups[index]]
        last = items[-1].node
        name = last.name if last is not None else "pack"
        data = {"device": action.target.name, "op": "+".join(item.op for item in items)}
        return partial(_emit, call, "step", name, data)

    return around
