"""`RunList`: what a run in one slot of a program does, in which memory (`Bindings`). Made once by `lower`; a run only
goes through it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy import ndarray

from opweave.errors import (
    Cancelled,
    DTypeError,
    ExecutionError,
    SchedulerError,
    ShapeError,
    UnknownNameError,
    UnsupportedOpError,
)
from opweave.graph.blocks import Blocks, checked_blocks
from opweave.graph.foreign import detached, dlpack_device, host_view, is_foreign, is_on_host
from opweave.graph.tensor import Tensor
from opweave.runtime.host.operands import Adopted

if TYPE_CHECKING:
    from opweave.contract.step import Arg, Call
    from opweave.graph.leaf import Leaf, Location, Placement
    from opweave.runtime.buffer import Buffer
    from opweave.runtime.plan import Plan
    from opweave.runtime.stream import Stream
    from opweave.runtime.submission import Event
    from opweave.runtime.worker import WorkerStream
    from opweave.scheduler.place.target import Target
    from opweave.scheduler.plan.fuse import FusedGroup
    from opweave.scheduler.plan.splits import Copy, Split, StorageView

__all__ = ["Action", "Bindings", "CallList", "Feed", "Fetch", "RunList", "fitted", "snapshot", "unread"]

Array = np.ndarray[Any, Any]


def unread(array: Array) -> None:
    """Takes an array for an input that nobody reads."""


@dataclass(slots=True, eq=False)  # a tuple's fields take three times as long to read
class Feed:
    """How an input gets its values: an array to copy into (``view``), else a call that takes an array (``put``).

    Where the call only queues the copy (``queued``), the array is read after it has returned.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    view: Array | None
    put: Callable[[Array], None]
    queued: bool
    target: Target | None

    def fit(self, value: Any) -> Array | Adopted:
        """``value`` as an array of the input's shape. Arrays must have its dtype; Python numbers are converted. An
        array in the memory of the input's device stays there. Of `Blocks`, for quantized inputs, their bytes.

        Raises:
            DTypeError, ShapeError: it does not fit.
            LayoutError: rows of `Blocks` do not consist of whole blocks.
        """
        if isinstance(value, Tensor):
            raise DTypeError(f"{self.tensor.describe()} is fed with arrays, not with tensors")
        if isinstance(value, Adopted):
            self._check_memory(value)
            return value
        if isinstance(value, Blocks):
            return self._bytes_of(value)
        foreign = is_foreign(value)
        adopted = self._adopted(value) if foreign else None
        if adopted is not None:
            return adopted
        try:
            array = host_view(value) if foreign else np.asarray(value)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"cannot feed {self.tensor.describe()} with {type(value).__name__}: {error}") from None
        if array.dtype != self.dtype:
            if hasattr(value, "dtype") or array.dtype.kind not in "bif":
                raise DTypeError(
                    f"{self.tensor.describe()} takes {self.dtype}, not {array.dtype}; convert with array.astype(...)"
                )
            if self.dtype.kind in "iub" and array.dtype.kind == "f":
                raise DTypeError(f"{self.tensor.describe()} takes {self.dtype}, not floating-point numbers")
            array = array.astype(self.dtype)
        if array.shape != self.shape:
            raise ShapeError(f"{self.tensor.describe()} takes shape {self.shape}, not {array.shape}")
        return array

    def _bytes_of(self, blocks: Blocks) -> Array:
        """The bytes of a quantized array; raises the errors of `fit`."""
        data, shape, dtype = checked_blocks(blocks, f"cannot feed {self.tensor.describe()}")
        if dtype is not self.tensor.dtype:
            raise DTypeError(f"{self.tensor.describe()} takes {self.tensor.dtype}, not {dtype}")
        if data.shape != self.shape:
            raise ShapeError(f"{self.tensor.describe()} takes other shapes than {dtype}{list(shape)}")
        return data

    def _check_memory(self, value: Adopted) -> None:
        """Raise `DTypeError` where an imported array is not in the memory of the input's device."""
        device = value.buffer.device
        if self.target is not None and (
            self.view is not None or self.target.device.dlpack_device != device.dlpack_device
        ):
            raise DTypeError(
                f"{self.tensor.describe()} is read on {self.target.name}, and this array is in the memory of "
                f"{device.name}; copy it to the host first"
            )

    def _adopted(self, value: Any) -> Adopted | None:
        """An array in the memory of the input's device, imported; ``None`` if it lies elsewhere."""
        value = detached(value)
        where = dlpack_device(value)
        if (
            self.view is not None
            or self.target is None
            or is_on_host(where)
            or self.target.device.dlpack_device != where
        ):
            return None
        buffer, dtype, shape = self.target.device.import_dlpack(value)
        if dtype is not self.tensor.dtype:
            raise DTypeError(f"{self.tensor.describe()} takes {self.tensor.dtype}, not {dtype}")
        if shape != self.shape:
            raise ShapeError(f"{self.tensor.describe()} takes shape {self.shape}, not {shape}")
        return Adopted(buffer)


