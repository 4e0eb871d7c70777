"""`IndexChecks`: indices out of bounds are recorded by kernels on the device, and raised where the host waits."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakValueDictionary, ref

import numpy as np

from opweave.contract import Arg, Plan, StepError
from opweave.errors import BoundsError
from opweave.graph.dtypes import i64
from opweave_opencl.events import complete

if TYPE_CHECKING:
    import pyopencl as cl

    from opweave_opencl.device import OpenCLDevice

__all__ = ["VARIABLE", "IndexChecks", "Site"]

VARIABLE: Final = "OPWEAVE_OPENCL_CHECK_INDICES"
"""Environment variable: ``0`` has streams not check indices unless they are opened with ``check_indices=True``."""

_WORDS: Final = 2
"""64-bit words of the record on the device: the number of the site, and the index."""


class Site:
    """A kernel that reads indices, bound in a plan.

    Attributes:
        op: the operation.
        length: of the axis that is indexed.
        group: the number of its group in the plan.
        plan: a function that returns the plan; ``None`` before it is compiled and after it was dropped.
    """

    __slots__ = ("__weakref__", "group", "length", "op", "plan")

    def __init__(self, op: str, length: int, group: int) -> None:
        self.op, self.length, self.group = op, length, group
        self.plan: Callable[[], Plan | None] = lambda: None


class Bound(NamedTuple):
    """What a kernel that reads indices gets: macros, operands after its own, and the last word of its parameters."""

    macros: dict[str, str]
    operands: tuple[Arg, ...]
    words: tuple[int, ...]


class IndexChecks:
    """The check of the indices that a stream's kernels read.

    Kernels write the first index out of bounds to a record of 16 bytes in the device's memory (``wrong_index.cl``). A
    plan with such kernels ends with a copy of the record to the host, so that it is there when somebody has waited for
    the plan: no check waits by itself, and plans without such kernels copy nothing.

    Args:
        device: the stream's.
        queue: of the stream's kernels.
        enabled: whether kernels check indices; ``None``: as `VARIABLE` says.
    """

    def __init__(self, device: OpenCLDevice, queue: cl.CommandQueue, enabled: bool | None = None) -> None:
        self._device, self._queue = device, queue
        self.enabled: Final = os.environ.get(VARIABLE, "").strip() != "0" if enabled is None else enabled
        self._record: Arg | None = None
        self._seen: np.ndarray[Any, np.dtype[np.int64]] | None = None  # the record as it was copied last
        self._memory: list[Any] = []
        self._sites: Final[WeakValueDictionary[int, Site]] = WeakValueDictionary()
        self._count = 0
        self._bound: list[Site] = []  # since the last plan was begun
        self._group = -1
        self._groups: Iterator[int] = iter(())
        # Copies under way, with the sites whose record they may bring. Dropping the event of a copy waits for the copy.
        self._copies: Final[deque[tuple[cl.Event, Sequence[Site]]]] = deque()
        self._lock: Final = RLock()

    # --- binding ----------------------------------------------------------------------------------------------------

    def begin(self, groups: Iterable[int]) -> None:
        """Called before a plan is bound, with the numbers of the groups that will be bound, in order."""
        self._bound = []
        self._groups = iter(groups)

    def enter_group(self) -> None:
        """Called before the kernels of the next of these groups are bound."""
        self._group = next(self._groups, -1)

    def bind(self, op: str, length: int) -> Bound:
        """What a kernel gets that reads indices, which are to be below ``length``."""
        if not self.enabled:
            return Bound({"CHECKED": "0"}, (), (0,))
        if self._record is None:
            self._make()
        assert self._record is not None
        site = Site(op, length, self._group)
        self._count += 1
        self._sites[self._count] = site
        self._bound.append(site)
        return Bound({"CHECKED": "1"}, (self._record,), (self._count,))

    def _make(self) -> None:
        record, seen = self._device.alloc(8 * _WORDS), self._device.host_buffer_type.alloc(8 * _WORDS)
        record.upload(0, bytes(8 * _WORDS))
        self._memory += [record, seen]
        self._record = Arg(record, 0, i64, (_WORDS,), (8,))
        self._seen = seen.view(0, i64, (_WORDS,), (8,))
        self._seen[:] = 0

    def bound(self) -> Sequence[Site]:
        """The sites of the plan, which keeps them as long as it can be run."""
        return self._bound

    def attach(self, plan: Plan) -> None:
        """Let the sites of the plan that was begun refer to it."""
        for site in self._bound:
            site.plan = ref(plan)
        self._bound = []

    # --- running ----------------------------------------------------------------------------------------------------

    def read_back(self, sites: Sequence[Site]) -> None:
        """Queue a copy of the record to the host behind the plan of these sites, which was submitted."""
        import pyopencl as cl

        assert self._record is not None
        assert self._record.buffer is not None
        assert self._seen is not None
        copies = self._copies
        copy = cl.enqueue_copy(self._queue, self._seen, self._record.buffer.handle, is_blocking=False)
        copies.append((copy, sites))
        while len(copies) > 1 and complete(copies[0][0]) and not self._seen[0]:
            copies.popleft()

    def check(self, note: Callable[[Exception], None]) -> None:
        """Raise what was recorded by work that is done, once.

        Args:
            note: is given the error before another thread may look and see none.

        Raises:
            StepError: names the step; ``error`` is a `BoundsError`.
        """
        if self._seen is None or not self._seen[0]:
            return
        import pyopencl as cl

        with self._lock:
            number, index = (int(word) for word in self._seen)
            if not number:
                return
            assert self._record is not None
            assert self._record.buffer is not None
            # Copies under way would bring back the record that is cleared here.
            self._queue.finish()
            cl.enqueue_fill_buffer(self._queue, self._record.buffer.handle, np.zeros(1, np.int64), 0, 8 * _WORDS)
            self._queue.finish()
            site = self._sites[number]
            error = BoundsError(f"{site.op}: index {index} is outside of 0 .. {site.length - 1}")
            failure = StepError(site.group, error, site.plan())
            failure.__cause__ = error
            note(failure)
            self._copies.clear()
            self._seen[:] = 0
        raise failure

    def close(self) -> None:
        """Free the memory; everything submitted is complete."""
        self._copies.clear()
        self._record = self._seen = None
        self._memory.clear()  # dropped, not freed, which would wait for other streams of the device
