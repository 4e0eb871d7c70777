"""Which device is preferred to which, and which show the same hardware."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from opweave.contract.device import Device, Kind
from opweave.registry.records import Family

__all__ = ["best", "once_per_hardware", "preferred"]

_KINDS: Final = {kind: i for i, kind in enumerate((Kind.GPU, Kind.IGPU, Kind.ACCEL, Kind.CPU, Kind.HOST))}


def preferred(families: Iterable[Family]) -> list[Device]:
    """All devices, the preferred first.

    By place in ``OPWEAVE_BACKENDS``, then kind (GPU, IGPU, ACCEL, CPU, HOST), then the backend's priority. Without
    those that this process, forked from another one, cannot use.
    """
    pairs = [(family, device) for family in families for device in family.devices if not device.lost_by_fork]
    pairs.sort(key=lambda pair: (pair[0].rank, _KINDS[pair[1].kind], -pair[0].backend.priority))
    return [device for _, device in pairs]


def once_per_hardware(families: Iterable[Family]) -> list[Device]:
    """The devices in order of preference, each piece of hardware once: through the backend of highest priority."""
    families = list(families)
    order = preferred(families)
    standing = {id(d): (family.rank, -family.backend.priority) for family in families for d in family.devices}
    chosen: dict[str, Device] = {}
    for device in order:
        hardware = device.hardware_id
        if hardware is not None:
            known = chosen.setdefault(hardware, device)
            if standing[id(device)] < standing[id(known)]:
                chosen[hardware] = device
    return [d for d in order if d.hardware_id is None or chosen[d.hardware_id] is d]


def best(families: Iterable[Family]) -> Device:
    """The device of the best kind; among equals the preferred one."""
    return min(preferred(families), key=lambda device: _KINDS[device.kind])
