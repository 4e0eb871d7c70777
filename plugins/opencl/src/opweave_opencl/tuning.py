"""Sizes that suit a device: how wide a work-item loads, how many work-items share a group, what local memory holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from opweave.contract import Limits
from opweave.runtime.host.processor import cpu_fields

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["CHUNK", "GROUPS", "Tuning", "card_limit", "limit", "processor_limit", "shared_group"]

limit: Final = Limits()
"""Declares the numbers that decide between ways through kernels, beside them."""

processor_limit: Final = Limits()
"""Declares those that are read only for processors, where a work-item has rows and blocks of its own."""

card_limit: Final = Limits()
"""Declares those that are read only where work-items share rows and tiles."""

ITEMS: Final = processor_limit("items", 8, 1, 64)
"""Work-items for each processor that keep it busy."""

CHUNK: Final = processor_limit("chunk", 1 << 13, 1, 1 << 20)
"""Elements that a work-item moves or computes one after another: not so few that starting it counts."""

GROUPS: Final = limit("groups", 65535, 1, 65535, bounds=(1, 65535))
"""The most groups along an axis but the first: so many every device takes."""

ROW_GROUPS: Final = card_limit("row_groups", 1 << 20, 1, 1 << 20)
"""The most groups of a kernel whose groups loop over rows."""


class Tuning(NamedTuple):
    """Sizes that kernels are built and launched with.

    Attributes:
        vector: elements that one work-item of a pointwise kernel handles at once; 1, 2, 4, 8 or 16.
        group: work-items of one group of a pointwise kernel.
        row_vector: elements that one work-item loads at once in a kernel that reduces a row.
        row_group: work-items that share a row; a power of two.
        tiled: whether products share tiles between the work-items of a group, else one work-item computes a block.
        local: bytes of local memory of a group.
        units: processors that run groups at the same time.
        wide_registers: whether a processor's registers hold 16 floats, and there are 32 of them.
    """

    vector: int
    group: int
    row_vector: int
    row_group: int
    tiled: bool
    local: int = 1 << 15
    units: int = 1
    wide_registers: bool = False

    @property
    def wanted(self) -> int:
        """Work-items of a processor that keep all its cores busy."""
        return ITEMS.value * self.units

    @property
    def most_groups(self) -> int:
        """The most work-groups of a kernel whose groups loop over rows: a core gains nothing from more."""
        return 2 * self.wanted if self.row_group == 1 else ROW_GROUPS.value

    @classmethod
    def of(cls, device: cl.Device) -> Tuning:
        """The sizes for a device, by its type and its limits."""
        import pyopencl as cl

        limit, local, units = device.max_work_group_size, device.local_mem_size, device.max_compute_units
        if device.type & cl.device_type.CPU:
            # A core runs the work-items of a group one after another: wide vectors, and no sharing between items.
            wide = "avx512f" in cpu_fields().get("flags", "").split()
            return cls(16, min(64, limit), 16, 1, tiled=False, local=local, units=units, wide_registers=wide)
        group = shared_group(device)
        return cls(4, group, 1, group, tiled=limit >= 256, local=local, units=units)


def shared_group(device: cl.Device) -> int:
    """The work-items that share a row where they run at the same time: a power of two."""
    return min(64, 1 << (device.max_work_group_size.bit_length() - 1))
