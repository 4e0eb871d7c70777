"""`read_in_place`: inputs that the calls of a program read where they are fed, and not in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from ctypes import addressof, c_char
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.runtime.stream import Stream
from opweave.scheduler.plan.splits import StorageView

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Call
    from opweave.scheduler.compile.run_list import Action, RunList
    from opweave.scheduler.plan.splits import Partition

__all__ = ["read_in_place"]

Array = np.ndarray[Any, Any]
Reader = Callable[[int], bool]
"""Of an address: whether a call reads its operand there in its next run. See `Stream._bind_feed`."""


class InPlace:
    """Feeds an input: tells those who read it where the array lies, or copies it to where they read it otherwise."""

    __slots__ = ("_alignment", "_own", "_readers", "_view")

    def __init__(self, operand: Arg, readers: Sequence[Reader]) -> None:
        self._view: Final = operand.view
        self._own: Final = operand.address
        self._alignment: Final = self._view.dtype.alignment
        self._readers: Final = readers

    def __call__(self, array: Array) -> None:
        address = _address(array) if array.flags.c_contiguous else self._own
        if address % self._alignment:
            address = self._own
        there = [read(address) for read in self._readers]  # all of them are told
        if address == self._own or not all(there):
            self._view[...] = array


def _address(array: Array) -> int:
    """The address of an array's first byte."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]  # a fifth of the time of the next
    except (TypeError, ValueError):  # read-only, or of a type that NumPy does not know
        return int(array.__array_interface__["data"][0])


def read_in_place(result: RunList, partition: Partition, arg: Callable[[StorageView], Arg]) -> None:
    """Let the calls of a list read inputs where they are fed, if these calls alone read them and their streams can do
    that (`Stream._bind_feed`). Everything is complete when the calls have been made.

    Not in programs that write leaves, whose memory a fed array may show.
    """
    streams = {type(target.stream) for target in partition.assignment.targets}
    if result.states or partition.placed or all(kind._bind_feed is Stream._bind_feed for kind in streams):
        return
    inputs = {partition.inputs[feed.tensor]: name for name, feed in result.feeds.items() if feed.view is not None}
    calls = _readers(partition, result.actions.actions, inputs)
    for storage, name in inputs.items():
        feed = result.feeds[name]
        operand = arg(StorageView.of(feed.tensor, storage))
        bound = [stream._bind_feed(call, operand) for stream, call in calls.get(storage, ())]
        readers = [read for read in bound if read is not None]
        if readers and len(readers) == len(bound):
            result.feeds[name] = replace(feed, view=None, put=InPlace(operand, readers))


def _readers(
    partition: Partition, actions: Sequence[Action], inputs: Collection[int]
) -> dict[int, list[tuple[Stream, Call]]]:
    """For each of some storages the calls that read it, and their streams; without those that anything else reads."""
    found: dict[int, list[tuple[Stream, Call]]] = {storage: [] for storage in inputs}
    other = [output.storage for output in partition.outputs if output is not None]
    for action in actions:
        if action.copy is not None:
            other += action.copy.reads
        elif action.plan is None or action.split is None:
            other += inputs
        else:
            plan, items = action.plan, action.split.items
            groups = action.items or [(i,) for i in range(len(items))]
            calls = plan.calls if plan.n_calls == len(groups) else [None] * len(groups)  # several groups are one call
            for group, call in zip(groups, calls, strict=True):
                for storage in {view.storage for i in group for view in items[i].srcs} & found.keys():
                    if call is None:
                        other.append(storage)
                    else:
                        found[storage].append((plan.stream, call))
    for storage in other:
        found.pop(storage, None)
    return found
