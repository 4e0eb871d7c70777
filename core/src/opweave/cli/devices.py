"""``opweave devices``: lists the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.text import Text

from opweave import registry
from opweave.cli import probe
from opweave.cli.output import Row, print_json, print_rows, unusable_details
from opweave.contract.device import Kind
from opweave.errors import OpweaveError
from opweave.registry import State
from opweave.units import human_bytes

if TYPE_CHECKING:
    from opweave.runtime.device import Device

__all__ = ["collect", "show_devices"]

T = TypeVar("T")

_WITHOUT_DEVICES: Final = (State.UNAVAILABLE, State.BROKEN, State.INCOMPATIBLE)


def collect(*, features: bool) -> dict[str, Any]:
    """Every device in the order of preference.

    Raises:
        PluginError, UnknownNameError: one that ``OPWEAVE_BACKENDS`` lists failed.
    """
    registry.REGISTRY.make_devices()
    known = registry.REGISTRY
    devices, default = known.devices(), known.default_devices()
    order = {id(device): i for i, device in enumerate(default, 1)}
    through = {device.hardware_id: device.name for device in default}
    records = known.plugins()
    return {
        "devices": [
            _document(device, devices, order.get(id(device)), through.get(device.hardware_id), features)
            for device in devices
        ],
        "unusable": [device._asdict() for record in records for device in record.unusable],
        "partly_usable": {r.name: [len(r.devices), len(r.unusable)] for r in records if r.devices and r.unusable},
        "without_devices": {r.name: r.state.value for r in records if r.state in _WITHOUT_DEVICES},
    }


def _document(
    device: Device, devices: Sequence[Device], order: int | None, through: str | None, features: bool
) -> dict[str, Any]:
    """A device as a document. If its driver raises an error, the value is ``None`` and ``problems`` has the message.

    ``used_through`` is the device through which the same hardware is used by default.
    """
    problems: list[str] = []

    def ask(what: str, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {error}")
            return None

    memory = ask("memory", lambda: _memory(device))
    # BLAS is the most frequent reason for slow products on the CPU.
    found = ask("features", lambda: dict(device.features())) if features or device.kind is Kind.CPU else None
    blas = {key: value for key, value in (found or {}).items() if str(key).startswith("blas")}
    return {
        "name": device.name,
        "backend": device.backend.name if device.backend else None,
        "kind": device.kind.value,
        "description": device.description,
        "hardware_id": device.hardware_id,
        "default_order": order,
        "used_through": through if order is None else None,
        "memory_free": memory[0] if memory else None,
        "memory_total": memory[1] if memory else None,
        "memory_space": device.space.name,
        "shares_memory_with": [
            d.name for d in devices if d is not device and (d.reaches(device.space) or device.reaches(d.space))
        ],
        "capabilities": device.caps._asdict(),
        "blas": blas or None,
        "features": found if features else None,
        "problems": problems,
    }


def _memory(device: Device) -> tuple[int, int]:
    """Free and total bytes; raises ``ValueError`` if ``mem_info()`` returns something else."""
    found = device.mem_info()
    try:
        free, total = (n.__index__() for n in found)
    except (TypeError, ValueError, AttributeError):
        raise ValueError("mem_info() gives no two whole numbers, free and total bytes") from None
    if not 0 <= free <= total < 1 << 63:
        raise ValueError(f"mem_info() gives {free} free of {total} bytes")
    return free, total


# --- printing ---------------------------------------------------------------------------------------------------------


def show_devices(*, as_json: bool, features: bool, isolated: bool, seconds: float) -> None:
    """Print every device in the order of preference, and then those that do not work.

    Raises:
        OpweaveError: one that ``OPWEAVE_BACKENDS`` lists failed.
    """
    document = probe.ask("devices", isolated=isolated, seconds=seconds, features=features)
    if "failed" in document:
        raise OpweaveError(document["failed"])
    if as_json:
        print_json(document)
        return
    devices, footer = document["devices"], []
    if any(device["default_order"] is None for device in devices):
        footer.append("-: not used by default, since another device uses the same hardware")
    partly = document["partly_usable"].items()
    footer += [f"{name}: {usable} of {usable + not_} devices usable" for name, (usable, not_) in partly]
    if document["without_devices"]:
        names = ", ".join(f"{name} ({state})" for name, state in document["without_devices"].items())
        footer.append(f"without devices: {names}; opweave plugins tells why")
    header = ["", "device", "kind", "memory free / total", "shares memory with"]
    rows = [_as_row(device) for device in devices] + [_unusable_row(device) for device in document["unusable"]]
    print_rows(header, rows, indent=3, footer="\n".join(footer))


def _as_row(device: dict[str, Any]) -> Row:
    # A device that does not know its memory says (0, 0).
    known = bool(device["memory_total"])
    able = " ".join(name for name, can in device["capabilities"].items() if can)
    details = [("", Text(str(device["description"]), "dim"))] if device["description"] else []
    if device["hardware_id"] is not None:
        instead = f", used through {device['used_through']}" if device["used_through"] else ""
        details.append(("at", Text(f"{device['hardware_id']}{instead}")))
    details.append(("can", Text(able or "the minimum")))
    shown = device["features"] if device["features"] is not None else device["blas"] or {}
    details += [(name.replace("_", " "), Text(_words(value))) for name, value in shown.items()]
    details += [("problem", Text(problem, "red")) for problem in device["problems"]]
    free, total = device["memory_free"], device["memory_total"]
    cells = [
        Text("-" if device["default_order"] is None else str(device["default_order"]), "dim"),
        Text(device["name"], "bold cyan"),
        Text(device["kind"]),
        Text(f"{human_bytes(free)} / {human_bytes(total)}" if known else "?"),
        Text(", ".join(device["shares_memory_with"]) or "-"),
    ]
    return Row(cells, details)


def _unusable_row(device: dict[str, Any]) -> Row:
    _, *reasons = unusable_details(device)
    cells = [Text("x", "yellow"), Text(device["name"], "dim"), Text("unusable", "yellow"), Text("-"), Text("-")]
    return Row(cells, [("", Text(device["description"], "dim")), *reasons] if device["description"] else reasons)


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
