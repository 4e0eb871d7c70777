"""``opweave conformance``: tests a backend and prints the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from opweave import registry
from opweave.cli.options import Html, Json
from opweave.cli.output import plain, print_json, progress, quiet_stdout
from opweave.cli.probe import leave_out_deadly
from opweave.errors import UnknownNameError
from opweave.packages import pip_install
from opweave.registry.discovery import core_version
from opweave_conformance.wrong_call import wrong_call

if TYPE_CHECKING:
    from opweave.registry import FileFormat, Registry
    from opweave_conformance.report import Cell
    from opweave_conformance.suite import Suite

__all__ = ["conformance"]

SHOWN_FAILURES = 50

EVERY: Final = 30.0
"""Seconds between lines of progress where standard error is no terminal, as in the log of a long run."""


@wrong_call()
def conformance(
    names: Annotated[
        list[str],
        typer.Argument(help="A backend (all its devices), or a device; with --compare files.", metavar="NAME"),
    ],
    level: Annotated[
        list[int] | None,
        typer.Option(
            "--level",
            metavar="N",
            help="Only this level (0 hygiene, 1 memory, 2 operations, 3 asynchrony, 4 beside a second device, "
            "5 faults, 6 gradients); repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Only checks whose id matches, e.g. 'add-f32-*'; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of all random values.")] = 0,
    as_json: Json = False,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Known refusals and failures; default: conformance.toml in the current directory.",
        ),
    ] = None,
    beside: Annotated[
        str, typer.Option("--beside", metavar="DEVICE", help="A further second device for level 4.")
    ] = "",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Timeout of a check from level 3 on.")
    ] = 60,
    show_paths: Annotated[
        bool, typer.Option("--paths", help="Which paths of its kernels ran: both sides of each limit, by operation.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="SECONDS",
            min=0.001,
            help="Only as many checks as this time is enough for: a sample, drawn by the seed, in which each operation "
            "comes once in each type before any comes twice.",
        ),
    ] = None,
    html: Html = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--gaps",
            metavar="MODEL",
            exists=True,
            help="Test nothing: which steps of a model (ONNX, .pt2, GGUF, folder) "
            "the device refuses, what that costs, and what to declare.",
        ),
    ] = None,
    length: Annotated[
        int,
        typer.Option("--length", metavar="N", min=1, help="With --gaps: tokens, or length of open axes."),
    ] = 16,
    comparing: Annotated[
        bool, typer.Option("--compare", help="Test nothing: a page of several results that --json printed into files.")
    ] = False,
) -> None:
    """Test a backend: registration, memory, every kernel against the reference, streams, faults, and gradients."""
    if comparing:
        _compare(names, html)
        return
    if len(names) > 1:
        raise typer.BadParameter(f"one backend at a time, not {' '.join(names)}")
    name = names[0]
    if model is not None:
        _show_gaps(name, model, length, beside, as_json, html)
        return
    leave_out_deadly([name, beside] if beside else [name])
    # Imported here because making the cases takes time.
    from opweave_conformance.expectations import Expectations
    from opweave_conformance.report import as_json as document
    from opweave_conformance.report import totals
    from opweave_conformance.suite import Suite
    from opweave_conformance.watch import leave

    start = perf_counter()
    expectations = Expectations.read(config)
    with quiet_stdout():
        registry.REGISTRY.make_devices((name, beside))
        suite = Suite(
            name, levels=level or (), only=only or (), seed=seed, expectations=expectations, config=config or "",
            beside=beside, seconds=timeout, sample=seconds is not None,
        )  # fmt: skip
        _perform(suite, quiet=as_json, limit=seconds)
    if html is not None:
        from opweave_conformance.page import report_page

        html.write_text(report_page(document(suite, core_version())), encoding="utf-8")
    if as_json:
        print_json(document(suite, core_version()))
    else:
        _print(suite, perf_counter() - start, show_paths=show_paths)
    if suite.hung:
        leave(1)  # the thread that hangs might keep the process alive
    if totals(suite.results)["failed"] or suite.problems():
        raise typer.Exit(1)


def _show_gaps(name: str, model: Path, length: int, beside: str, as_json: bool, html: Path | None) -> None:
    """What a device lacks for a model, which is placed on it before a second device and the host."""
    from opweave_conformance.bench_command import second_device
    from opweave_conformance.gaps import gaps
    from opweave_conformance.report import environment

    if model.is_dir() and not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} is no folder of a model: it has no config.json")
    with quiet_stdout():
        known = registry.REGISTRY
        known.make_devices((name, beside))
        fmt = _format(known, model)
        device = known.device(name)
        second = known.device(beside) if beside else second_device(device)
        others = list(dict.fromkeys(d for d in (second, known.device("host")) if d is not None and d is not device))
        assert fmt.plan is not None
        with fmt.plan(model, [device, *others], length) as planned:
            found = gaps(device, planned, model.name)
    about = environment([device, *others])
    if html is not None:
        html.write_text(found.html(**about), encoding="utf-8")
    if as_json:
        print_json({"device": found.device, "model": str(model), "taken": found.taken, "steps": found.steps,
                    "environment": about, "rows": found.dicts()})  # fmt: skip
    else:
        print(plain(str(found)))


READERS: Final = {
    ".gguf": "opweave-models",
    ".json": "opweave-models",
    ".onnx": "opweave-onnx",
    ".pt2": "opweave-torch",
}
"""Which of this project's packages, which may not be installed, read models of a kind."""


