"""`profile`: the profile of a device, measured once and kept in a file of the user's cache folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from opweave import registry
from opweave.concurrency import Lock
from opweave.contract.device import Device
from opweave.cost.profile import Profile
from opweave.host.cache import FileCache
from opweave.host.cores import usable_cores

if TYPE_CHECKING:
    from pathlib import Path

    from opweave.cost.measure import Progress

__all__ = ["FOLDER", "cache", "cache_folder", "known_profile", "profile"]

FORMAT: Final = 1
"""Version of the file format; devices whose file has another one are measured anew."""

FOLDER: Final = "OPWEAVE_PROFILE_CACHE"
"""The environment variable that names the folder of profiles; ``0``: profiles are not kept."""

LARGEST: Final = 4 << 20
"""The largest file that is read, in bytes. Profiles have some ten thousand."""

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

            from opweave.cost.measure import measure

            known, key = measure(found, progress), _key(found)
            # If the file cannot be written, the next process measures again.
            cache().store(_file_name(key), json.dumps({"key": key, "profile": known.to_json()}).encode())
            _KNOWN[found] = known
        return known


def known_profile(device: Device) -> Profile | None:
    """The profile of a device if it was measured before, in this process or another one."""
    known = _KNOWN.get(device)
    if known is None:
        key = _key(device)
        known = _read(cache().load(_file_name(key)), key)
        if known is not None:
            _KNOWN[device] = known
    return known


def cache() -> FileCache:
    """The cache of profiles: the folder ``OPWEAVE_PROFILE_CACHE`` (``0``: none), else ``opweave/profiles`` in the
    user's cache folder."""
    return FileCache(FOLDER, "profiles", largest=LARGEST)


def cache_folder() -> Path | None:
    """The folder of `cache`, ``None`` if profiles are not kept."""
    return cache().folder


def _key(device: Device) -> dict[str, Any]:
    """What a profile is valid for: hardware, driver, plugin, and the number of processors this process may use."""
    backend = device.backend
    record = next((p for p in registry.plugins() if backend is not None and p.name == backend.name), None)
    try:
        features = {str(k): str(v) for k, v in device.features().items()}
    except Exception:  # a driver that cannot name its features; they only distinguish it from others
        features = {}
    return {
        "format": FORMAT,
        "device": device.name,
        "description": device.description,
        "hardware": device.hardware_id,
        "plugin": record.version if record is not None else "",
        "features": features,
        "processors": usable_cores().usable,
    }


def _file_name(key: dict[str, Any]) -> str:
    import json
    from hashlib import sha256

    name = "".join(c if c.isalnum() else "-" for c in key["device"])
    return f"{name}-{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


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
