"""`OrtStream`: makes a session of each run of steps, and runs it in the calling thread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opweave.contract import Call, Group, Step, Stream
from opweave.errors import AllocationError, BoundsError, DeviceLostError
from opweave_ort.groups import bind_group

if TYPE_CHECKING:
    from opweave_ort.device import OrtDevice

__all__ = ["OrtStream"]


class OrtStream(Stream):
    """Runs sessions in the calling thread.

    Args:
        threads: of its sessions; ``None``: as many as the backend is set to.
    """

    def __init__(self, device: OrtDevice, threads: int | None = None) -> None:
        super().__init__(device)
        self.provider, self.provider_options, self.threads = device.provider, device.options, threads

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        """One group of all steps. Operands that are no numbered values may overlap in ways that an ONNX graph cannot
        show; their steps stay alone."""
        if all(arg.value >= 0 for step in steps for arg in (step.out, *step.srcs)):
            return [Group(tuple(steps))] if steps else []
        return [Group((step,)) for step in steps]

    def _bind(self, group: Group) -> Call:
        return bind_group(self, group)

    def _inlines(self, other: Stream) -> bool:
        return isinstance(other, OrtStream)

    def _translate(self, error: Exception) -> Exception:
        return translated(error, self.device.name)


def translated(error: Exception, device: str) -> Exception:
    """The error of opweave for one of ONNX Runtime, which tells causes by text only."""
    text = str(error)
    if re.search(r"bad_alloc|[Oo]ut of memory|Failed to allocate memory|BFCArena", text):
        size = re.search(r"(?:requested|size)[^0-9]{0,20}([0-9]+)", text)
        return AllocationError(device, int(size[1]) if size else 0, None, text)
    if re.search(r"out of (data )?bounds|[Oo]ut of range|indices? .*(must be|within)", text):
        return BoundsError(text)
    if re.search(r"device.*(removed|lost|reset)|CUDA failure (700|719)", text, re.IGNORECASE):
        return DeviceLostError(f"{device}: {text}")
    return error
