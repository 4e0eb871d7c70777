"""Pages of runs of the suite, each one self-contained HTML file: of one run, and of several side by side.

They are made of what ``opweave conformance --json`` prints, so that reports of other machines can be shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from opweave.errors import FormatError
from opweave.graph.dtypes import DTYPES
from opweave.scheduler.explain.page import render

__all__ = ["comparison_page", "read_report", "report_page"]

Document = Mapping[str, Any]

MOST_FAILURES: Final = 200
MOST_CHANGES: Final = 200

KINDS: Final = {
    "passed": "right", "failed": "wrong", "xfailed": "wrong", "refused": "refused", "unsupported": "refused",
}  # fmt: skip
"""Status of a case -> how the matrix shows it."""

NEEDED: Final = ("name", "devices", "levels", "checks", "cases", "environment", "totals", "problems", "next", "results")


class Outcome(NamedTuple):
    """The cases of an operation in a type: how many were right, refused, wrong, and not reached in a sample; and the
    largest error of a right one, ``None`` where all are exact."""

    right: int = 0
    refused: int = 0
    wrong: int = 0
    unreached: int = 0
    error: float | None = None

    @property
    def kind(self) -> str:
        """The worst that is known of it, as the class of its cell."""
        if self.wrong:
            return "wrong"
        if self.right:
            return "partly" if self.refused else "right"
        return "refused" if self.refused else "unreached"

    def __str__(self) -> str:
        counts = zip(("right", "refused", "wrong", "not reached"), self, strict=False)
        text = ", ".join(f"{count} {what}" for what, count in counts if count)
        return f"{text}; largest error {self.error:.2g}" if self.error is not None else text


def read_report(path: Path) -> Document:
    """What ``opweave conformance --json`` printed into a file.

    Raises:
        FormatError: it is no such document, or cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise FormatError(f"{path} is no report: {error}") from None
    missing = [name for name in NEEDED if not isinstance(document, dict) or name not in document]
    if missing:
        raise FormatError(
            f"{path} is no report of opweave conformance --json: it lacks {', '.join(missing)}; write it again"
        )
    return document  # type: ignore[no-any-return]


def outcomes(document: Document) -> dict[str, dict[str, Outcome]]:
    """The matrix of a run: operation -> type -> what came out."""
    counts: Counter[tuple[str, str, str]] = Counter()
    errors: dict[tuple[str, str], float] = {}
    for result in document["results"]:
        if result["op"] and result["status"] in KINDS:
            place = result["op"], result["dtype"]
            counts[*place, KINDS[result["status"]]] += 1
            if result["status"] == "passed" and result["error"]:
                errors[place] = max(errors.get(place, 0.0), result["error"])
    found: dict[str, dict[str, Outcome]] = {}
    for op, planned in document["cases"].items():
        for dtype in sorted(planned, key=list(DTYPES).index):
            right, refused, wrong = (counts[op, dtype, kind] for kind in ("right", "refused", "wrong"))
            left = planned[dtype] - right - refused - wrong
            found.setdefault(op, {})[dtype] = Outcome(right, refused, wrong, left, errors.get((op, dtype)))
    return found


def _columns(rows: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    return [dtype for dtype in DTYPES if any(dtype in row for row in rows.values())]


def _levels(document: Document) -> list[tuple[str, str, Counter[str]]]:
    """Number and name of each level, and how many of its checks had each status."""
    counts: dict[str, Counter[str]] = {level: Counter() for level in document["levels"]}
    for result in document["results"]:
        counts[str(result["level"])][result["status"]] += 1
    return [(level, name, counts[level]) for level, name in document["levels"].items()]


def _verdict(document: Document) -> str:
    counts = document["totals"]
    done = len(document["results"])
    part = f"{done:,} of {document['checks']:,} checks" if done < document["checks"] else f"all {done:,} checks"
    failed = counts.get("failed", 0)
    return f"{part}: {failed:,} failed" if failed else f"{part}: none failed"


def report_page(document: Document) -> str:
    """The page of one run: matrix of operations and types, largest errors, levels, failures, what it ran on."""
    rows = outcomes(document)
    errors = [(op, dtype, cell.error) for op, row in rows.items() for dtype, cell in row.items() if cell.error]
    known = {(r["op"], r["dtype"], r["error"]): r for r in document["results"] if r["status"] == "passed"}
    largest = [(known[key], key[2]) for key in sorted(errors, key=lambda key: -(key[2] or 0))]
    failed = [r for r in document["results"] if r["status"] in ("failed", "xfailed")]
    return render(
        Path(__file__).with_name("report.html.j2"),
        document=document, verdict=_verdict(document), rows=rows, columns=_columns(rows), levels=_levels(document),
        errors=largest[:40], failures=failed[:MOST_FAILURES], hidden=max(len(failed) - MOST_FAILURES, 0),
    )  # fmt: skip


def comparison_page(documents: Sequence[Document]) -> str:
    """The page of several runs: what each ran on, its levels, the operations side by side, and the checks that have
    another outcome in the last run than in the first."""
    found = [outcomes(document) for document in documents]
    ops = sorted({op for rows in found for op in rows})
    first, last = ({r["name"].split("/")[-1]: r for r in d["results"]} for d in (documents[0], documents[-1]))
    changes = [
        (name, first[name]["status"], result["status"], result["reason"])
        for name, result in last.items()
        if name in first and first[name]["status"] != result["status"]
    ]
    changes.sort(key=lambda change: (change[2] != "failed", change[1] != "failed", change[0]))
    return render(
        Path(__file__).with_name("comparison.html.j2"),
        documents=documents, verdicts=[_verdict(d) for d in documents], ops=ops, found=found,
        levels=[{level: counts for level, _, counts in _levels(d)} for d in documents],
        names={level: name for d in documents for level, name in d["levels"].items()},
        changes=changes[:MOST_CHANGES], hidden=max(len(changes) - MOST_CHANGES, 0),
    )  # fmt: skip
