"""What the hooks for transfers do by default: rows, fills and copies by plain uploads and downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from opweave.errors import LayoutError

__all__ = [
    "BOUNCE_BYTES",
    "STAGED_BYTES",
    "Handle",
    "Rows",
    "as_rows",
    "copy_by_host",
    "download_rows",
    "fill_by_upload",
    "flat_rows",
    "rows_in",
    "upload_rows",
]

Handle = Any
"""Whatever the author's ``_alloc`` returned: an address, an object of the driver, an array."""

Rows = np.ndarray[Any, np.dtype[np.uint8]]
"""Two axes, rows and bytes. Each row is contiguous; ``strides[0]`` is the distance between them in host memory."""

STAGED_BYTES: Final = 8 << 20
"""Rows within so many bytes of memory are transferred together with the bytes between them, others one by one."""


def as_rows(data: Any, pitch: int, *, writable: bool = False) -> Rows:
    """A two-dimensional array of any dtype as rows of bytes.

    Raises:
        LayoutError: not two axes, rows that are not contiguous or overlap at a distance of ``pitch`` bytes, or an array
            that is read-only although ``writable`` is set.
    """
    array = data if isinstance(data, np.ndarray) else np.asarray(data)
    fits = array.ndim == 2 and (array.size == 0 or array.shape[1] == 1 or array.strides[1] == array.itemsize)
    if not fits:
        raise LayoutError(
            "rows are an array of two axes whose rows are contiguous, not one of shape "
            f"{array.shape} and strides {array.strides}"
        )
    if writable and (array is not data or not array.flags.writeable):
        raise LayoutError("rows are read into a writable array")
    count, width = array.shape[0], array.shape[1] * array.itemsize
    distance = array.strides[0] if count > 1 else width
    if distance < width and width:
        raise LayoutError(f"rows of {width} bytes overlap in an array of strides {array.strides}")
    if count > 1 and pitch < width:
        raise LayoutError(f"rows of {width} bytes overlap at a pitch of {pitch} bytes")
    if not array.size:
        return np.empty((count, width), np.uint8)
    return np.ndarray((count, width), np.uint8, _flat(array, (count - 1) * distance + width), 0, (distance, 1))


def flat_rows(rows: Rows) -> Rows:
    """The bytes from the first row to the last one with those between them, as a flat array over the same memory."""
    return _flat(rows, (len(rows) - 1) * rows.strides[0] + rows.shape[1])


def _flat(array: np.ndarray[Any, Any], size: int) -> Rows:
    first = array[:1, :1].reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (size,), (1,))


def upload_rows(
    upload: Callable[[Handle, int, memoryview], None],
    download: Callable[[Handle, int, memoryview], None],
    mem: Handle,
    offset: int,
    pitch: int,
    rows: Rows,
) -> None:
    """Write rows by plain transfers: within `STAGED_BYTES` what lies there is read, changed and written back, else one
    by one."""
    count, width = rows.shape
    size = (count - 1) * pitch + width
    if size > STAGED_BYTES:
        for i, row in enumerate(rows):
            upload(mem, offset + i * pitch, row.data)
        return
    staging = np.empty(size, np.uint8)
    download(mem, offset, staging.data)
    rows_in(staging, 0, pitch, rows.shape)[...] = rows
    upload(mem, offset, staging.data)


def download_rows(
    download: Callable[[Handle, int, memoryview], None], mem: Handle, offset: int, pitch: int, out: Rows
) -> None:
    """Read rows by plain transfers: within `STAGED_BYTES` with the bytes between them, else one by one."""
    count, width = out.shape
    size = (count - 1) * pitch + width
    if size > STAGED_BYTES:
        for i, row in enumerate(out):
            download(mem, offset + i * pitch, row.data)
        return
    staging = np.empty(size, np.uint8)
    download(mem, offset, staging.data)
    out[...] = rows_in(staging, 0, pitch, out.shape)


def rows_in(data: Rows, offset: int, pitch: int, shape: tuple[int, int]) -> Rows:
    """The rows that begin at byte ``offset`` of flat bytes, not a copy."""
    return np.ndarray(shape, np.uint8, data, offset, (pitch, 1))


BOUNCE_BYTES: Final = 8 << 20
"""Largest number of bytes that a copy by way of the host moves at a time."""


def fill_by_upload(
    upload: Callable[[Handle, int, memoryview], None], mem: Handle, offset: int, size: int, value: int
) -> None:
    """Set bytes to ``value`` by uploads of at most `BOUNCE_BYTES`."""
    chunk = memoryview(bytes((value,)) * min(size, BOUNCE_BYTES))
    for at in range(0, size, BOUNCE_BYTES):
        upload(mem, offset + at, chunk[: size - at])


def copy_by_host(
    upload: Callable[[Handle, int, memoryview], None],
    download: Callable[[Handle, int, memoryview], None],
    dst: Handle,
    dst_offset: int,
    src: Handle,
    src_offset: int,
    size: int,
    chunk: int = BOUNCE_BYTES,
) -> None:
    """Copy bytes by downloads and uploads of ``chunk`` bytes. Ranges of one memory may overlap."""
    scratch = memoryview(bytearray(min(size, chunk)))
    starts = range(0, size, chunk)
    # Backwards if the target lies behind the source, so that no chunk is overwritten before it is read.
    for at in reversed(starts) if dst_offset > src_offset else starts:
        part = scratch[: size - at]
        download(src, src_offset + at, part)
        upload(dst, dst_offset + at, part)