@dataclass(slots=True, eq=False)
class Fetch:
    """How an output is fetched: ``read`` returns a new array; it is called in the order of ``stream`` if there is one,
    else after the run by the thread that asks for the output. ``keep`` returns an array in the device's memory, where
    the device exports it. ``ahead``, for streams with `reads_ahead`, queues the read behind the run on the stream of
    ``target`` and returns the array that it fills."""

    tensor: Tensor
    read: Callable[[], Array]
    stream: WorkerStream | None
    target: Target | None
    keep: Callable[[], Any] | None = None
    ahead: Callable[[], Array] | None = None

    def get(self, on_device: bool = False) -> Any:
        """What ``read`` or ``keep`` returns; raises `ExecutionError`, which says what failed where."""
        try:
            return self.call(on_device)()
        except Exception as error:
            raise self.failed(error) from error

    def call(self, on_device: bool) -> Callable[[], Any]:
        """``keep`` or ``read``; raises `UnsupportedOpError` where the device exports no memory."""
        if not on_device:
            return self.read
        if self.keep is None:
            device = self.target.name if self.target is not None else "host"
            why = "it does not export arrays of its memory by DLPack"
            raise UnsupportedOpError(f"{self.tensor.describe()} cannot stay on {device}; run without on_device=True",
                                     {device: why})  # fmt: skip
        return self.keep

    def failed(self, error: Exception) -> ExecutionError:
        """What to raise where ``read`` has raised ``error``."""
        device = self.target.name if self.target is not None else ""
        what = self.tensor.describe()
        message = f"fetching {what} failed on {device}: {type(error).__name__}: {error}"
        return ExecutionError(message, node=what, device=device)


class Action(NamedTuple):
    """What a call of the run list is, for messages and traces.

    Attributes:
        kind: running a plan, making a copy, waiting for an event of another stream (``"sync"``), recording an event,
            showing a value to an observer; of failures also feeding an input.
        target: whose stream does it, or is waited for.
        split: to which split it belongs.
        copy: the copy, of copies.
        groups: of plans, the groups.
        plan: the plan.
        tensor: of feeds, the input.
    """

    kind: Literal["plan", "copy", "sync", "event", "observe", "feed"]
    target: Target
    split: Split | None
    copy: Copy | None = None
    groups: Sequence[FusedGroup] = ()
    plan: Plan | None = None
    tensor: Tensor | None = None


def make_calls(calls: Iterator[Call]) -> None:
    """Make calls one after the other."""
    for call in calls:
        call()


