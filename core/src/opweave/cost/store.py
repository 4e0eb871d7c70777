"""`profile`: what a device takes, measured once and kept in a file of the user's cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from opweave import registry
from opweave.concurrency import Lock
from opweave.contract.device import Device
from opweave.cost.profile import Profile

if TYPE_CHECKING:
    from opweave.cost.measure import Progress

__all__ = ["cache_folder", "profile"]

FORMAT: Final = 1
"""Files of another format are measured anew."""

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
            key = _key(found)
            path = cache_folder() / f"{_digest(key)}.json"
            known = None if refresh else _read(path, key, found.name)
            if known is None:
                from opweave.cost.measure import measure

                known = measure(found, progress)
                _write(path, key, known)
            _KNOWN[found] = known
        return known


def cache_folder() -> Path:
    """Where profiles are kept: ``OPWEAVE_PROFILE_CACHE``, else ``opweave/profiles`` in the user's folder for caches."""
    chosen = os.environ.get("OPWEAVE_PROFILE_CACHE", "")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "opweave" / "profiles"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "opweave" / "profiles"
    cache = Path("Library") / "Caches" if sys.platform == "darwin" else Path(".cache")
    return Path.home() / cache / "opweave" / "profiles"


def _key(device: Device) -> dict[str, Any]:
    """What a profile holds for: the hardware, its driver, the plugin, and the processors that this process may use."""
    backend = device.backend
    record = next((p for p in registry.plugins() if backend is not None and p.name == backend.name), None)
    try:
        features = {str(k): str(v) for k, v in device.features().items()}
    except Exception:  # a driver's answer to a question that only tells it from others
        features = {}
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "format": FORMAT,
        "device": device.name,
        "description": device.description,
        "hardware": device.hardware_id,
        "plugin": record.version if record is not None else "",
        "features": features,
        "processors": len(affinity(0)) if affinity is not None else os.cpu_count(),
    }


def _digest(key: dict[str, Any]) -> str:
    import json
    from hashlib import sha256

    name = "".join(c if c.isalnum() else "-" for c in key["device"])
    return f"{name}-{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"


def _read(path: Path, key: dict[str, Any], name: str) -> Profile | None:
    """The profile in a file, ``None`` where there is none or it is damaged."""
    import json

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["key"] != key:
            return None
        return Profile.from_json(document["profile"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _write(path: Path, key: dict[str, Any], made: Profile) -> None:
    """Keep a profile, whole or not at all. Where nothing can be written it is measured again next time."""
    import json

    other = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        other.write_text(json.dumps({"key": key, "profile": made.to_json()}), encoding="utf-8")
        other.replace(path)
    except OSError:
        return
