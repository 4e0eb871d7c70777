"""A buffer's bytes as an array of the host, for as long as they are mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["map_bytes", "unmap_bytes"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def map_bytes(queue: cl.CommandQueue, mem: cl.Buffer, offset: int, size: int, *, write: bool) -> Bytes:
    """``size`` bytes from ``offset`` on, which the host may read, or with ``write`` change too."""
    import pyopencl as cl

    enqueue: Any = cl.enqueue_map_buffer
    access: Any = cl.map_flags.READ | (cl.map_flags.WRITE if write else 0)
    array, _ = enqueue(queue, mem, access, offset, (size,), np.uint8)
    return array  # type: ignore[no-any-return]


def unmap_bytes(queue: cl.CommandQueue, array: Bytes) -> None:
    """End what `map_bytes` began; done when it returns."""
    mapping: Any = array.base
    mapping.release(queue)
    queue.finish()
