"""Writes the tables of ``docs/performance.md`` from the results of benchmarks.

Results are made by ``python benchmarks/dispatch.py --json > dispatch.json`` and so on, and written by
``python docs/generate_performance.py *.json``. A table lies between ``<!-- figures: dispatch -->`` and
``<!-- end -->``; tables of benchmarks that are not given stay.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).with_name("performance.md")

BLOCK: Final = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def text(value: Any) -> str:
    """A cell: three significant digits, and all digits of whole numbers."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]
    lines = [
        "| " + " | ".join(name.replace("_", " ") for name in columns) + " |",
        "|" + "|".join("---:" if number else "---" for number in numeric) + "|",
    ]
    lines += ["| " + " | ".join(text(row.get(name, "")) for name in columns) + " |" for row in rows]
    return lines


def targets(found: Sequence[Mapping[str, Any]]) -> str:
    """How many targets are met, and which are not."""
    missed = [
        f"{t['name']}: {text(t['value'])} of {text(t['limit'])} {t['unit']}".rstrip() for t in found if not t["met"]
    ]
    said = f"{len(found) - len(missed)} of {len(found)} targets are met"
    return f"{said}. Missed: {'; '.join(missed)}." if missed else f"{said}."


def block(result: Mapping[str, Any]) -> str:
    """A table with the machine above it and the targets below."""
    machine = result["machine"]
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    quick = ", `--quick`" if result["quick"] else ""
    load = f"load {machine.get('load_before', '?')} before, {machine.get('load_after', '?')} after"
    lines = [f"{machine['cpu']}, {cores}; {load}{quick}.", "", *table(result["rows"]), ""]
    if result["targets"]:
        lines += [targets(result["targets"]), ""]
    return "\n".join(["", *lines])


def written(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the tables of those benchmarks replaced.

    Raises:
        SystemExit: the page has no place for a benchmark.
    """
    unknown = results.keys() - {name for _, name, _ in BLOCK.findall(page)}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise SystemExit(f"{PAGE} has no place for {names}: add <!-- figures: NAME --> and <!-- end -->")

    def replaced(found: re.Match[str]) -> str:
        result = results.get(found[2])
        return found[0] if result is None else found[1] + block(result) + found[3]

    return BLOCK.sub(replaced, page)


def main() -> None:
    results = {}
    for name in sys.argv[1:]:
        document = json.loads(Path(name).read_text(encoding="utf-8"))
        results[document["benchmark"]] = document
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