def _format(known: Registry, model: Path) -> FileFormat:
    """The format of a model. Raises `UnknownNameError`, which names the package that reads it."""
    try:
        return known.model_format(model)
    except UnknownNameError as error:
        package = READERS.get(".json" if model.is_dir() else model.suffix)
        if package is None:
            raise
        hint = f"Models of it need a plugin: {pip_install(package)}"
        raise UnknownNameError(error.what, error.name, error.known, hint) from None


def _compare(files: Sequence[str], html: Path | None) -> None:
    """Write a page of the results in several files. Raises `FormatError` where one has none."""
    from opweave_conformance.page import comparison_page, read_report

    if html is None or len(files) < 2:
        raise typer.BadParameter("--compare takes two files or more, and --html FILE for the page")
    html.write_text(comparison_page([read_report(Path(file)) for file in files]), encoding="utf-8")


def _perform(suite: Suite, *, quiet: bool, limit: float | None = None) -> None:
    """Perform all checks, or as many as begin within ``limit`` seconds. Progress goes to standard error: a bar on
    terminals, else lines, and each failure at once."""
    start = shown = perf_counter()
    with progress(MofNCompleteColumn(), TimeRemainingColumn(), quiet=quiet) as bar:
        total, lines, failed = len(suite.items), bar.disable and not quiet, 0
        task = bar.add_task(suite.name, total=total)
        for done, item in enumerate(suite.items, 1):
            if limit is not None and perf_counter() - start >= limit:
                break
            result = suite.perform(item)
            failed += result.status == "failed"
            bar.update(task, advance=1, description=f"{suite.name}: {failed} failed" if failed else suite.name)
            now = perf_counter()
            if lines and result.status == "failed":
                _note(f"failed: {result.name}: {result.reason.partition(chr(10))[0]}")
            if lines and now - shown >= EVERY and done < total:
                shown = now
                seconds = f"{now - start:.0f} s"
                _note(f"{suite.name}: {done:,} of {total:,} checks, {failed:,} failed, {seconds}, at {item.name}")


def _note(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)


# --- printing -------------------------------------------------------------------------------------------------------


