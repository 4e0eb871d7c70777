"""`OrtStream`: makes a session of each run of steps, and runs it in the calling thread."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from onnxruntime import RunOptions

from opweave.contract import Arg, Call, Group, Step, Stream
from opweave.errors import AllocationError, BoundsError, Cancelled, DeviceLostError
from opweave.runtime.host.threads import ThreadPool, pool_of
from opweave_ort.groups import bind_group
from opweave_ort.phases import phases
from opweave_ort.structure import is_within, writes

if TYPE_CHECKING:
    from opweave_ort.device import OrtDevice

__all__ = ["OrtStream"]


class OrtStream(Stream):
    """Runs sessions in the calling thread.

    A run that is asked to end does so after the operator of ONNX that a session is computing.

    Args:
        threads: of its sessions, or the pool that says how many and on which processors; ``None``: as many as the
            backend is set to.
    """

    def __init__(self, device: OrtDevice, threads: int | ThreadPool | None = None) -> None:
        super().__init__(device)
        self.provider, self.provider_options = device.provider, device.options
        self.pool, self.threads = pool_of(threads)
        self.run_options: Final = RunOptions()  # of all its runs, of which one is made at a time
        self._gives_back = False
        self.spins = True  # whether threads wait in a loop for work; those of many sessions would take cores

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        """One group of all steps, or those of `phases`. Operands that are no numbered values may overlap in ways that
        an ONNX graph cannot show; with one of them all steps stay alone. A group writes a state once, and what it then
        reads of it lies wholly within that region or wholly outside."""
        if not all(arg.value >= 0 for step in steps for arg in (step.out, *step.srcs)):
            return [Group((step,)) for step in steps]
        groups: list[list[Step]] = []
        written: dict[int, Arg] = {}
        last = -1
        for phase, step in phases(self.device, steps, self.repack):
            partly = any(_crosses(arg, written[arg.value]) for arg in step.srcs if arg.value in written)
            if phase > last or partly or (writes(step) and step.out.value in written):
                last = phase
                groups.append([])
                written.clear()
            groups[-1].append(step)
            if writes(step):
                written[step.out.value] = step.out
        self.spins = last <= 0
        return [Group(tuple(group)) for group in groups]

    def _bind(self, group: Group) -> Call:
        if self.repack < inf and not self._gives_back:  # memory is to be saved: a run gives back what it has taken
            self._gives_back = True
            self.run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return bind_group(self, group)

    def _inlines(self, other: Stream) -> bool:
        return isinstance(other, OrtStream) and other.pool is self.pool

    def _run(self, calls: Iterator[Call]) -> None:
        if self.pool is None:  # no empty context: after weights have filled the caches, even that takes time
            for call in calls:
                call()
            return
        with self.pool:
            for call in calls:
                call()

    def _abort(self) -> None:
        self.run_options.terminate = True  # sessions end after their present operator

    def _translate(self, error: Exception) -> Exception:
        return translated(error, self.device.name)


def _crosses(arg: Arg, written: Arg) -> bool:
    """Whether a window lies partly within a region and partly outside."""
    beside = arg.offset + arg.span <= written.offset or written.offset + written.span <= arg.offset
    return not beside and not is_within(arg, written)


def translated(error: Exception, device: str) -> Exception:
    """The error of opweave for one of ONNX Runtime, whose text alone tells the cause; else the error itself."""
    text = str(error)
    if "terminate flag" in text:
        return Cancelled(f"the work on {device} was ended by abort()")
    if re.search(r"bad_alloc|[Oo]ut of memory|Failed to allocate memory|BFCArena", text):
        size = re.search(r"(?:requested|size)[^0-9]{0,20}([0-9]+)", text)
        return AllocationError(device, int(size[1]) if size else 0, None, text)
    if re.search(r"out of (data )?bounds|[Oo]ut of range|indices? .*(must be|within)|invalid indice", text):
        return BoundsError(text)
    if re.search(r"device.*(removed|lost|reset)|CUDA failure (700|719)", text, re.IGNORECASE):
        return DeviceLostError(f"{device}: {text}")
    return error
