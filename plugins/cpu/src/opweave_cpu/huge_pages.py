"""`HugePageType`: memory of the CPU in pages of 2 MiB, for large weights and caches that are read at random.

Each page that is touched takes an entry of the TLB (translation lookaside buffer), which has a few thousand: with
pages of 4 KiB they cover some MiB, with huge pages some GiB. The system is asked for these (``madvise``), and gives
ordinary pages where it has no free huge ones.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opweave.contract import BufferType, Usage
from opweave_cpu.pages import allocate_pages

if TYPE_CHECKING:
    import numpy as np

    from opweave.contract import Device

__all__ = ["HUGE_PAGE", "HugePageType", "has_huge_pages"]

HUGE_PAGE: Final = 1 << 21
"""Bytes of a huge page on x86-64, and on ARM with pages of 4 KiB."""

_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages() -> bool:
    """Whether the system gives huge pages to programs that ask for them: Linux, unless it is set to ``never``."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


class HugePageType(BufferType):
    """Ordinary memory in huge pages: ``buffer_type="cpu.huge_pages"``. Its buffers take whole pages of 2 MiB."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, f"{device.name}.huge_pages")

    def _alloc(self, size: int, usage: Usage) -> np.ndarray[Any, Any]:
        return allocate_pages(size, HUGE_PAGE, _ask_for_huge)


def _ask_for_huge(pages: mmap.mmap, offset: int, size: int, address: int) -> None:
    pages.madvise(mmap.MADV_HUGEPAGE, offset, size)
