"""Sizes that suit a device: how wide a work-item loads, how many work-items share a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["Tuning"]


class Tuning(NamedTuple):
    """Sizes that kernels are built and launched with.

    Attributes:
        vector: elements that one work-item of a pointwise kernel handles at once; 1, 2, 4, 8 or 16.
        group: work-items of one group of a pointwise kernel.
        row_vector: elements that one work-item loads at once in a kernel that reduces a row.
        row_group: work-items that share a row; a power of two.
        tiled: whether products share tiles between the work-items of a group, else one work-item computes a panel.
    """

    vector: int
    group: int
    row_vector: int
    row_group: int
    tiled: bool

    @classmethod
    def of(cls, device: cl.Device) -> Tuning:
        """The sizes for a device, by its type and its limits."""
        import pyopencl as cl

        limit = device.max_work_group_size
        if device.type & cl.device_type.CPU:
            # A core runs the work-items of a group one after another: wide vectors, and no sharing between items.
            return cls(vector=16, group=min(64, limit), row_vector=16, row_group=1, tiled=False)
        group = min(64, 1 << (limit.bit_length() - 1))
        return cls(vector=4, group=group, row_vector=1, row_group=group, tiled=limit >= 256)