@dataclass(slots=True, eq=False, repr=False)
class CallList:
    """Calls without arguments that the submitting thread makes one after another.

    Attributes:
        calls: the calls.
        run: makes the calls of an iterator over them: the ``_run`` of the stream to which they belong, or `make_calls`.
        actions: what they are.
        starts: where in ``calls`` each action begins; ``None``: every action is one call.
        numbers: for merged calls the numbers that their first ones had, and how many there were, by which ``starts``
            counts; ``None``: none is merged.
    """

    calls: list[Call]
    actions: Sequence[Action]
    run: Callable[[Iterator[Call]], None] = make_calls
    starts: list[int] | None = None
    numbers: Sequence[int] | None = None

    def locate(self, index: int, error: BaseException) -> tuple[Action, BaseException]:
        """The action to which call number ``index`` belongs, and ``error`` of that call as its plan would raise it."""
        action, step = self.position(index)
        plan = action.plan
        if self.starts is None or plan is None or not isinstance(error, Exception) or isinstance(error, Cancelled):
            return action, error
        return action, plan.stream.step_error(plan, step, error)

    def position(self, index: int) -> tuple[Action, int | None]:
        """The action to which call number ``index`` belongs, and which of its groups that is, if the call is of one."""
        if self.starts is None:
            return self.actions[index], None
        count = len(self.calls)
        if self.numbers is not None:
            index, count = self.numbers[index] + getattr(self.calls[index], "failed", 0), self.numbers[-1]
        at = bisect_right(self.starts, index) - 1
        action, start = self.actions[at], self.starts[at]
        end = self.starts[at + 1] if at + 1 < len(self.starts) else count
        return action, index - start if action.plan is not None and end - start == action.plan.size else None


class Bindings(NamedTuple):
    """Where everything lies in one slot.

    Attributes:
        buffers, offsets: of every storage id; no buffer for values that live only inside of a fused group.
        handles: what `BufferType._init` returned for leaves in special memory, by storage id.
        workspaces: (index of the split, index of the group) -> its scratch memory.
        args: by storage id the first view of it that was bound, with its operand; see `operands`.
    """

    buffers: list[Buffer | None]
    offsets: list[int]
    handles: dict[int, Any]
    workspaces: Mapping[tuple[int, int], Arg]
    args: list[tuple[StorageView, Arg] | None]

    def in_slot(self, places: Mapping[int, tuple[Buffer, int]]) -> Bindings:
        """The same for a slot in which some storages lie elsewhere."""
        buffers, offsets = (list(self.buffers), list(self.offsets)) if places else (self.buffers, self.offsets)
        for storage, (buffer, offset) in places.items():
            buffers[storage], offsets[storage] = buffer, offset
        return self._replace(buffers=buffers, offsets=offsets, args=[None] * len(offsets))

    def enter(self, storage: int, found: Placement | Location) -> None:
        """Note where a storage lies; raises `LifetimeError` if that memory is gone."""
        found.buffer.check(found.offset, 0)
        self.buffers[storage], self.offsets[storage] = found.buffer, found.offset
        if found.handle is not None:
            self.handles[storage] = found.handle


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class RunList:
    """What a run in one slot does, in this order.

    Attributes:
        states: the states that it reads or writes, which must not be half written.
        before: waits, before inputs are fed.
        feeds: how each input gets its values.
        calls: what is called then. Where all streams are synchronous and one may make the calls of the others, the
            plans are flattened to their calls, which avoids overhead for every split.
        actions: the same with one call for each action, for traces and tools.
        fetches: how each output is fetched; without a stream, when everything is complete.
        after: events to be recorded behind fetches that are queued.
        streams: the asynchronous ones that a run uses. Empty: everything is done when its calls have been made.
        plans: the compiled plans among the calls.
        events: the latest events of its actions, for other queues to wait for.
        bindings: the memory that it uses; ``None`` once it was closed.
        when_idle: the `Executor.when_idle` of the scheduler that runs it, once it is known.
        copied: bytes that its copies move, but for copies of chosen rows, which count when they are made.
        ended: why it can no longer be run, ``""``: it can.
    """

    states: list[Leaf]
    copied: int
    bindings: Bindings | None
    before: list[Call] = field(default_factory=list)
    feeds: dict[str, Feed] = field(default_factory=dict)
    calls: CallList = field(default_factory=lambda: CallList([], []))
    actions: CallList = field(default_factory=lambda: CallList([], []))
    fetches: list[Fetch] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    events: list[Event | None] = field(default_factory=list)
    when_idle: Callable[[Callable[[], Any]], Any] | None = None
    ended: str = ""

    def invalidate(self, why: str) -> None:
        """Called by a buffer that its calls use, when its memory is given back."""
        self.ended = self.ended or why

    keeps_copies: ClassVar[bool] = False
    """Its plans may do."""

    def refresh(self, token: object) -> None:
        """Called when read-only memory was written. Does nothing: the plans are told themselves."""

    def give_up(self) -> None:
        """Called when the memory of leaves is given up, after `invalidate`, while nothing is under way."""
        self.close()

    def forget_events(self) -> None:
        """Forget the events of earlier runs, which may have failed. Called when nothing is under way."""
        self.events[:] = [None] * len(self.events)

    def close(self) -> None:
        """Drop the plans and the calls, and with them all views of memory."""
        self.ended = self.ended or "it was closed"
        for plan in self.plans:
            plan.close()
        self.calls = CallList([], [])  # it may hold calls of the plans; the actions stay for `Program.explain`
        self.actions.calls.clear()
        self.bindings = None
        self.before.clear()
        self.after.clear()
        self.fetches.clear()
        for name, feed in self.feeds.items():
            self.feeds[name] = replace(feed, view=None, put=unread)


