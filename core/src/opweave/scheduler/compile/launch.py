"""`bind_launch`: runs of one plan as one call, for streams that write, run and read in one go (`Stream._bind_launch`).

A device on another machine pays for each message: what a small run is fed, its plan and its results then take one
message there and one back, and nothing is queued. A decoder's step of 6 layers over loopback takes 0.88 of the time, a
chain of 10 small additions 0.64 (AMD Zen 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.graph.layout import array_shape
from opweave.runtime.stream import Stream
from opweave.scheduler.compile.run_list import CallList, unread
from opweave.scheduler.plan.splits import StorageView

if TYPE_CHECKING:
    from opweave.contract.step import Arg
    from opweave.scheduler.compile.run_list import Action, RunList
    from opweave.scheduler.plan.splits import Partition

__all__ = ["bind_launch"]

Array = np.ndarray[Any, Any]

MOST_BYTES: Final = 1 << 18
"""At most this many bytes are fed, and fetched, through an intermediate array; more are sent from where they lie."""


def bind_launch(
    result: RunList, partition: Partition, actions: Sequence[Action], arg: Callable[[StorageView], Arg]
) -> CallList | None:
    """The calls of a run list as one call, where the run is one plan of a stream that overrides ``_bind_launch``, fed
    and read by the same stream in dense pieces of few bytes. Feeds and fetches of the list are then arrays that the
    call sends and fills. ``None``: it is not such a run.
    """
    action = actions[0] if len(actions) == 1 else None
    if action is None or action.plan is None or not action.target.owned or result.before:
        return None
    target, stream = action.target, action.target.stream
    if type(stream)._bind_launch is Stream._bind_launch:
        return None
    fed = [
        (name, arg(StorageView(partition.inputs[t], 0, t.dtype, t.shape, t.strides)))
        for name, feed in result.feeds.items()
        if (t := feed.tensor) in partition.inputs
    ]
    outputs = [(i, arg(operand)) for i, operand in enumerate(partition.outputs) if operand is not None]
    for _, a in (*fed, *outputs):
        if not a.is_dense or a.buffer is None or not stream.owns(a.buffer):
            return None
    sizes = [sum([a.nbytes for _, a in part]) for part in (fed, outputs)]
    if max(sizes) > MOST_BYTES or any(feed.target not in (None, target) for feed in result.feeds.values()):
        return None
    places = [[(a.buffer, a.offset, a.nbytes) for _, a in part if a.buffer is not None] for part in (fed, outputs)]
    made = stream._bind_launch(places[0], action.plan, places[1])
    if made is None:
        return None
    call, sent, received = made
    for (name, a), memory in zip(fed, sent, strict=True):
        result.feeds[name] = replace(result.feeds[name], view=_array(a, memory), put=unread, queued=False)
    for (i, a), memory in zip(outputs, received, strict=True):
        result.fetches[i] = replace(result.fetches[i], read=_array(a, memory).copy, stream=None, ahead=None)
    return CallList([call], actions)


def _array(arg: Arg, memory: memoryview) -> Array:
    return np.frombuffer(memory, arg.dtype.numpy).reshape(array_shape(arg.shape, arg.dtype))
