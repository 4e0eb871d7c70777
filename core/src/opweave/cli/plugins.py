"""``opweave plugins``: every installed plugin, its state, and for those that failed cause and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent
from typing import Any, Final

from rich.text import Text

from opweave import registry
from opweave.cli import probe
from opweave.cli.output import Row, print_json, print_rows, unusable_details
from opweave.errors import OpweaveError
from opweave.registry import PluginRecord

__all__ = ["collect", "show_plugins"]

_COLOURS: Final = {"ready": "green", "unavailable": "yellow", "broken": "red", "incompatible": "red", "disabled": "dim"}


def collect() -> dict[str, Any]:
    """Every plugin's record, all loaded; ``failed``: why one that ``OPWEAVE_BACKENDS`` lists cannot be used."""
    failed = None
    try:
        registry.REGISTRY.load_all()
    except OpweaveError as error:
        failed = "\n".join([str(error), *getattr(error, "__notes__", ())])
    records = registry.REGISTRY.plugins()
    return {"plugins": [_document(record) for record in records], "failed": failed}


def show_plugins(*, as_json: bool, isolated: bool, seconds: float) -> Sequence[dict[str, Any]]:
    """Load and print every plugin; gives what was printed.

    Raises:
        OpweaveError: one that ``OPWEAVE_BACKENDS`` lists failed; raised after printing.
    """
    document = probe.ask("plugins", isolated=isolated, seconds=seconds)
    failed = document.pop("failed")
    plugins: list[dict[str, Any]] = document["plugins"]
    if as_json:
        print_json(document)
    else:
        print_rows(["plugin", "distribution", "state", "devices"], [_as_row(plugin) for plugin in plugins], indent=4)
    if failed is not None:
        raise OpweaveError(failed)
    return plugins


def _document(record: PluginRecord) -> dict[str, Any]:
    empty_is_null = {key: value or None for key, value in record._asdict().items()}
    unusable = [device._asdict() for device in record.unusable]
    return {**empty_is_null, "state": record.state.value, "devices": record.devices, "unusable": unusable}


def _as_row(plugin: dict[str, Any]) -> Row:
    details = [detail for device in plugin["unusable"] for detail in unusable_details(device)]
    state, usable, unusable = plugin["state"], len(plugin["devices"]), len(plugin["unusable"])
    ready = state == "ready"
    explained = not ready and unusable > 0  # the lines of its devices say why
    if plugin["error"] and not explained:
        # The error of a ready plugin names the backends that are missing.
        colour = "" if state == "disabled" else _COLOURS["unavailable" if ready else state]
        details.append(("cause", Text(plugin["error"], colour)))
    if plugin["traceback"] and state == "broken":
        details.append(("at", Text(dedent(plugin["traceback"]), "dim")))
    if plugin["remedy"] and state != "disabled" and not explained:
        details.append(("remedy", Text(plugin["remedy"])))
    cells = [
        Text("@".join(filter(None, (plugin["name"], plugin["variant"]))), "bold cyan"),
        Text(f"{plugin['distribution'] or plugin['value']} {plugin['version'] or ''}".rstrip()),
        Text(state, _COLOURS.get(state, "")),
        Text(f"{usable} of {usable + unusable} usable" if unusable else str(usable) if usable else "-"),
    ]
    return Row(cells, details)