# --- values that are fed ---------------------------------------------------------------------------------------------


def fitted(
    run_list: RunList, written: Mapping[str, Array], feeds: Mapping[Any, Any] | None, named: Mapping[str, Any]
) -> list[tuple[Feed, Any]]:
    """An array for every input, checked; raises `SchedulerError`, `UnknownNameError` and what `Feed.fit` does."""
    ready: list[tuple[Feed, Any]] = []
    expected = run_list.feeds
    if type(feeds) is dict and not named and len(feeds) == len(expected):
        for feed in expected.values():  # most callers: each input itself, and its array
            value = feeds.get(feed.tensor)
            if type(value) is not ndarray or value.shape != feed.shape or value.dtype is not feed.dtype:
                if value is None:
                    break
                value = feed.fit(value)
            ready.append((feed, value))
        else:
            return ready
        ready.clear()
    given = {**_by_name(feeds), **named}
    for name, feed in run_list.feeds.items():
        value = given.pop(name, None)
        if value is None:
            value = written.get(name)
            if value is None:
                raise SchedulerError(f"no value for {feed.tensor.describe()}: run({{{name!r}: array}})")
        if type(value) is not np.ndarray or value.shape != feed.shape or value.dtype != feed.dtype:
            value = feed.fit(value)
        ready.append((feed, value))
    if given:
        name = str(next(iter(given)))
        raise UnknownNameError("input of this program", name, run_list.feeds)
    return ready


def _by_name(feeds: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """Fed values by the names of inputs."""
    if feeds is not None and not isinstance(feeds, Mapping):
        what = type(feeds).__name__
        raise SchedulerError(f"values are fed as {{input or its name: array}}, or by name, not as {what}")
    return {key.key or key.name if isinstance(key, Tensor) else key: value for key, value in (feeds or {}).items()}


def snapshot(values: Sequence[tuple[Feed, Any]], *, all_: bool = False) -> list[tuple[Feed, Any]]:
    """``values``, with copies of the arrays that are read only after their upload was queued; with ``all_`` of every
    array. Arrays of borrowed inputs and arrays in a device's memory are never copied."""

    def copied(feed: Feed, value: Any) -> bool:
        late = all_ or feed.queued or (feed.view is None and feed.target is not None)
        borrowed = feed.tensor.leaf is not None and feed.tensor.leaf.borrowed
        return late and not borrowed and not isinstance(value, Adopted)

    return [(feed, np.array(value, copy=True) if copied(feed, value) else value) for feed, value in values]
