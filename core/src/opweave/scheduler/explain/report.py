"""`explain`: which node runs where and why, what is copied, what memory it takes: as text, as rows, as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.runtime.worker import WorkerStream
from opweave.scheduler.explain.page import COLOURS, MOST_NODES, Report, render
from opweave.scheduler.place.assign import CAUSES
from opweave.scheduler.place.prediction import MemoryUse
from opweave.scheduler.place.strategy import remarks_on
from opweave.scheduler.plan.allocate import Lifetimes
from opweave.scheduler.plan.fuse import unfused
from opweave.scheduler.plan.splits import COPY_CAUSES
from opweave.units import human_bytes, human_time

if TYPE_CHECKING:
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.prediction import Prediction
    from opweave.scheduler.plan.splits import Copy, Partition, Split, SplitStep

__all__ = ["CopyRow", "Explanation", "MemoryCurve", "NodeRow", "explain", "node_rows", "where"]


WIDTH: Final = 960
HEIGHT: Final = 120


class NodeRow(NamedTuple):
    """One node of a program, for reports.

    ``refusals`` holds, for devices of higher priority that were passed over because they do not run the node, their
    reasons. ``seconds`` is what it is predicted to take, ``None`` where nobody asked for a prediction. ``scope`` is the
    beginning of ``node``: where the node was built (`opweave.scope`), or ``""``. ``precision`` is what it is
    computed in. ``repacked`` names the special memory in which it is given copies of its weights, or is ``""``.
    """

    split: int
    device: str
    node: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    cause: str
    refusals: dict[str, str]
    seconds: float | None = None
    scope: str = ""
    precision: Precision = "exact"
    repacked: str = ""


class CopyRow(NamedTuple):
    """One copy between memories that every run makes. ``cause`` as in `Copy`; ``after``: a write-back."""

    split: int
    tensor: str
    source: str
    target: str
    nbytes: int
    cause: str
    after: bool


class MemoryCurve(NamedTuple):
    """Bytes of a device's living temporaries over a run.

    Attributes:
        moments: (moment, bytes from there on); a moment is the start of a split, or one step.
        planned: bytes that the memory plan takes, at least the highest point of the curve; 0 without a plan.
    """

    device: str
    moments: list[tuple[int, int]]
    planned: int


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Explanation(Report):
    """What `Program.explain` gives: a text, rows and a page. Printing shows the text; ``in`` looks for words in it.

    Attributes:
        text: the whole, for people.
        nodes, copies: every node and every copy, in order.
        memory: device -> bytes (`MemoryUse`); empty for what was planned without memory.
        curves: memory over the run, by device.
        splits: for every split its device and what its plan says about itself.
        remarks: what could be done better, each a sentence.
        predicted: what a run is predicted to take, where it was placed by cost or somebody asked.
    """

    text: str
    nodes: list[NodeRow]
    copies: list[CopyRow]
    memory: Mapping[str, MemoryUse]
    curves: list[MemoryCurve]
    splits: list[tuple[str, list[str]]]
    predicted: Prediction | None
    remarks: list[str]

    def by_scope(self, depth: int | None = None) -> str:
        """A table with one line for each scope (`opweave.scope`) instead of one for each node: its steps, its devices
        and, where there is a prediction, its seconds.

        Args:
            depth: scopes that are nested deeper count for the one around them; ``None``: all have lines of their own.
        """
        scopes: dict[str, list[NodeRow]] = {}
        for row in self.nodes:
            scopes.setdefault("/".join(row.scope.split("/")[:depth]), []).append(row)
        width = max((len(scope) for scope in scopes), default=0)
        lines = []
        for scope, rows in scopes.items():
            line = f"{scope or '-':<{width}}  {_count(len(rows), 'step'):>10}  {', '.join({r.device: 0 for r in rows})}"
            seconds = [row.seconds for row in rows if row.seconds is not None]
            lines.append(f"{line}  {human_time(sum(seconds))}" if seconds else line)
        return "\n".join(lines)

    def html(self) -> str:
        """One self-contained HTML page."""
        return page(self)


def copy_rows(partition: Partition) -> list[CopyRow]:
    """Every copy of a run, in order."""
    return [
        CopyRow(split.index, c.tensor.name, *ends_of(partition, c), c.nbytes, c.cause, c.cause == "write-back")
        for split in partition.splits
        for c in (*split.copies, *split.write_backs)
    ]


def memory_curves(partition: Partition, memory: Mapping[str, MemoryUse]) -> list[MemoryCurve]:
    """Bytes of living temporaries over a run, for every device that has some."""
    live = Lifetimes(partition, unfused(partition))
    birth, death, alias = live.birth, live.death, live.alias
    end = (live.times[-1] + len(partition.splits[-1].steps) + 1) if live.times else 0
    curves = []
    for target in partition.assignment.targets:
        changes: dict[int, int] = {}
        for storage, size in enumerate(partition.sizes):
            if partition.arena_of[storage] == target.index and birth[storage] >= 0:
                # A value that takes over memory counts from the moment after the former value's end.
                start = birth[storage] + (alias[storage] != storage)
                changes[start] = changes.get(start, 0) + size
                changes[min(death[storage], end) + 1] = changes.get(min(death[storage], end) + 1, 0) - size
        if changes:
            times = sorted(changes)
            moments = list(zip(times, accumulate([changes[moment] for moment in times]), strict=True))
            planned = memory[target.name].temporaries if target.name in memory else 0
            curves.append(MemoryCurve(target.name, moments, planned))
    return curves


def node_rows(partition: Partition) -> list[NodeRow]:
    """Every node that runs, in order."""
    return [_node_row(item, split, partition) for split in partition.splits for item in split.steps]


def _node_row(item: SplitStep, split: Split, partition: Partition) -> NodeRow:
    node, support, device, predicted = item.node, item.support, split.target.name, partition.prediction
    if node is None:
        return NodeRow(split.index, device, "pack", item.op, item.out.dtype.name, item.out.shape, "dense", {})
    assignment = partition.assignment
    passed_over = assignment.targets[: split.target.index]
    reasons = {target.name: assignment.capabilities.support(target, node).reason for target in passed_over}
    return NodeRow(
        split.index, device, node.name, item.op, node.dtype.name, node.shape, assignment.causes.get(node, ""),
        refusals={name: reason for name, reason in reasons.items() if reason is not None},
        seconds=predicted.nodes.get(node) if predicted is not None else None,
        scope=node.scope,
        precision=support.precision,
        repacked=", ".join(dict.fromkeys(kind.name for kind in support.repacked.values())),
    )  # fmt: skip


def _copy_line(copy: Copy, row: CopyRow) -> str:
    most = "at most " if copy.ids is not None else ""  # only the rows that are asked for
    what = f"{copy.kind or 'copy'} {copy.tensor.name} {copy.tensor.dtype}{list(copy.tensor.shape)}"
    return f"    {what}: {row.source} -> {row.target}, {most}{human_bytes(row.nbytes)} ({row.cause})"


def explain(
    partition: Partition,
    memory: Mapping[str, MemoryUse] | None = None,
    limit: int = 200,
    remarks: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> Explanation:
    """The partition explained. In the text, long splits show their first and last nodes, ``limit`` lines in all.

    Args:
        memory: device -> bytes.
        remarks: index of a split -> what its plan says about itself.
    """
    targets, predicted = partition.assignment.targets, partition.prediction
    rows, copies = node_rows(partition), copy_rows(partition)
    lines = [
        f"{len(rows)} steps in {_count(len(partition.splits), 'split')} over {', '.join(x.name for x in targets)}; "
        f"{_count(len(copies), 'copy', 'copies')} of {human_bytes(sum(c.nbytes for c in copies))} a run"
    ]
    if predicted is not None:
        lines.append(f"predicted: {human_time(predicted.seconds)}, {human_time(predicted.copies)} of it moving bytes")
        lines += [f"{name} lacks {human_bytes(size)} of memory" for name, size in predicted.short.items()]
    for tensor, storage in partition.inputs.items():
        at = targets[partition.arena_of[storage]].name
        lines.append(f"input {tensor.name} {tensor.dtype}{list(tensor.shape)} on {at}")
    nodes = {split: list(own) for split, own in groupby(rows, key=lambda row: row.split)}
    copy_lines = map(_copy_line, partition.copies, copies)
    share = max(6, limit // max(1, len(partition.splits)))
    used: set[str] = set()
    for split in partition.splits:
        head = f"split {split.index} on {split.target.name}: {_count(len(split.steps), 'step')}"
        prediction = [f"predicted {human_time(predicted.splits[split.index])}"] if predicted is not None else []
        lines.append("; ".join([head, *prediction, *remarks.get(split.index, ())]))
        lines += islice(copy_lines, len(split.copies))
        lines += _node_lines(nodes.get(split.index, []), share, used)
        lines += islice(copy_lines, len(split.write_backs))
    lines += map(_shards_line, partition.annotated.sharded)
    lines += [f"output {output.name} {output.dtype}{list(output.shape)}" for output in partition.graph.outputs]
    memory = memory or {}
    for name, use in memory.items():
        lines.append(
            f"memory on {name}: {human_bytes(use.temporaries)} temporaries, {human_bytes(use.weights)} weights, "
            f"{human_bytes(use.states)} states" + (f", {human_bytes(use.library)} library" if use.library else "")
        )
    for used_target in dict.fromkeys([split.target for split in partition.splits]):
        stream = used_target.stream
        if left := (stream.inner if isinstance(stream, WorkerStream) else stream).uncancellable():
            lines.append(f"cancelling on {used_target.name}: {left}")
    whole = remarks_on(partition)
    if whole:
        lines += ["remarks:", *(f"    {remark}" for remark in whole)]
    lines += _meanings(used, {copy.cause for copy in copies})
    return Explanation(
        text="\n".join(lines),
        nodes=rows,
        copies=copies,
        memory=memory,
        curves=memory_curves(partition, memory),
        splits=[(split.target.name, list(remarks.get(split.index, ()))) for split in partition.splits],
        predicted=predicted,
        remarks=whole,
    )


def _node_lines(shown: Sequence[NodeRow], share: int, used: set[str]) -> Iterator[str]:
    """The lines of a split's nodes, the first and the last ones of many; their causes are added to ``used``."""
    width = max((len(row.node) for row in shown), default=0)
    hidden = range(share // 2, len(shown) - share // 2 if len(shown) > share else 0)
    for i, row in enumerate(shown):
        if i in hidden:
            if i == hidden.start:
                yield f"    ... {len(hidden)} more ..."
            continue
        used.add(row.cause)
        line = f"    {row.node:<{width}}  {row.op:<12} {row.dtype}{list(row.shape)}  [{row.cause}]"
        if row.precision != "exact":
            line += f"  in {row.precision}"
        if row.repacked:
            line += f"  weights in {row.repacked}"
        if row.seconds is not None:
            line += f"  {human_time(row.seconds)}"
        yield line.rstrip()
        yield from [f"        not on {device}: {reason}" for device, reason in row.refusals.items()]


def _meanings(causes: Set[str], of_copies: Set[str]) -> list[str]:
    meanings = [f"[{cause}] {CAUSES[cause]}" for cause in CAUSES if cause in causes]
    meanings += [f"({cause}) {COPY_CAUSES[cause]}" for cause in COPY_CAUSES if cause in of_copies]
    return ["causes:", *(f"    {meaning}" for meaning in meanings)] if meanings else []


def _shards_line(tensor: Tensor) -> str:
    assert tensor.leaf is not None
    assert tensor.leaf.shards is not None
    shards = tensor.leaf.shards
    parts = zip(shards.devices, shards.parts, strict=True)
    each = ", ".join(f"{device} {part.shape[shards.axis]}" for device, part in parts)
    return f"shards {tensor.name} {tensor.dtype}{list(tensor.shape)}, axis {shards.axis}: {each}"


def ends_of(partition: Partition, copy: Copy) -> tuple[str, str]:
    """Where a copy reads and where it writes; of collectives all devices, joined by ``" + "``."""
    read = dict.fromkeys([where(partition, view.storage) for view in (copy.src, *copy.terms)])
    written = dict.fromkeys([where(partition, view.storage) for view in copy.writes])
    return " + ".join(read), " + ".join(written)


def where(partition: Partition, storage: int) -> str:
    """The name of the device or of the space in whose memory a storage lies."""
    arena = partition.arena_of[storage]
    if arena >= 0:
        return partition.assignment.targets[arena].name
    tensor, space = partition.owners[storage]
    if tensor.leaf is not None and tensor.leaf.device:
        return tensor.leaf.device
    return space.name


def _count(n: int, singular: str, plural: str = "") -> str:
    return f"{n} {singular if n == 1 else plural or singular + 's'}"


# --- the page --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Consecutive steps: rows of a table, or a scope with parts of its own.

    Attributes:
        name: of the scope, within the one around it; ``""`` for rows.
        rows: all of its steps.
        parts: what a scope consists of.
    """

    name: str
    rows: Sequence[NodeRow]
    parts: Sequence[Part] = ()


def by_scope(rows: Sequence[NodeRow], depth: int = 0) -> list[Part]:
    """Steps of one split, in order, as parts; each stretch of steps of one scope is a part."""

    def name(row: NodeRow) -> str:
        return row.scope.split("/")[depth] if row.scope.count("/") >= depth and row.scope else ""

    parts = []
    for own, stretch in groupby(rows, key=name):
        inside = list(stretch)
        parts.append(Part(own, inside, by_scope(inside, depth + 1) if own else ()))
    return parts


def page(explanation: Explanation) -> str:
    """The HTML page of an explanation."""
    devices = list(dict.fromkeys([*explanation.memory, *(device for device, _ in explanation.splits)]))
    colours = {device: COLOURS[i % len(COLOURS)] for i, device in enumerate(devices)}
    shown = explanation.nodes[:MOST_NODES]
    nodes = {split: list(rows) for split, rows in groupby(shown, key=lambda row: row.split)}
    counts, steps = Counter(row.device for row in explanation.nodes), Counter(row.split for row in explanation.nodes)
    copies: dict[int, list[Any]] = {}
    for copy in explanation.copies:
        copies.setdefault(copy.split, []).append(copy)
    used = {*[row.cause for row in explanation.nodes], *[copy.cause for copy in explanation.copies]}
    # One axis of time for all devices.
    end = max((curve.moments[-1][0] for curve in explanation.curves), default=0) or 1
    return render(
        Path(__file__).with_name("page.html.j2"),
        summary=explanation.text.partition("\n")[0],
        predicted=explanation.predicted,
        remarks=explanation.remarks,
        devices=devices,
        colours=colours,
        counts=counts,
        total=len(explanation.nodes),
        hidden=len(explanation.nodes) - len(shown),
        splits=[
            {
                "index": i,
                "device": device,
                "steps": steps[i],
                "remarks": remarks,
                "parts": by_scope(nodes.get(i, [])),
                "copies": copies.get(i, []),
                "seconds": explanation.predicted.splits[i] if explanation.predicted is not None else None,
            }
            for i, (device, remarks) in enumerate(explanation.splits)
        ],
        memory=explanation.memory,
        copied=sum(copy.nbytes for copy in explanation.copies),
        curves=[_curve(curve, end) for curve in explanation.curves],
        causes=[(cause, text) for cause, text in {**CAUSES, **COPY_CAUSES}.items() if cause in used],
        width=WIDTH,
        height=HEIGHT,
    )


def _curve(curve: MemoryCurve, end: int) -> dict[str, Any]:
    """A curve up to the moment ``end`` as the points of a polygon over an area of `WIDTH` × `HEIGHT`."""
    top = max(curve.planned, max((size for _, size in curve.moments), default=0), 1)
    points = [f"0,{HEIGHT}"]
    last = 0
    for moment, size in curve.moments:
        x = moment / end * WIDTH
        points += [f"{x:.1f},{HEIGHT - last / top * HEIGHT:.1f}", f"{x:.1f},{HEIGHT - size / top * HEIGHT:.1f}"]
        last = size
    points += [f"{WIDTH},{HEIGHT - last / top * HEIGHT:.1f}", f"{WIDTH},{HEIGHT}"]
    return {
        "device": curve.device,
        "points": " ".join(points),
        "peak": max((size for _, size in curve.moments), default=0),
        "planned": curve.planned,
        "line": HEIGHT - curve.planned / top * HEIGHT,
    }
