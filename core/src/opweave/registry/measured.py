"""What was measured of devices and is kept in files of the user's cache folder; the values of their tunables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opweave.runtime.device import Device
    from opweave.runtime.host.cache import FileCache

__all__ = ["FOLDER", "cache", "key_of", "load_tunables", "store_tunables"]

FORMAT: Final = 1
"""Version of the file format; what is in files of another one is measured anew."""

FOLDER: Final = "OPWEAVE_PROFILE_CACHE"
"""The environment variable that names the folder of profiles; ``0``: profiles are not kept."""

LARGEST: Final = 4 << 20
"""The largest file that is read, in bytes. Profiles have some ten thousand."""


def cache() -> FileCache:
    """The cache of profiles: the folder ``OPWEAVE_PROFILE_CACHE`` (``0``: none), else ``opweave/profiles`` in the
    user's cache folder."""
    from opweave.runtime.host.cache import FileCache

    return FileCache(FOLDER, "profiles", largest=LARGEST)


def key_of(device: Device, version: str) -> dict[str, Any]:
    """What figures are valid for: hardware, driver and libraries, version of the plugin, and the number of processors
    that this process may use."""
    from opweave.runtime.host.cores import usable_cores

    try:
        features = {str(k): str(v) for k, v in device.features().items()}
    except Exception:  # a driver that cannot name its features; they only distinguish it from others
        features = {}
    return {
        "format": FORMAT,
        "device": device.name,
        "description": device.description,
        "hardware": device.hardware_id,
        "plugin": version,
        "features": features,
        "processors": usable_cores().usable,
    }


def file_name(key: Mapping[str, Any], about: str = "") -> str:
    """The name of a file for that key: of the device, ``about``, and a digest."""
    import json
    from hashlib import sha256

    name = "".join(c if c.isalnum() else "-" for c in key["device"])
    return f"{name}{about}-{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def load_tunables(device: Device, version: str) -> None:
    """Give the tunables of a device the values that were measured on this machine.

    Of files that are damaged, or were written with other libraries or another version of the plugin, nothing is taken.
    """
    tunables = device.tunables
    if not tunables or os.environ.get(FOLDER) == "0":
        return
    import json

    stored = cache().load(_tunables_file(device))
    if stored is None:
        return  # without asking for the features, which takes milliseconds
    try:
        document = json.loads(stored)
        values = document["tunables"] if document["key"] == key_of(device, version) else {}
        found = [values[tunable.name] for tunable in tunables]
    except (ValueError, KeyError, TypeError, RecursionError):  # a damaged file may hold anything
        return
    if all(type(value) is int and value in t.choices for t, value in zip(tunables, found, strict=True)):
        for tunable, value in zip(tunables, found, strict=True):
            tunable.value = value
        device.tuned = True


def store_tunables(device: Device, version: str) -> None:
    """Keep the present values of the tunables of a device, which were measured, for processes that load it from now
    on."""
    import json

    device.tuned = True
    values = {tunable.name: tunable.value for tunable in device.tunables}
    document = {"key": key_of(device, version), "tunables": values}
    cache().store(_tunables_file(device), json.dumps(document).encode())


def _tunables_file(device: Device) -> str:
    from opweave.runtime.host.cores import usable_cores

    key = {"device": device.name, "description": device.description, "processors": usable_cores().usable}
    return file_name(key, "-tunables")
