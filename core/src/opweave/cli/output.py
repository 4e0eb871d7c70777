"""Output for people (`print_rows`) and for programs (`print_json`)."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.registry.discovery import core_version

if TYPE_CHECKING:  # processes that ask plugins print nothing, and are started often
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "Row", "accept_any_text", "plain", "print_json", "print_rows", "progress", "quiet_stdout", "to_json",
    "unusable_details",
]  # fmt: skip

_GAP = 2  # between columns

_IN_ASCII: Final = {"×": "x", "−": "-", "–": "-", "…": "...", "→": "->", "µ": "u"}

_LONGEST: Final = 1024
"""Bits of the longest integer that is written with all its digits."""


class Row(NamedTuple):
    """A row of a table, and further lines below it, each a label (or ``""``) and a text, which is never cut."""

    cells: Sequence[Text]
    details: Sequence[tuple[str, Text]]


def unusable_details(device: Mapping[str, str]) -> list[tuple[str, Text]]:
    """The lines about a device that does not work, an `UnusableDevice` as a dict: name, cause, remedy."""
    from rich.text import Text

    about = f"{device['name']}: {device['description']}" if device["description"] else device["name"]
    lines = [("unusable", Text(about)), ("cause", Text(device["error"], "yellow"))]
    return [*lines, ("remedy", Text(device["remedy"]))] if device["remedy"] else lines


def plain(text: str) -> str:
    """Text without control sequences: characters that are neither printable nor line breaks are escaped."""
    return "".join(
        c if c.isprintable() or c in "\n\t\xa0" else c.encode("unicode_escape").decode("ascii") for c in text
    )


def accept_any_text() -> None:
    """From here on, characters that the encoding of a terminal or file lacks are written as similar ones of ASCII, or
    escaped, in place of an error."""
    codecs.register_error("opweave", _similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="opweave")


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    shown = (_IN_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in found)
    return "".join(shown), error.end


def _shown(text: Text) -> Text:
    from rich.text import Text

    return Text(plain(text.plain), text.style)


def print_rows(header: Sequence[str], rows: Sequence[Row], *, indent: int, footer: str = "") -> None:
    """Print a table, details ``indent`` columns from the left. Nothing is cut: the last column and details wrap."""
    from rich.text import Text

    rows = [
        Row([_shown(cell) for cell in row.cells], [(plain(label), _shown(text)) for label, text in row.details])
        for row in rows
    ]
    console, wide = _console(), _console()
    titles = [Text(title, "bold") for title in header]
    widths = [max(cells[i].cell_len for cells in (titles, *(row.cells for row in rows))) for i in range(len(header))]
    # On a narrower terminal, wrapping by the terminal is better than cutting names off.
    wide.width = max(console.width, sum(widths[:-1]) + _GAP * len(widths) + min(widths[-1], 16))
    label_width = max((len(label) for row in rows for label, _ in row.details), default=0)
    wide.print(_line(titles, widths))
    for row in rows:
        wide.print(_line(row.cells, widths))
        for label, text in row.details:
            labelled = [Text(label, "dim"), text] if label else [text]
            console.print(_line([Text(), *labelled], [indent - _GAP, label_width]))
    if footer:
        console.print()
        console.print(Text(plain(footer), "dim"))


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Table:
    from rich.table import Table

    line = Table.grid(padding=(0, _GAP, 0, 0))
    for width in widths[: len(cells) - 1]:
        line.add_column(width=width, no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(*cells)
    return line


def progress(*columns: ProgressColumn, quiet: bool) -> Progress:
    """A progress bar on stderr that disappears when it is done, with ``columns`` behind it; only on terminals."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
        redirect_stdout=False,
    )


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document, the version of opweave first. Values that JSON cannot represent are written as
    strings."""
    sys.stdout.write(json.dumps(to_json({"opweave": core_version(), **document}), indent=2) + "\n")


def to_json(value: object, depth: int = 0) -> Any:
    """``value`` as JSON can represent it: other objects, NaN, infinities and too deep nesting become strings."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        # Python refuses to write the digits of very long ones.
        return value if value.bit_length() <= _LONGEST else f"an integer of {value.bit_length():,} bits"
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if depth < 16:
        if isinstance(value, Mapping):
            return {_text(key): to_json(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [to_json(item, depth + 1) for item in value]
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a plugin's own object
        return f"<{type(value).__name__}: {type(error).__name__}>"


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """A ``with`` block in which everything printed to standard output, from C too, goes to standard error, so that
    plugins cannot disturb a command's output."""
    kept = None
    with suppress(OSError, ValueError, AttributeError):  # a stream of its own, or none
        if sys.stdout.fileno() == 1:
            sys.stdout.flush()
            kept = os.dup(1)
            os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
