"""`gaps`: which steps of a model a device refuses, what they cost where they run instead, and what to declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract.kernels import KernelTable
from opweave.errors import OpweaveError, SchedulerError
from opweave.graph.layout import nbytes
from opweave.scheduler.explain.page import Report, render
from opweave.units import human_bytes, human_time
from opweave_conformance.timing import seconds_of_step
from opweave_conformance.trial import step_of
from opweave_conformance.wording import number_of

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.tensor import Signature, Tensor
    from opweave.scheduler import PlannedGraph
    from opweave.scheduler.plan.splits import Partition, Split, SplitStep

__all__ = ["Gap", "Gaps", "gaps"]

PROBE: Final = 1 << 20
"""Bytes of the transfers by which the rate of copies is measured."""


@dataclass(slots=True)
class Gap:
    """Steps of one operation that the device refuses for one reason, with operands of the same types.

    Attributes:
        op, dtypes: the operation, and the types of its result and sources.
        reason: what the device says; of steps that it runs but for packing their sources, that it packs them.
        device: where they run instead.
        steps: how many of them the graph has.
        seconds: what they take there, each measured by itself; ``None`` where one could not be measured.
        copies, nbytes: how many copies to and from the device they cause, and the bytes of these.
        copying: predicted seconds of these copies.
        declaration: what a kernel for them begins with, or what has to accept them.
    """

    op: str
    dtypes: str
    reason: str
    device: str
    declaration: str
    steps: int = 0
    seconds: float | None = 0.0
    copies: int = 0
    nbytes: int = 0
    copying: float = 0.0

    @property
    def cost(self) -> float:
        """Seconds that a kernel could save, at most."""
        return (self.seconds or 0.0) + self.copying


@dataclass(frozen=True, slots=True, repr=False)
class Gaps(Report):
    """What `gaps` found, the most expensive first.

    Attributes:
        device, model: names of the device, and of the file.
        rows: the gaps.
        taken, steps: how many of the model's steps the device runs, and how many there are.
    """

    device: str
    model: str
    rows: Sequence[Gap]
    taken: int
    steps: int

    @property
    def summary(self) -> str:
        total = sum(gap.cost for gap in self.rows)
        left = f"; the others take {human_time(total)} elsewhere, copies included" if self.rows else ""
        return f"{self.device} runs {self.taken:,} of {number_of(self.steps, 'step')} of {self.model}{left}"

    @property
    def text(self) -> str:
        """A paragraph for each gap."""
        lines = [self.summary]
        for gap in self.rows:
            took = human_time(gap.seconds) if gap.seconds is not None else "not measured"
            copies = number_of(gap.copies, "copy", "copies")
            moved = f", {copies} of {human_bytes(gap.nbytes)}" if gap.copies else ""
            lines += [
                f"{gap.op} ({gap.dtypes}): {number_of(gap.steps, 'step')}, {took} on {gap.device}{moved}",
                f"    {gap.reason}",
            ]
            lines.append(f"    {gap.declaration}")
        return "\n".join(lines)

    def dicts(self) -> list[dict[str, Any]]:
        """``rows`` as dictionaries."""
        return [asdict(gap) | {"cost": gap.cost} for gap in self.rows]

    def html(self, **about: Any) -> str:
        """One self-contained HTML page; ``about`` is shown at its top."""
        return render(Path(__file__).with_name("gaps.html.j2"), report=self, about=about)


def gaps(device: Device, planned: PlannedGraph, model: str) -> Gaps:
    """The gaps of a device in a graph that was placed on it, before other devices.

    Args:
        device: the first of the devices that the graph is placed on.
        planned: the graph; its scheduler is open.
        model: a name for it.

    Raises:
        SchedulerError: the device is not the first one.
    """
    partition = planned.partition
    targets, capabilities = partition.assignment.targets, partition.assignment.capabilities
    first = targets[0]
    if first.device is not device:
        raise SchedulerError(f"the graph is placed on {first.name} first, not on {device.name}")
    found: dict[tuple[str, ...], Gap] = {}
    of_node: dict[Tensor, Gap] = {}
    known: dict[tuple[Device, Signature], float | None] = {}
    taken = steps = 0
    for split in partition.splits:
        for item, reader in _with_readers(split.steps):
            node = item.node if item.node is not None else reader
            if node is None or node.signature is None:
                continue
            if item.node is None:
                if split.target is first:
                    gap = _gap(found, node, _PACKED, split, first.device)
                    gap.steps, gap.copies = gap.steps + 1, gap.copies + 1
                    gap.nbytes += nbytes(item.out.shape, item.out.dtype)
                continue
            steps += 1
            if split.target is first:
                taken += 1
                continue
            reason = capabilities.support(first, node).reason
            if reason is None:
                continue  # it would run here: what it reads lies elsewhere
            gap = of_node[node] = _gap(found, node, reason, split, first.device)
            key = split.target.device, node.signature
            if key not in known:
                known[key] = _measured(*key)
            gap.steps += 1
            seconds = known[key]
            gap.seconds = None if seconds is None or gap.seconds is None else gap.seconds + seconds
    _count_copies(partition, device, of_node)
    rows = sorted(found.values(), key=lambda gap: (-gap.cost, -gap.nbytes, gap.op))
    return Gaps(device.name, model, rows, taken, steps)


_PACKED: Final = "it takes dense operands only: sources are packed first, which a kernel for strided ones need not"


def _with_readers(items: Sequence[SplitStep]) -> Iterator[tuple[SplitStep, Tensor | None]]:
    """Each step; with those that pack a source for a node the first node that reads it."""
    for i, item in enumerate(items):
        reader = None
        if item.node is None:
            place = item.out.storage
            reader = next((j.node for j in items[i + 1 :] if any(s.storage == place for s in j.srcs)), None)
        yield item, reader


def _gap(found: dict[tuple[str, ...], Gap], node: Tensor, reason: str, split: Split, device: Device) -> Gap:
    assert node.op is not None
    dtypes = " ".join(x.dtype.name for x in (node, *node.srcs))
    key = node.op.name, dtypes, reason, split.target.name
    if key not in found:
        layout = ', layout="strided"' if reason is _PACKED else ""
        found[key] = Gap(node.op.name, dtypes, reason, split.target.name, _declaration(node, device, layout))
    return found[key]


def _declaration(node: Tensor, device: Device, layout: str) -> str:
    """The beginning of a kernel for such a node; of a kernel that is there and refuses it, what to change."""
    op = node.op
    assert op is not None
    if not isinstance(getattr(device, "kernels", None), KernelTable) or not device.kernels.ops():
        return f"let _why_not accept {op.name}"  # a device without a table decides by itself
    for kernel in () if layout else device.kernels.candidates(op.name):
        # Packing is what the core does: it is the condition that refuses.
        if kernel._replace(when=None, layout="strided").why_not(step_of(node)) is None:
            return f"let the when= of {getattr(kernel.factory, '__name__', 'its kernel')} accept it: the types fit"
    data = [x.dtype.name for i, x in enumerate(node.srcs) if i not in op.indices]
    index = [x.dtype.name for i, x in enumerate(node.srcs) if i in op.indices]
    (index if op.index_out else data).append(node.dtype.name)
    listed = "".join(
        f', {name}="{" ".join(dict.fromkeys(types))}"' for name, types in (("dtypes", data), ("index", index)) if types
    )
    return f'@kernels("{op.name}"{listed}{layout})'


def _measured(device: Device, signature: Signature) -> float | None:
    try:
        return seconds_of_step(device, signature)
    except (OpweaveError, MemoryError):  # too large beside the model, or a value that the operation refuses
        return None


def _count_copies(partition: Partition, device: Device, of_node: dict[Tensor, Gap]) -> None:
    """Add the copies between the device and others to the gaps of the nodes that they are made for."""
    rate: float | None = None
    first = partition.assignment.targets[0]
    for split in partition.splits:
        for copy in (*split.copies, *split.write_backs):
            if split.target is first:
                gaps_of: Iterable[Tensor | None] = [copy.tensor]  # made by a node that the device refuses
            else:
                place = copy.dst.storage
                gaps_of = [item.node for item in split.steps if any(s.storage == place for s in item.srcs)]
            gap = next((of_node[node] for node in gaps_of if node in of_node), None)
            ends = {partition.arena_of[copy.src.storage], partition.arena_of[copy.dst.storage]}
            if gap is None or first.index not in ends:
                continue
            rate = rate or _transfer_rate(device)
            gap.copies, gap.nbytes = gap.copies + 1, gap.nbytes + copy.nbytes
            gap.copying += copy.nbytes / rate


def _transfer_rate(device: Device) -> float:
    """Bytes per second between the device and the host, the slower of both directions."""
    data = np.ones(PROBE, np.uint8)
    with device.alloc(PROBE) as buffer:
        took = []
        for move in (buffer.upload, buffer.download):
            move(0, data)
            start = perf_counter()
            move(0, data)
            took.append(perf_counter() - start)
    return PROBE / max(took)
