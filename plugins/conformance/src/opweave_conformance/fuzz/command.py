"""``opweave fuzz``: random graphs on any devices, compared with the references."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.text import Text

from opweave import registry
from opweave.cli.options import Json, writable_folder
from opweave.cli.output import plain, print_json, progress, quiet_stdout
from opweave.cli.probe import leave_out_deadly
from opweave_conformance.wording import number_of
from opweave_conformance.wrong_call import wrong_call

if TYPE_CHECKING:
    from opweave_conformance.fuzz.search import Finding, Search

__all__ = ["fuzz"]

EVERY: Final = 10.0
"""Seconds between lines of progress where standard error is no terminal."""


@wrong_call()
def fuzz(
    devices: Annotated[
        list[str] | None, typer.Argument(help="Devices; default: all but host.", metavar="DEVICES")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="N", min=0, help="How long; shrinking what fails comes on top.")
    ] = 60,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Which sequence of graphs.")] = 0,
    case: Annotated[
        int | None, typer.Option("--case", metavar="N", min=0, help="Only this graph of the sequence.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Timeout of one graph.")
    ] = 120,
    largest: Annotated[
        int, typer.Option("--largest", metavar="N", min=1, help="Elements of the largest operands, about.")
    ] = 1_000_003,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Write a script for each failure here.", callback=writable_folder),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try random graphs on devices and mixes of them against the references; failures are shrunk to scripts."""
    names = devices or []
    leave_out_deadly(names)
    # Imported here because making the cases takes time.
    from opweave_conformance.fuzz.search import Search, search

    start = perf_counter()
    with quiet_stdout():
        registry.REGISTRY.make_devices(names)
        here = [d for d in registry.devices() if d.name != "host"]
        chosen = [registry.device(n) for n in names] or here or [registry.device("host")]
        found = Search(chosen, seed, out=out, seconds=timeout, largest=largest)
        try:
            if case is not None:
                _note_finding(found.try_case(case), quiet=as_json)
            else:
                _search(search, found, seconds, quiet=as_json)
        finally:
            found.close()
    if as_json:
        print_json(_document(found, perf_counter() - start))
    else:
        _print(found, perf_counter() - start)
    if found.findings:
        raise typer.Exit(1)


def _search(search: Any, found: Search, seconds: float, *, quiet: bool) -> None:
    shown = start = perf_counter()
    with progress(TimeElapsedColumn(), quiet=quiet) as bar:
        task = bar.add_task("fuzz", total=seconds)

        def show(finding: Finding | None) -> None:
            nonlocal shown
            now = perf_counter()
            what = f"{number_of(found.cases, 'case')}, {len(found.findings)} failed"
            bar.update(task, completed=min(now - start, seconds), description=what)
            _note_finding(finding, quiet=quiet)
            if bar.disable and not quiet and now - shown >= EVERY:
                shown = now
                _note(f"fuzz: {what}, {now - start:.0f} s")

        search(found, seconds=seconds, show=show)


def _note(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)


def _note_finding(finding: Finding | None, *, quiet: bool) -> None:
    if finding is not None and not quiet:
        _note(f"failed: case {finding.number}: {finding.kind}: {finding.reason.partition(chr(10))[0]}")


def _document(found: Search, seconds: float) -> dict[str, Any]:
    reached: dict[str, dict[str, int]] = {}
    for (op, device), count in sorted(found.reached.items()):
        reached.setdefault(op, {})[device] = count
    return {
        "seed": found.seed, "seconds": round(seconds, 1), "devices": [d.name for d in found.devices],
        "cases": found.cases, "nodes": found.nodes, "refused": dict(found.refused), "drawn": dict(found.drawn),
        "reached": reached, "never_drawn": found.never_drawn(), "findings": [f._asdict() for f in found.findings],
    }  # fmt: skip


def _print(found: Search, seconds: float) -> None:
    console = Console(markup=False, highlight=False, emoji=False)
    for finding in found.findings:
        console.print(Text(plain(f"case {finding.number}: {finding.kind}: {finding.reason}"), "red"))
        if finding.path:
            console.print(Text(plain(f"    python {finding.path}"), "dim"), soft_wrap=True)
        # Never wrapped: it is there to be copied.
        console.print(Text(plain(finding.script)), soft_wrap=True)
    operations: Counter[str] = Counter(device for _, device in found.reached)
    reached = ", ".join(f"{device} {count}" for device, count in sorted(operations.items()))
    console.print(Text(f"operations reached: {reached or 'none'}"))
    never = found.never_drawn()
    if never:
        console.print(Text(f"never drawn: {', '.join(never)}"))
    if found.refused:
        console.print(Text(f"refused: {sum(found.refused.values())}, mostly: {found.refused.most_common(1)[0][0]}"))
    failed = Text(f"{len(found.findings)} failed", "bold red") if found.findings else Text("none failed", "green")
    line = Text(f"{number_of(found.cases, 'case')} with {number_of(found.nodes, 'node')}, ").append(failed)
    console.print(line, Text(f"in {seconds:.1f} s, seed {found.seed}"))