def _print(suite: Suite, seconds: float, *, show_paths: bool) -> None:
    from opweave_conformance.levels import LEVELS
    from opweave_conformance.report import failures, matrix, refusals, totals

    console = Console(markup=False, highlight=False, emoji=False)
    devices = ", ".join(f"{d.name} ({d.description})" if d.description else d.name for d in suite.devices)
    console.print(Text(plain(f"{suite.name}: {devices}")))
    for level in suite.levels:
        counts = totals(o for o in suite.results if o.level == level)
        if counts or not suite.filtered:
            console.print(_counted(f"level {level}, {LEVELS[level]}: ", dict(counts)))
    cells = matrix(suite.results)
    if cells:
        console.print()
        _print_matrix(console, cells)
    _print_next(console, refusals(suite.results))
    if show_paths:
        _print_paths(console, suite)
    failed = failures(suite.results)
    if failed:
        console.print()
        console.print(Text("Failures", "bold"))
    for o in failed[:SHOWN_FAILURES]:
        console.print(Text(o.name, "red"))
        for line in o.reason.splitlines():
            console.print(Text(f"    {line}"))
        # Never wrapped: it is there to be copied.
        console.print(Text(f"    {o.repeat}", "dim"), soft_wrap=True)
    if len(failed) > SHOWN_FAILURES:
        console.print(Text(f"... and {len(failed) - SHOWN_FAILURES} more; --only PATTERN or --json shows them", "red"))
    console.print()
    for problem in suite.problems():
        console.print(Text(problem, "red"))
    of = f", {len(suite.results):,} of {len(suite.items):,} checks" if suite.sample else ""
    console.print(_counted("", dict(totals(suite.results))), Text(f"in {seconds:.1f} s, seed {suite.seed}{of}"))


def _print_paths(console: Console, suite: Suite) -> None:
    from opweave_conformance.report import paths

    for device, limits in paths(suite.results).items():
        table = Table("limit", "operation", "below", "above", title=f"Paths of the kernels of {device}", box=None)
        for limit, ops in limits.items():
            for op, sides in ops.items():
                # Neither side: the kernel computes with the limit, or its source in another language reads it.
                counts = [str(sides.get("below", 0)), str(sides.get("above", 0))] if sides else ["set", "set"]
                table.add_row(limit, op, *counts)
        console.print()
        console.print(table)


_COLOURS = {"passed": "green", "failed": "bold red", "xfailed": "yellow"}


def _counted(head: str, counts: dict[str, int]) -> Text:
    text = Text(head)
    order = ("passed", "refused", "unsupported", "skipped", "xfailed", "failed")
    parts = [(f"{counts[status]} {status}", _COLOURS.get(status, "")) for status in order if counts.get(status)]
    for i, (part, colour) in enumerate(parts or [("nothing was run", "bold red")]):
        text.append(", " if i else "").append(part, colour)
    return text


def _print_matrix(console: Console, rows: dict[str, dict[str, Cell]]) -> None:
    """Print operations by dtypes, in several tables if the terminal is too narrow for one."""
    from opweave.graph.dtypes import DTYPES

    console.print(Text("Cases by operation and type: passed, r refused, F failed", "bold"))
    columns = [name for name in DTYPES if any(name in row for row in rows.values())]
    texts = {op: {t: _cell(row[t]) for t in columns if t in row} for op, row in rows.items()}
    widths = {t: max(len(t), *(row[t].cell_len for row in texts.values() if t in row)) for t in columns}
    left = max(map(len, rows))
    while columns:
        room = console.width - left
        shown: list[str] = []
        while columns and (not shown or room >= widths[columns[0]] + 2):
            room -= widths[columns[0]] + 2
            shown.append(columns.pop(0))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("", no_wrap=True)
        for t in shown:
            table.add_column(t, no_wrap=True, justify="right")
        for op, row in texts.items():
            if any(t in row for t in shown):
                table.add_row(Text(op), *[row.get(t, Text("")) for t in shown])
        console.print(table)


def _cell(cell: Cell) -> Text:
    text = Text()
    for n, suffix, colour in ((cell.passed, "", "green"), (cell.refused, "r", "dim"), (cell.failed, "F", "bold red")):
        if n:
            text.append(" " if text else "").append(f"{n}{suffix}", colour)
    return text


def _print_next(console: Console, found: Sequence[object]) -> None:
    from opweave_conformance.report import Refusal

    if not found:
        return
    console.print()
    console.print(Text("Refused: what to write next", "bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for refusal in found:
        assert isinstance(refusal, Refusal)
        count = "all" if refusal.refused == refusal.cases else f"{refusal.refused} of {refusal.cases}"
        table.add_row(Text(refusal.op), Text(count), Text(refusal.reason, "dim"))
    console.print(table)
