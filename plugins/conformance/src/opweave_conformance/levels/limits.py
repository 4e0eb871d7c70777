"""Level 1, last part: allocations larger than the device's memory. Last, because a device that fails here may have no
memory left."""

from __future__ import annotations

import math
from typing import Final

from opweave.errors import AllocationError, BoundsError
from opweave_conformance.checklist import Checklist, Subject, expect, expect_equal, expect_raises, inapplicable
from opweave_conformance.levels.memory import noise

__all__ = ["CHECKS"]

memory = Checklist(1, "memory")
CHECKS = memory.checks

ABSURD: Final = 1 << 60
CYCLES: Final = 64


@memory("absurd-size")
def _(subject: Subject) -> None:
    """An allocation larger than any memory raises AllocationError, and the device remains usable."""
    device = subject.device
    error = expect_raises(AllocationError, f"allocating {ABSURD:,} bytes", lambda: device.alloc(ABSURD))
    expect(error.requested == ABSURD, f"the error says that {error.requested:,} bytes were asked for")
    expect(error.device == device.name, f"the error says it is about {error.device!r}")
    value = noise(subject, 65)
    with device.alloc(65) as buffer:
        buffer.upload(0, value)
        expect_equal(buffer.read(), value, "a buffer made after an allocation failed")


@memory("largest")
def _(subject: Subject) -> None:
    """One byte more than the largest buffer is refused with an AllocationError."""
    limit = subject.device.max_buffer_size
    if limit is None:
        inapplicable("it has no largest buffer")
    expect_raises(AllocationError, f"allocating {limit + 1:,} bytes", lambda: subject.device.alloc(limit + 1))


@memory("negative-size")
def _(subject: Subject) -> None:
    """A negative size is refused with a BoundsError."""
    expect_raises(BoundsError, "allocating -1 bytes", lambda: subject.device.alloc(-1))


@memory("freeing")
def _(subject: Subject) -> None:
    """Freed memory can be allocated again: one buffer after the other, more than all memory together."""
    device = subject.device
    free, _ = device.mem_info()
    size = min(free // 16, device.max_buffer_size or free)
    if size <= 0:
        inapplicable("it does not know its memory")
    cycles = min(math.ceil(free / size) + 2, CYCLES)
    for cycle in range(cycles):
        try:
            device.alloc(size).free()
        except AllocationError as error:
            expect(cycle == 0, f"after {cycle} buffers of {size:,} bytes that were freed again: {error}")
            inapplicable(f"it does not give {size:,} bytes though {free:,} are free: {error}")
    if device.max_buffer_size is not None and cycles == CYCLES:
        left, _ = device.mem_info()
        expect(left >= free // 2, f"{cycles} buffers of {size:,} bytes were freed, but {left:,} of {free:,} are left")
