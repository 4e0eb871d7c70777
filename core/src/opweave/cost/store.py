"""`profile`: what a device takes, measured once and kept in a file of the user's cache folder."""

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

__all__ = ["FOLDER", "cache", "cache_folder", "profile"]

FORMAT: Final = 1
"""Files of another format are measured anew."""

FOLDER: Final = "OPWEAVE_PROFILE_CACHE"
"""Environment variable: the folder of profiles, or ``0`` for none."""

LARGEST: Final = 4 << 20
"""Bytes. Profiles have some ten thousand."""

_KNOWN: Final[WeakKeyDictionary[Device, Profile]] = WeakKeyDictionary()
_MEASURING: Final = Lock()


def profile(device: Device | str, *, refresh: bool = False, progress: Progress | None = None) -> Profile:
    """What steps and transfers take on a device: measured in some seconds at first, read from a file afterwards.

    The file is that of the device's name, description and driver; a damaged one is measured anew. Simulated devices
    give what they were declared with.

    Args:
        device: a device or its name.
        refresh: measure in any case.
        progress: called with what is measured next, how much is done, and how much there is.

    Raises:
        UnknownNameError, PluginError: no such device, or its plugin failed.
        AllocationError: no room for the arrays to measure with.
    """
    found = registry.device(device) if isinstance(device, str) else device
    declared = getattr(found, "declared", None)
    if declared is not None:
        return declared()  # type: ignore[no-any-return]
    with _MEASURING:
        known = None if refresh else _KNOWN.get(found)
        if known is None:
            key, kept = _key(found), cache()
            name = f"{_digest(key)}.json"
            known = None if refresh else _read(kept.load(name), key)
            if known is None:
                import json

                from opweave.cost.measure import measure

                known = measure(found, progress)
                # Where nothing can be written it is measured again next time.
                kept.store(name, json.dumps({"key": key, "profile": known.to_json()}).encode())
            _KNOWN[found] = known
        return known


def cache() -> FileCache:
    """Where profiles are kept: ``OPWEAVE_PROFILE_CACHE`` (``0``: nowhere), else ``opweave/profiles`` in the cache
    folder of the user."""
    return FileCache(FOLDER, "profiles", largest=LARGEST)


def cache_folder() -> Path | None:
    """The folder of `cache`, ``None`` where nothing is kept."""
    return cache().folder


def _key(device: Device) -> dict[str, Any]:
    """What a profile holds for: the hardware, its driver, the plugin, and the processors that this process may use."""
    backend = device.backend
    record = next((p for p in registry.plugins() if backend is not None and p.name == backend.name), None)
    try:
        features = {str(k): str(v) for k, v in device.features().items()}
    except Exception:  # a driver's answer to a question that only tells it from others
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


def _digest(key: dict[str, Any]) -> str:
    import json
    from hashlib import sha256

    name = "".join(c if c.isalnum() else "-" for c in key["device"])
    return f"{name}-{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"


def _read(stored: bytes | None, key: dict[str, Any]) -> Profile | None:
    """The profile in a file, ``None`` where there is none, it is damaged, or its figures are none of a device."""
    import json

    try:
        document = json.loads(stored or b"")
        if document["key"] != key:
            return None
        return Profile.from_json(document["profile"])
    # A file may hold anything, also lists within lists without end.
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
