"""`profile`: the profile of a device, measured once and kept in a file of the user's cache folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from opweave import registry
from opweave.concurrency import Lock
from opweave.contract import Device
from opweave.registry.measured import cache, file_name, key_of, store_tunables
from opweave_cost.cost_model import Profile

if TYPE_CHECKING:
    from pathlib import Path

    from opweave_cost.measure import Progress

__all__ = ["cache_folder", "known_profile", "profile", "tune"]

_KNOWN: Final[WeakKeyDictionary[Device, Profile]] = WeakKeyDictionary()
_MEASURING: Final = Lock()


def profile(device: Device | str, *, refresh: bool = False, progress: Progress | None = None) -> Profile:
    """The profile of a device: how long steps and transfers take. The first call measures it, which takes seconds, and
    later ones read it from a file.

    A file belongs to one combination of device, driver, plugin version and number of processors. A damaged file is
    replaced. For simulated devices the declared figures are returned.

    Args:
        device: a device or its name.
        refresh: measure even if there is a file.
        progress: called with the name of what is measured next, the number of measurements done, and their number.

    Raises:
        UnknownNameError, PluginError: no such device, or its plugin failed.
        AllocationError: the device has no memory for the arrays that it is measured with.
    """
    found = registry.device(device) if isinstance(device, str) else device
    declared = getattr(found, "declared", None)
    if declared is not None:
        return declared()  # type: ignore[no-any-return]
    with _MEASURING:
        known = None if refresh else known_profile(found)
        if known is None:
            import json

            from opweave_cost.measure import measure

            key = _key(found)  # before anything runs, as the next process computes it
            known = measure(found, progress)
            # If the file cannot be written, the next process measures again.
            cache().store(file_name(key), json.dumps({"key": key, "profile": known.to_json()}).encode())
            _KNOWN[found] = known
        return known


def known_profile(device: Device) -> Profile | None:
    """The profile of a device if it was measured before, in this process or another one."""
    known = _KNOWN.get(device)
    if known is None:
        key = _key(device)
        known = _read(cache().load(file_name(key)), key)
        if known is not None:
            _KNOWN[device] = known
    return known


def tune(device: Device, *, refresh: bool = False, progress: Progress | None = None) -> bool:
    """Measure the `Tunable` numbers of a device, set those that take the least time, and keep them in a file, which is
    read when the device is next loaded. Takes seconds, and none if it was done before.

    Do not call it while there are programs of the device: the sizes of their workspaces may follow from other values.

    Args:
        device: a device that its registry knows.
        refresh: measure even if there is a file.
        progress: as of `profile`.

    Returns:
        Whether anything was measured. If so, the device's profile is out of date.

    Raises:
        AllocationError: the device has no memory for the samples.
    """
    if not device.tunables or (device.tuned and not refresh):
        return False
    from opweave_cost.tunables import measure_tunables

    with _MEASURING:
        measure_tunables(device, progress)
        store_tunables(device, version_of(device))
    return True


def cache_folder() -> Path | None:
    """The folder of `cache`, ``None`` if profiles are not kept."""
    return cache().folder


def _key(device: Device) -> dict[str, Any]:
    return key_of(device, version_of(device))


def version_of(device: Device) -> str:
    """The version of the plugin that a device belongs to, ``""`` if it belongs to none."""
    backend = device.backend
    record = next((p for p in registry.REGISTRY.plugins() if backend is not None and p.name == backend.name), None)
    return record.version if record is not None else ""


def _read(stored: bytes | None, key: dict[str, Any]) -> Profile | None:
    """The profile in a file; ``None`` if there is none, it is damaged, or its figures are invalid."""
    import json

    try:
        document = json.loads(stored or b"")
        if document["key"] != key:
            return None
        return Profile.from_json(document["profile"])
    # A damaged file may hold anything, also deeply nested lists.
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
