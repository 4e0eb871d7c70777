"""Anonymous pages of the system as arrays: memory prepared before it is written, as huge pages or for a NUMA node."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any
from weakref import finalize

import numpy as np

from opweave.runtime.host.reservations import RESERVATIONS

__all__ = ["allocate_pages"]


def allocate_pages(size: int, page: int, prepare: Callable[[mmap.mmap, int, int, int], None]) -> np.ndarray[Any, Any]:
    """``size`` bytes of whole pages, counted as reserved until the array and its views are gone.

    Args:
        size: bytes.
        page: bytes of a page, a power of two; the first byte lies at a multiple of it.
        prepare: called before anything is written, with the mapping, the offset of the first page in it, the bytes of
            the pages and the address of the first one.

    Raises:
        MemoryError: there is not enough memory, or ``prepare`` raised ``OSError``.
    """
    whole = -(-size // page) * page
    RESERVATIONS.reserve(whole)
    try:
        pages = mmap.mmap(-1, whole + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(pages, np.uint8)
        first = int(raw.__array_interface__["data"][0])
        skip = -first % page
        prepare(pages, skip, whole, first + skip)
    except (OSError, ValueError, OverflowError) as error:
        RESERVATIONS.release(whole)
        raise MemoryError(str(error)) from None
    finalize(raw, RESERVATIONS.release, whole).atexit = False  # views keep `raw` alive
    return raw[skip : skip + size]
