"""`Report`: a text that is also a page, one HTML file that needs nothing else; and the page of an `Explanation`."""

from __future__ import annotations

from collections import Counter
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.scheduler.place.assign import CAUSES
from opweave.scheduler.plan.splits import COPY_CAUSES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from opweave.scheduler.explain.report import Explanation, MemoryCurve, NodeRow

__all__ = ["COLOURS", "MOST_NODES", "Report", "page", "render"]

COLOURS: Final = ("#3b76b5", "#d9822b", "#4a9a57", "#8a63b8", "#c0504d", "#3f9ea3", "#9a7b4f", "#6b7280")
"""One for each device, in order of priority; there may be more devices than colours."""

MOST_NODES: Final = 5_000
"""Nodes beyond this many are counted and not shown: browsers get slow."""

WIDTH: Final = 960
HEIGHT: Final = 120


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


def render(template: str, **values: Any) -> str:
    """A page from a template of this folder. ``base.html.j2`` is what all have in common."""
    # Local: importing opweave must not pay for it.
    from jinja2 import Environment, FileSystemLoader

    from opweave.units import human_bytes, human_time

    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["bytes"] = human_bytes
    environment.filters["time"] = human_time
    return environment.get_template(template).render(values)


class Report:
    """What a report has: a text, which printing shows and in which ``in`` looks for words, and a page."""

    __slots__ = ()

    if TYPE_CHECKING:  # a data class would take the property for the default of its field

        @property
        def text(self) -> str:
            """The whole report, as people read it."""

    def html(self) -> str:
        """One self-contained HTML page."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __contains__(self, words: str) -> bool:
        return words in self.text

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html())

    def _repr_html_(self) -> str:
        """What notebooks show: the page in a frame, so that its styles stay its own."""
        source = escape(self.html(), quote=True)
        return f'<iframe srcdoc="{source}" style="width: 100%; height: 40em; border: 1px solid #ccc"></iframe>'


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
        "page.html.j2",
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
