"""Giving memory back that nobody refers to any more, once the work that may touch it is over.

A finaliser runs wherever Python happens to be, also in the middle of a build, on a thread that others wait for, or
while work waits for what the same thread does next. So it never waits: memory that queued work may touch is put aside
with how far each stream has to come. Whoever next allocates, compiles or waits for a stream frees what is reached.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from contextlib import suppress
from threading import local
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

from opweave.contract.space import Handle, MemorySpace, busy, settle
from opweave.lifecycle import keep_for_ever

if TYPE_CHECKING:
    from opweave.contract.execution import Stream
    from opweave.contract.memory import BufferType

__all__ = ["Discarded", "discard", "reclaim", "reclaim_all"]


class Discarded(NamedTuple):
    """Memory of a buffer that is gone.

    Attributes:
        type, handle: the memory.
        owner: what keeps imported memory alive.
        waits: streams whose work may touch it, each with the number of what was submitted last.
    """

    type: BufferType
    handle: Handle
    owner: Any
    waits: tuple[tuple[ref[Stream], int], ...]

    @property
    def reached(self) -> bool:
        for stream, submitted in self.waits:
            found = stream()
            if found is not None and not found.closed and found._over < submitted:
                return False
        return True


_DISCARDED: Final[deque[Discarded]] = deque()  # appending and taking are atomic: no lock is held


class _Pass(local):
    """Whether this thread is reclaiming: what an author's ``_free`` does must not begin it anew."""

    active = False


_PASS: Final = _Pass()


def discard(type: BufferType, handle: Handle, owner: Any) -> None:
    """Free memory as soon as nothing under way may touch it, without waiting."""
    waits = tuple((ref(stream), stream._sequence) for stream in busy(type.space))
    if waits or _PASS.active:
        _DISCARDED.append(Discarded(type, handle, owner, waits))
    else:
        type._free(handle)


def reclaim() -> None:
    """Free what was discarded and is reached. What an author's ``_free`` raises keeps nobody from his own work."""
    if _PASS.active or not _DISCARDED:
        return
    try:
        _PASS.active = True
        for _ in range(len(_DISCARDED)):
            try:
                memory = _DISCARDED.popleft()
            except IndexError:  # another thread took it
                break
            if memory.reached:
                with suppress(Exception):
                    memory.type._free(memory.handle)
            else:
                _DISCARDED.append(memory)
    finally:
        _PASS.active = False


def reclaim_all(space: MemorySpace) -> bool:
    """Wait for the work that may touch ``space``, and free what was discarded there.

    Returns:
        Whether there was anything to free; if not, nobody has waited.
    """
    if _PASS.active or not any(memory.type.space is space for memory in _DISCARDED.copy()):
        return False
    settle(space)
    reclaim()
    return True


def _leave_to_parent() -> None:
    """In a forked child: it must neither free what is its parent's nor let go of it, which would free it too."""
    keep_for_ever(_DISCARDED)
    _DISCARDED.clear()


# Nobody allocates any more; a driver's memory goes with the process, but an author may hold something that does not.
atexit.register(reclaim)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
