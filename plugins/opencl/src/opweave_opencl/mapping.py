"""A buffer's bytes as an array of the host, for as long as they are mapped; rows of bytes as a rectangle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["map_bytes", "rectangle", "unmap_bytes"]

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


def rectangle(offset: int, pitch: int, rows: Bytes) -> dict[str, Any]:
    """The arguments of ``enqueue_copy`` that say which bytes of a buffer and of the host are the rows (`flat_rows`)."""
    count, width = rows.shape
    return {
        "buffer_origin": (offset, 0),
        "host_origin": (0, 0),
        "region": (width, count),
        "buffer_pitches": (pitch,),
        "host_pitches": (rows.strides[0],),
    }
