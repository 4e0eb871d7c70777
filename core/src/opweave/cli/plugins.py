"""``opweave plugins``: every backend that is installed, its state, and for a failing one the cause and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent
from typing import Any

from rich.text import Text

from opweave import registry
from opweave.cli.output import Row, print_json, print_rows, quiet_stdout, unusable_details
from opweave.errors import OpweaveError
from opweave.registry.compatibility import core_version
from opweave.registry.records import PluginRecord, State

__all__ = ["show_plugins"]

_COLOURS = {
    State.READY: "green",
    State.UNAVAILABLE: "yellow",
    State.BROKEN: "red",
    State.INCOMPATIBLE: "red",
    State.DISABLED: "dim",
    State.DISCOVERED: "",
}


def show_plugins(*, as_json: bool) -> Sequence[PluginRecord]:
    """Load and print every plugin.

    Raises:
        PluginError, UnknownNameError: one that ``OPWEAVE_BACKENDS`` lists failed; raised after printing.
    """
    failed: OpweaveError | None = None
    with quiet_stdout():
        try:
            registry.REGISTRY.load_all()
        except OpweaveError as error:
            failed = error
        records = registry.REGISTRY.plugins()
    if as_json:
        print_json({"opweave": core_version(), "plugins": [_as_json(record) for record in records]})
    else:
        header = ["plugin", "distribution", "state", "devices"]
        print_rows(header, [_as_row(record) for record in records], indent=4)
    if failed is not None:
        raise failed
    return records


def _as_json(record: PluginRecord) -> dict[str, Any]:
    empty_is_null = {key: value or None for key, value in record._asdict().items()}
    unusable = [device._asdict() for device in record.unusable]
    return {**empty_is_null, "state": record.state.value, "devices": record.devices, "unusable": unusable}


def _as_row(record: PluginRecord) -> Row:
    details = [detail for device in record.unusable for detail in unusable_details(device)]
    ready, usable, found = record.state is State.READY, len(record.devices), len(record.devices) + len(record.unusable)
    if ready or not record.unusable:  # else its devices are why
        if record.error:
            plain = record.state is State.DISABLED
            # A ready plugin names what is missing of it.
            colour = "" if plain else _COLOURS[State.UNAVAILABLE if ready else record.state]
            details.append(("cause", Text(record.error, colour)))
        if record.traceback and record.state is State.BROKEN:
            details.append(("at", Text(dedent(record.traceback), "dim")))
        if record.remedy and record.state is not State.DISABLED:
            details.append(("remedy", Text(record.remedy)))
    cells = [
        Text(record.name, "bold cyan"),
        Text(f"{record.distribution or record.value} {record.version}".rstrip()),
        Text(record.state.value, _COLOURS[record.state]),
        Text(f"{usable} of {found} usable" if record.unusable else str(usable) if ready else "-"),
    ]
    return Row(cells, details)
