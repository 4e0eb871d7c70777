"""`MultiBuffer`: several buffers addressed as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from opweave.errors import BoundsError

if TYPE_CHECKING:
    from opweave.contract.buffer import Buffer
    from opweave.contract.space import Usage

__all__ = ["MultiBuffer"]


class MultiBuffer:
    """Several buffers addressed as one, where a device cannot allocate or import enough bytes at once.

    Windows over one mapping may overlap; a range is then found in the last window that contains all of it.

    Attributes:
        buffers: the parts, in order.
        starts: the byte at which each part begins in the whole.
        size: bytes of the whole.

    Raises:
        BoundsError: no buffer, or ``starts`` that are not one ascending number for each buffer.
    """

    __slots__ = ("__weakref__", "buffers", "size", "starts")

    def __init__(self, buffers: Sequence[Buffer], starts: Sequence[int] | None = None) -> None:
        if not buffers:
            raise BoundsError("a MultiBuffer needs at least one buffer")
        if starts is None:
            starts = [0, *accumulate(b.size for b in buffers[:-1])]
        if len(starts) != len(buffers) or starts[0] < 0 or any(a > b for a, b in pairwise(starts)):
            raise BoundsError(f"{len(buffers)} buffers need as many starts in ascending order, not {list(starts)}")
        self.buffers: Final = tuple(buffers)
        self.starts: Final = tuple(starts)
        self.size: Final = max(start + b.size for start, b in zip(self.starts, self.buffers, strict=True))

    def __repr__(self) -> str:
        return f"<MultiBuffer of {len(self.buffers)}, {self.size:,} bytes, {self.buffers[0].name}>"

    def __enter__(self) -> MultiBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    @property
    def freed(self) -> bool:
        """Whether every part was freed."""
        return all(buffer.freed for buffer in self.buffers)

    def locate(self, offset: int, size: int) -> tuple[Buffer, int]:
        """The buffer that contains bytes ``offset .. offset + size`` of the whole, and the offset in that buffer.

        Raises:
            BoundsError: no single buffer contains the range.
        """
        if size < 0:
            raise BoundsError(f"a range cannot have {size} bytes")
        for i in range(bisect_right(self.starts, offset) - 1, -1, -1):
            buffer, local = self.buffers[i], offset - self.starts[i]
            if local >= 0 and local + size <= buffer.size:
                return buffer, local
        raise BoundsError(f"no single buffer of {self!r} contains bytes {offset:,} .. {offset + size:,}")

    @property
    def usage(self) -> Usage:
        """What the parts are for; setting it sets that of every part."""
        return self.buffers[0].usage

    @usage.setter
    def usage(self, usage: Usage) -> None:
        for buffer in self.buffers:
            buffer.usage = usage

    def clear(self, value: int = 0) -> None:
        """Set every byte to ``value`` (0 .. 255)."""
        for buffer in self.buffers:
            buffer.clear(value)

    def reset(self) -> None:
        """`Buffer.reset` of every part."""
        for buffer in self.buffers:
            buffer.reset()

    def free(self) -> None:
        """`Buffer.free` of every part."""
        for buffer in self.buffers:
            buffer.free()
