"""``opweave devices``: what there is to compute on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.text import Text

from opweave import registry
from opweave.cli.output import Row, human_bytes, print_json, print_rows, quiet_stdout, unusable_details
from opweave.registry.compatibility import core_version
from opweave.registry.records import State

if TYPE_CHECKING:
    from opweave.contract.device import Device
    from opweave.registry.records import UnusableDevice

__all__ = ["show_devices"]

_FAILED: Final = (State.UNAVAILABLE, State.BROKEN, State.INCOMPATIBLE)


class _Shown(NamedTuple):
    """A device as it is shown. A question that its driver answers with an error leaves ``None`` and a problem.

    ``instead`` is the device through which the same hardware is used by default.
    """

    device: Device
    order: int | None
    instead: str | None
    memory: tuple[int, int] | None
    shares: list[str]
    features: Mapping[str, Any] | None
    problems: list[str]


def show_devices(*, as_json: bool, features: bool) -> None:
    """Print every device in the order of preference.

    Raises:
        PluginError, UnknownNameError: one that ``OPWEAVE_BACKENDS`` lists failed.
    """
    with quiet_stdout():
        devices = registry.REGISTRY.devices()
        default = registry.REGISTRY.default_devices()
        order = {id(device): i for i, device in enumerate(default, 1)}
        through: dict[str | None, str] = {device.hardware_id: device.name for device in default}
        shown = [
            _ask(device, devices, order.get(id(device)), through.get(device.hardware_id), features)
            for device in devices
        ]
    records = registry.REGISTRY.plugins()
    unusable = [device for record in records for device in record.unusable]
    if as_json:
        document = {"opweave": core_version(), "devices": [_as_json(s) for s in shown]}
        print_json({**document, "unusable": [device._asdict() for device in unusable]})
        return
    footer = []
    if any(s.order is None for s in shown):
        footer.append("-: not used by default, its hardware is used through another device")
    failed = [f"{r.name} ({r.state.value})" for r in records if r.state in _FAILED]
    partly = [r for r in records if r.devices and r.unusable]
    footer += [f"{r.name}: {len(r.devices)} of {len(r.devices) + len(r.unusable)} devices usable" for r in partly]
    if failed:
        footer.append(f"without devices: {', '.join(failed)}; opweave plugins tells why")
    header = ["", "device", "kind", "memory free / total", "shares memory with"]
    rows = [_as_row(s) for s in shown] + [_unusable_row(device) for device in unusable]
    print_rows(header, rows, indent=3, footer="\n".join(footer))


def _ask(device: Device, devices: Sequence[Device], order: int | None, through: str | None, features: bool) -> _Shown:
    problems: list[str] = []

    def ask(what: str, question: Any) -> Any:
        try:
            return question()
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {error}")
            return None

    memory = ask("memory", device.mem_info)
    found = ask("features", lambda: dict(device.features())) if features else None
    shares = [d.name for d in devices if d is not device and (d.reaches(device.space) or device.reaches(d.space))]
    return _Shown(device, order, through if order is None else None, memory, shares, found, problems)


def _as_json(shown: _Shown) -> dict[str, Any]:
    device = shown.device
    return {
        "name": device.name,
        "backend": device.backend.name if device.backend else None,
        "kind": device.kind.value,
        "description": device.description,
        "hardware_id": device.hardware_id,
        "default_order": shown.order,
        "used_through": shown.instead,
        "memory_free": shown.memory[0] if shown.memory else None,
        "memory_total": shown.memory[1] if shown.memory else None,
        "memory_space": device.space.name,
        "shares_memory_with": shown.shares,
        "capabilities": device.caps._asdict(),
        "features": dict(shown.features) if shown.features is not None else None,
        "problems": shown.problems,
    }


def _as_row(shown: _Shown) -> Row:
    device = shown.device
    order = "-" if shown.order is None else str(shown.order)
    # A device that does not know its memory says (0, 0).
    known = shown.memory is not None and shown.memory[1] > 0
    free, total = (human_bytes(n) for n in shown.memory) if known and shown.memory else ("?", "?")
    able = " ".join(name for name, can in device.caps._asdict().items() if can)
    details = [("", Text(str(device.description), "dim"))] if device.description else []
    if device.hardware_id is not None:
        instead = f", used through {shown.instead}" if shown.instead else ""
        details.append(("at", Text(f"{device.hardware_id}{instead}")))
    details.append(("can", Text(able or "the minimum")))
    details += [(str(name), Text(_words(value))) for name, value in (shown.features or {}).items()]
    details += [("problem", Text(problem, "red")) for problem in shown.problems]
    cells = [
        Text(order, "dim"),
        Text(device.name, "bold cyan"),
        Text(device.kind.value),
        Text(f"{free} / {total}" if known else "?"),
        Text(", ".join(shown.shares) or "-"),
    ]
    return Row(cells, details)


def _unusable_row(device: UnusableDevice) -> Row:
    _, *reasons = unusable_details(device)
    cells = [Text("x", "yellow"), Text(device.name, "dim"), Text("unusable", "yellow"), Text("-"), Text("-")]
    return Row(cells, [("", Text(device.description, "dim")), *reasons] if device.description else reasons)


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple, set, frozenset)) else str(value)
