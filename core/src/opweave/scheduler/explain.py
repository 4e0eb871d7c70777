"""`explain`: which node runs where and why, what is copied, what memory it takes, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from opweave.layout import nbytes
from opweave.scheduler.assign import CAUSES

if TYPE_CHECKING:
    from opweave.scheduler.program import MemoryUse
    from opweave.scheduler.split import Partition
    from opweave.tensor import Tensor

__all__ = ["NodeRow", "explain", "human_bytes", "node_rows"]


class NodeRow(NamedTuple):
    """One node of a program, for reports.

    ``refusals`` holds, for devices of higher priority that were passed over because they do not run the node, their
    reasons.
    """

    split: int
    device: str
    node: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    cause: str
    refusals: dict[str, str]


def node_rows(partition: Partition) -> list[NodeRow]:
    """Every node that runs, in order."""
    assignment = partition.assignment
    rows = []
    for split in partition.splits:
        for item in split.items:
            node = item.node
            if node is None:
                shape = item.out.shape
                rows.append(
                    NodeRow(split.index, split.lane.name, "pack", item.op, item.out.dtype.name, shape, "dense", {})
                )
                continue
            refusals = {}
            for lane in assignment.lanes[: split.lane.index]:
                reason = assignment.verdict(lane, node).reason
                if reason is not None:
                    refusals[lane.name] = reason
            cause = assignment.causes.get(node, "")
            rows.append(
                NodeRow(
                    split.index, split.lane.name, node.name, item.op, node.dtype.name, node.shape, cause, refusals
                )
            )  # fmt: skip
    return rows


def human_bytes(n: int) -> str:
    """``n`` bytes with a binary unit and three significant digits."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _copy_line(tensor: Tensor, cause: str, size: int, source: str, target: str) -> str:
    what = f"{tensor.name} {tensor.dtype}{list(tensor.shape)}"
    return f"    copy {what}: {source} -> {target}, {human_bytes(size)} ({cause})"


def explain(
    partition: Partition,
    memory: Mapping[str, MemoryUse] | None = None,
    limit: int = 200,
    remarks: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> str:
    """The partition as text. Long splits show their first and last nodes, ``limit`` lines in all.

    Args:
        memory: device -> bytes.
        remarks: index of a split -> what its plan says about itself.
    """
    graph, lanes = partition.graph, partition.assignment.lanes
    steps = sum(len(s.items) for s in partition.splits)
    lines = [
        f"{steps} steps in {_count(len(partition.splits), 'split')} over {', '.join(x.name for x in lanes)}; "
        f"{_count(len(partition.copies), 'copy', 'copies')} of "
        f"{human_bytes(sum(c.nbytes for c in partition.copies))} a run"
    ]
    for tensor, place in partition.inputs.items():
        lines.append(f"input {tensor.name} {tensor.dtype}{list(tensor.shape)} on {lanes[partition.arenas[place]].name}")
    rows: dict[int, list[NodeRow]] = {}
    for row in node_rows(partition):
        rows.setdefault(row.split, []).append(row)
    share = max(6, limit // max(1, len(partition.splits)))
    used: set[str] = set()
    for split in partition.splits:
        head = f"split {split.index} on {split.lane.name}: {_count(len(split.items), 'step')}"
        lines.append("; ".join([head, *remarks.get(split.index, ())]))
        for copy in split.copies:
            source = _where(partition, copy.src.place)
            lines.append(
                _copy_line(copy.tensor, copy.cause, nbytes(copy.dst.shape, copy.dst.dtype), source, split.lane.name)
            )
        shown = rows.get(split.index, [])
        width = max((len(r.node) for r in shown), default=0)
        cut = _middle(shown, share)
        for i, row in enumerate(shown):
            if cut and cut[0] <= i < cut[1]:
                if i == cut[0]:
                    lines.append(f"    ... {cut[1] - cut[0]} more ...")
                continue
            used.add(row.cause)
            line = f"    {row.node:<{width}}  {row.op:<12} {row.dtype}{list(row.shape)}  [{row.cause}]"
            lines.append(line.rstrip())
            lines += [f"        not on {device}: {reason}" for device, reason in row.refusals.items()]
        for copy in split.write_backs:
            target = _where(partition, copy.dst.place)
            lines.append(_copy_line(copy.tensor, copy.cause, copy.nbytes, split.lane.name, target))
    for output in graph.outputs:
        lines.append(f"output {output.name} {output.dtype}{list(output.shape)}")
    for name, use in (memory or {}).items():
        lines.append(
            f"memory on {name}: {human_bytes(use.temporaries)} temporaries, {human_bytes(use.weights)} weights, "
            f"{human_bytes(use.states)} states"
        )
    meanings = [f"[{cause}] {CAUSES[cause]}" for cause in CAUSES if cause in used]
    if meanings:
        lines += ["causes:", *(f"    {m}" for m in meanings)]
    return "\n".join(lines)


def _where(partition: Partition, place: int) -> str:
    arena = partition.arenas[place]
    if arena >= 0:
        return partition.assignment.lanes[arena].name
    tensor, space = partition.owners[place]
    if tensor.leaf is not None and tensor.leaf.device:
        return tensor.leaf.device
    return space.name


def _middle(rows: Iterable[NodeRow], limit: int) -> tuple[int, int] | None:
    count = len(list(rows))
    if count <= limit:
        return None
    return limit // 2, count - limit // 2


def _count(n: int, singular: str, plural: str = "") -> str:
    return f"{n} {singular if n == 1 else plural or singular + 's'}"
