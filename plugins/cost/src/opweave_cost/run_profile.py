"""`RunProfile`: what `opweave_cost.profile_run` has measured, as rows, as tables, as a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from opweave.scheduler.explain.page import COLOURS, MOST_NODES, Report, render
from opweave.units import human_bytes, human_time

__all__ = ["Figures", "RunProfile", "RunRow", "Total"]

SLOWEST = 10
"""Rows that the text shows by themselves."""

ABOVE = "above: what is read lies in faster caches"
"""What readers are told of shares of the limit beyond 100 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of a part of a run, or of several parts together.

    Attributes:
        name: of parts the node's, of a group the last one's; of transfers the tensor's.
        seconds: the median over all runs.
        share: of the seconds of all parts.
        nbytes: bytes that are read and written; what lives only inside a group does not count. Of transfers the bytes
            that move.
        flops: floating-point operations.
        least: seconds that the device's profile allows: of steps the larger one of bytes by bandwidth and flops by the
            rate of its fastest products (the roofline model of Williams, Waterman and Patterson, 2009); of transfers
            what one of that size was measured to take. ``None``: nobody asked, or it is no work of the device.
    """

    name: str
    seconds: float
    share: float
    nbytes: int
    flops: int
    least: float | None

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def of_limit(self) -> float | None:
        """``least / seconds``: 1 is all that the device allows. Small steps stay far below, because a step takes some
        time to start; steps whose operands lie in a processor's caches may be above."""
        return self.least / self.seconds if self.least is not None and self.seconds else None

    @property
    def limit_text(self) -> str:
        """`of_limit` for people: a share beyond the limit is one of other memory, of which nothing is known."""
        if self.of_limit is None:
            return ""
        return "above" if self.of_limit >= 1.005 else f"{self.of_limit:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow(Figures):
    """A part of a run: a step, or several that the device fuses, or a transfer.

    Attributes:
        split: the number of its split, ``None``: it belongs to none.
        device: where it happens.
        kind: ``"step"``, ``"copy"`` (between memories), ``"input"`` or ``"output"`` (from and to the caller's arrays).
        ops: the operations, several where the device fuses them.
        scope: in which the node was built (`opweave.scope`), or ``""``.
        note: of copies from where to where, and why.
    """

    split: int | None
    device: str
    kind: str
    ops: tuple[str, ...]
    scope: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Total(Figures):
    """Sums over ``count`` rows."""

    count: int


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class RunProfile(Report):
    """What `opweave_cost.profile_run` gives. Printing shows the tables; ``in`` looks for words in them.

    Attributes:
        rows: every part of a run, in order.
        runs: seconds of each measured run of the program as it is, in which parts may overlap.
        devices: the program's devices, in order of priority.
        limits: of each, what the limit of its steps is; empty: nobody asked.
    """

    rows: list[RunRow]
    runs: tuple[float, ...]
    devices: tuple[str, ...]
    limits: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The median of ``runs``."""
        return median(self.runs)

    @property
    def operations(self) -> list[Total]:
        """A line for each operation, or combination that a device fuses, on each device, and for each kind of
        transfer; the slowest first."""
        return _totals(
            (f"{_what(row)} on {row.device}" if len(self.devices) > 1 else _what(row), row) for row in self.rows
        )

    def scopes(self, depth: int | None = None) -> list[Total]:
        """A line for each scope, ``"-"`` for steps outside of all and for transfers; the slowest first.

        Args:
            depth: scopes that are nested deeper count for the one around them; ``None``: all have lines of their own.
        """
        return _totals(("/".join(row.scope.split("/")[:depth]) or "-", row) for row in self.rows)

    def dicts(self) -> list[dict[str, Any]]:
        """``rows`` as dictionaries with the rates among the values, for JSON and data frames."""
        rates = ("bytes_per_second", "flops_per_second", "of_limit")
        return [asdict(row) | {name: getattr(row, name) for name in rates} for row in self.rows]

    @property
    def text(self) -> str:
        """The tables: by operation, by scope if there are any, and the slowest rows."""
        lines = [self.summary, *_table("operation", self.operations)]
        if any(row.scope for row in self.rows):
            lines += ["", *_table("scope", self.scopes())]
        slowest = sorted(self.rows, key=lambda row: -row.seconds)[:SLOWEST]
        lines += ["", *_table("slowest", [_single(row) for row in slowest])]
        if self.limits:
            lines += ["", f"limits ({ABOVE}):", *self.limits]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        parts = sum(row.seconds for row in self.rows)
        return (
            f"{human_time(self.seconds)} a run (median of {len(self.runs)}, least {human_time(min(self.runs))}) on "
            f"{', '.join(self.devices)}; its {len(self.rows)} parts one after another {human_time(parts)}"
        )

    def html(self) -> str:
        """One self-contained HTML page."""
        return render(
            Path(__file__).with_name("profile.html.j2"),
            summary=self.summary,
            limits=self.limits,
            above=ABOVE,
            tables=[
                ("operation", self.operations),
                *([("scope", self.scopes())] if any(r.scope for r in self.rows) else []),
            ],
            rows=[(row, _what(row)) for row in self.rows[:MOST_NODES]],
            hidden=max(len(self.rows) - MOST_NODES, 0),
            colours={device: COLOURS[i % len(COLOURS)] for i, device in enumerate(self.devices)},
        )


def _what(row: RunRow) -> str:
    return "+".join(row.ops) or row.kind


def _single(row: RunRow) -> Total:
    name = f"{row.name}: {_what(row)} {row.note or 'on ' + row.device}"
    return _total(name, [row])


def _totals(named: Iterable[tuple[str, RunRow]]) -> list[Total]:
    of: dict[str, list[RunRow]] = {}
    for name, row in named:
        of.setdefault(name, []).append(row)
    return sorted([_total(name, rows) for name, rows in of.items()], key=lambda total: -total.seconds)


def _total(name: str, rows: Sequence[RunRow]) -> Total:
    least = [row.least for row in rows if row.least is not None]
    return Total(
        name=name,
        seconds=sum(row.seconds for row in rows),
        share=sum(row.share for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        flops=sum(row.flops for row in rows),
        least=sum(least) if len(least) == len(rows) else None,
        count=len(rows),
    )


def _table(what: str, totals: Sequence[Total]) -> list[str]:
    width = max([len(total.name) for total in totals] + [len(what)], default=0)
    lines = [f"{what:<{width}}  count        time   share     bytes     GB/s  GFLOP/s  of limit"]
    for total in totals:
        flops = "" if not total.flops else f"{total.flops_per_second / 1e9:.3g}"
        line = (
            f"{total.name:<{width}}  {total.count:>5}  {human_time(total.seconds):>10}  {total.share:>6.1%}  "
            f"{human_bytes(total.nbytes):>8}  {total.bytes_per_second / 1e9:>7.3g}  {flops:>7}  {total.limit_text:>8}"
        )
        lines.append(line.rstrip())
    return lines
