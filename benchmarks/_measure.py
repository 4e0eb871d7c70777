"""What the benchmarks share: interleaved timing, the machine's description, targets, and the report.

A figure is the median of several samples. Contestants take turns sample by sample, in an order that rotates, so that a
machine that speeds up or slows down does it to all of them alike; ratios are ratios of those medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from opweave.collector import collector_paused

__all__ = ["Report", "Target", "interleaved", "machine", "median", "options", "parser", "seconds"]

PACKAGES = ("numpy", "opweave", "opweave-cpu", "torch", "onnxruntime", "xllamacpp")


def parser(description: str) -> argparse.ArgumentParser:
    """The command line of every benchmark: ``json`` and ``quick``, which `Report` reads; some add options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    made.add_argument("--quick", action="store_true", help="fewer samples, smaller sizes")
    return made


def options(description: str) -> argparse.Namespace:
    return parser(description).parse_args()


# --- timing ---------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], number: int = 1) -> float:
    """Seconds of one call, averaged over ``number`` calls in a row."""
    start = perf_counter()
    for _ in repeat(None, number):
        call()
    return (perf_counter() - start) / number


def interleaved(
    contestants: Mapping[str, Callable[[], object]], samples: int, sample_seconds: float = 2e-3, pause: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of one call of each contestant, ``samples`` times, in turns.

    Args:
        sample_seconds: a sample makes as many calls as take about this long.
        pause: seconds to wait before each sample, which is then preceded by a call that is not measured: threads of
            some libraries (OpenMP) go on spinning for milliseconds, and would slow down the contestant whose turn is
            next.
    """
    names = list(contestants)
    numbers = {}
    for name, call in contestants.items():
        call()
        once = min(seconds(call, 3) for _ in range(3))
        numbers[name] = max(1, round(sample_seconds / max(once, 1e-9)))
    result: dict[str, list[float]] = {name: [] for name in names}
    with collector_paused():
        for turn in range(samples):
            for k in range(len(names)):
                name = names[(turn + k) % len(names)]
                if pause:
                    sleep(pause)
                    contestants[name]()
                result[name].append(seconds(contestants[name], numbers[name]))
    return result


# --- the report -----------------------------------------------------------------------------------------------------


def machine() -> dict[str, str | int | float]:
    """The processor, the cores this process may use, and the versions of what is measured."""
    facts: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class Target(NamedTuple):
    """A figure with a limit that it must not exceed."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value <= self.limit


class Report:
    """Rows of figures and the targets among them, printed as tables or as one JSON document."""

    def __init__(self, benchmark: str, given: argparse.Namespace) -> None:
        self.benchmark = benchmark
        self.options = given
        self.rows: list[dict[str, Any]] = []
        self.targets: list[Target] = []
        self.machine = machine()
        self._note_load("load_before")

    def _note_load(self, when: str) -> None:
        """Figures from a machine with other work to do can be told by its load; ours alone is at most 1."""
        if hasattr(os, "getloadavg"):
            self.machine[when] = round(os.getloadavg()[0], 2)

    def row(self, **figures: Any) -> None:
        self.rows.append(figures)
        if not self.options.json:
            print("  " + "  ".join(f"{k} {_text(v)}" for k, v in figures.items()), file=sys.stderr, flush=True)

    def target(self, name: str, value: float, limit: float, unit: str) -> None:
        self.targets.append(Target(name, value, limit, unit))

    def finish(self, title: str) -> None:
        """Print everything. Figures decide no exit status."""
        self._note_load("load_after")
        if self.options.json:
            document = {
                "benchmark": self.benchmark,
                "quick": self.options.quick,
                "machine": self.machine,
                "rows": self.rows,
                "targets": [{**t._asdict(), "met": t.met} for t in self.targets],
            }
            print(json.dumps(document, indent=1))
            return
        from rich.console import Console
        from rich.table import Table

        # A pipe has no width of its own; 80 columns would cut the numbers off.
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print("  ".join(f"[bold]{k}[/] {v}" for k, v in self.machine.items()), highlight=False)
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        table = Table(title=title)
        for i, name in enumerate(columns):
            table.add_column(name.replace("_", " "), justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*[_text(row.get(name, "")) for name in columns])
        console.print(table)
        if self.targets:
            table = Table(title="Targets")
            for name in ("target", "measured", "limit", ""):
                table.add_column(name, justify="left" if name in ("target", "") else "right")
            for t in self.targets:
                mark = "[green]met[/]" if t.met else "[red]missed[/]"
                table.add_row(t.name, f"{_text(t.value)} {t.unit}", f"{_text(t.limit)} {t.unit}", mark)
            console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
