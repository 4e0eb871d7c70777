"""``opweave doctor``: what is wrong or slow on this machine, and how to fix it."""

from __future__ import annotations

from typing import Any, Final

from rich.text import Text

from opweave import registry
from opweave.cli import probe
from opweave.cli.output import Row, print_json, print_rows
from opweave.tools.doctor import diagnose

__all__ = ["collect", "show_doctor"]

_COLOURS: Final = {"ok": "green", "slow": "yellow", "wrong": "bold red"}


def collect() -> dict[str, Any]:
    """The diagnoses of the core and of all plugins, as a document."""
    return {"diagnoses": [{"by": plugin, **found._asdict()} for plugin, found in diagnose(registry.REGISTRY)]}


def show_doctor(*, as_json: bool, isolated: bool, seconds: float) -> list[str]:
    """Print all diagnoses; returns the status of each."""
    document = probe.ask("doctor", isolated=isolated, seconds=seconds)
    found: list[dict[str, Any]] = document["diagnoses"]
    if as_json:
        print_json(document)
    else:
        print_rows(
            ["", "plugin", "checked", "finding"],
            [_as_row(diagnosis) for diagnosis in found],
            indent=4,
            footer=_sum(found),
        )
    return [diagnosis["status"] for diagnosis in found]


def _as_row(diagnosis: dict[str, Any]) -> Row:
    cells = [
        Text(diagnosis["status"], _COLOURS.get(diagnosis["status"], "")),
        Text(diagnosis["by"], "dim"),
        Text(diagnosis["about"]),
        Text(diagnosis["message"]),
    ]
    return Row(cells, [("remedy", Text(diagnosis["remedy"]))] if diagnosis["remedy"] else [])


def _sum(found: list[dict[str, Any]]) -> str:
    counts = {status: sum(d["status"] == status for d in found) for status in _COLOURS}
    return ", ".join(f"{n} {status}" for status, n in counts.items() if n)
