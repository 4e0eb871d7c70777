"""Summaries of a run: the matrix, the failures, what to implement next; and all of it as JSON, with what it ran on."""

from __future__ import annotations

import math
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.graph.dtypes import DTYPES
from opweave.runtime.host.processor import cpu_name
from opweave_conformance.decisions import Side, merge
from opweave_conformance.levels import LEVELS

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave_conformance.result import Result
    from opweave_conformance.suite import Suite

__all__ = [
    "Cell", "Refusal", "as_json", "environment", "failures", "matrix", "one_sided", "paths", "refusals", "totals",
]  # fmt: skip


class Cell(NamedTuple):
    """How many cases of an operation and type passed, were refused and failed. Known failures count as refused."""

    passed: int = 0
    refused: int = 0
    failed: int = 0


class Refusal(NamedTuple):
    """An operation with refused cases that ``conformance.toml`` does not list. Those that are refused for the layout of
    operands alone, which the core then packs, do not count.

    Attributes:
        refused, cases: the number of refused cases, and of all cases.
        reasons: each reason with the number of cases, the most frequent first; types that kernels do not take are one.
    """

    op: str
    refused: int
    cases: int
    reasons: Sequence[tuple[str, int]]

    @property
    def reason(self) -> str:
        """The most frequent reasons; each with its number of cases, where there are several."""
        if len(self.reasons) == 1:
            return self.reasons[0][0]
        shown = self.reasons[:3]
        others = self.refused - sum(times for _, times in shown)
        return "; ".join(f"{times}: {why}" for why, times in (*shown, *[("others", others)] * bool(others)))


_OF_LAYOUT: Final = re.compile(r"(the output|source \d+) is not dense|the rows of (the output|source \d+) have gaps")
_OF_TYPE: Final = re.compile(r" is \w+, not ")


def totals(results: Iterable[Result]) -> Counter[str]:
    """How many results there are of each status."""
    return Counter(o.status for o in results)


def failures(results: Iterable[Result]) -> list[Result]:
    return [o for o in results if o.status == "failed"]


def matrix(results: Iterable[Result]) -> dict[str, dict[str, Cell]]:
    """Cells by operation and type, types in the order of `DTYPES`."""
    rows: dict[str, dict[str, Cell]] = {}
    for o in results:
        if not o.op:
            continue
        row = rows.setdefault(o.op, {})
        old = row.get(o.dtype, Cell())
        kind = o.status if o.status in ("passed", "failed") else "refused"
        row[o.dtype] = old._replace(**{kind: getattr(old, kind) + 1})
    order = {name: i for i, name in enumerate(DTYPES)}
    return {op: dict(sorted(row.items(), key=lambda cell: order[cell[0]])) for op, row in rows.items()}


def refusals(results: Iterable[Result]) -> list[Refusal]:
    """What to implement next: first the operations that are refused entirely, then those with most refused cases."""
    cases: Counter[str] = Counter()
    reasons: dict[str, Counter[str]] = {}
    for o in results:
        if o.op:
            cases[o.op] += 1
            reason = o.reason.partition("\n")[0]
            if o.status == "refused" and not _OF_LAYOUT.fullmatch(reason):
                reasons.setdefault(o.op, Counter())[_OF_TYPE.sub(" is not ", reason)] += 1
    found = [Refusal(op, why.total(), cases[op], why.most_common()) for op, why in reasons.items()]
    return sorted(found, key=lambda r: (r.refused < r.cases, -r.refused, r.op))


Paths = dict[str, dict[str, dict[Side, int]]]
"""By the name of a limit and of an operation that reads it: how often its kernels took each side of the limit."""


def paths(results: Iterable[Result]) -> dict[str, Paths]:
    """By device: which paths of which kernels ran."""
    found: dict[str, Paths] = {}
    for o in results:
        if o.paths:
            limit = o.id.removeprefix("path-").rpartition("-")[0]
            merge(found.setdefault(o.device, {}).setdefault(limit, {}), o.paths)
    return found


def one_sided(found: Paths) -> dict[str, Side]:
    """The limits that decided, always for the same side, with the one that no kernel took."""
    result: dict[str, Side] = {}
    for limit, ops in found.items():
        taken = {side for sides in ops.values() for side, count in sides.items() if count}
        if len(taken) == 1:
            result[limit] = "below" if "above" in taken else "above"
    return result


def as_json(suite: Suite, version: str | None, filtered: bool | None = None) -> dict[str, Any]:
    """The run as one JSON document."""
    problems = suite.problems(filtered)
    counts = totals(suite.results)
    return {
        "opweave": version,
        "name": suite.name,
        "backend": suite.backend.name,
        "distribution": suite.record.distribution or None,
        "version": suite.record.version or None,
        "devices": [device.name for device in suite.devices],
        "levels": {str(level): LEVELS[level] for level in suite.levels},
        "seed": suite.seed,
        "checks": len(suite.items),
        "cases": _cases(suite),
        "environment": environment(suite.devices),
        "ok": not counts["failed"] and not problems,
        "totals": dict(counts),
        "problems": problems,
        "next": [r._asdict() | {"reason": r.reason} for r in refusals(suite.results)],
        "paths": paths(suite.results),
        "results": [_result(o) for o in suite.results],
    }


def _result(o: Result) -> dict[str, Any]:
    row = o._asdict()
    del row["paths"]  # they are told for each limit
    for name in ("nmse", "error"):
        # JSON knows no NaN and no infinity.
        row[name] = row[name] if math.isfinite(row[name]) else None
    return row


def _cases(suite: Suite) -> dict[str, dict[str, int]]:
    """How many cases of each operation and type the run was to perform, whether or not it came to all of them."""
    counts = Counter((item.check.op, item.check.dtype) for item in suite.items if item.check.op)
    found: dict[str, dict[str, int]] = {}
    for (op, dtype), count in counts.items():
        found.setdefault(op, {})[dtype] = count
    return dict(sorted(found.items()))


def environment(devices: Sequence[Device]) -> dict[str, Any]:
    """What the devices, their drivers and this machine are, and the command that was called."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["opweave", *sys.argv[1:]]),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": cpu_name(),
        "devices": [
            {
                "name": device.name, "description": device.description, "kind": device.kind.value,
                "hardware_id": device.hardware_id, "features": _features(device),
            }
            for device in devices
        ],
    }  # fmt: skip


def _features(device: Device) -> dict[str, str]:
    try:
        return {
            str(name): ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            for name, value in device.features().items()
        }
    except Exception as error:  # a driver that fails here is no reason to lose the report
        return {"features": str(error)}
