"""Names: of plugins, of devices (``<entry-point name>:<id>``), and of devices with parameters (``cpu?threads=2``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import parse_qsl

from opweave.errors import Broken

__all__ = ["canonical", "check_name", "device_names", "key", "parse_spec"]

_NAME = re.compile(r"[^\s:?,;/\\]+")
_ID = re.compile(r"[^\s?,;]+")

Param = bool | int | float | str


def key(name: str) -> str:
    """The form in which names are compared: stripped and in lower case."""
    return name.strip().lower()


def canonical(distribution: str) -> str:
    """A distribution's name as package indexes compare them: ``Opweave_CPU`` is ``opweave-cpu``."""
    return re.sub(r"[-_.]+", "-", distribution).strip().lower()


def check_name(name: object) -> None:
    """Raises `Broken` unless ``name`` can begin the name of a device."""
    if not isinstance(name, str):
        raise Broken(f"the name of a backend has to be a str, not {name!r}")
    if not (_NAME.fullmatch(name) and name.isprintable()):
        raise Broken(
            f"{name!r} cannot be the name of a backend: spaces, control characters and : ? , ; / \\ are not allowed",
            remedy="rename the entry point in the plugin's pyproject.toml, or the file",
        )


def device_names(backend: str, ids: Sequence[object], existing: Iterable[str] = ()) -> list[str]:
    """The names of a backend's devices, made of their ids.

    A single device without an id gets the backend's name; several devices without ids are numbered.

    Args:
        backend: the backend's name.
        ids: ``Device.id`` of each device.
        existing: names of the devices that the backend already has.

    Raises:
        Broken: an id is not a str, has characters that names cannot have, or occurs twice.
    """
    for given in ids:
        if given is not None and not (isinstance(given, str) and _ID.fullmatch(given) and given.isprintable()):
            raise Broken(f"the device id {given!r} is not a str without spaces, control characters and ? , ;")
    names = {key(name) for name in existing}
    only = not names and len(ids) == 1
    explicit = {key(f"{backend}:{given}") for given in ids if given is not None}
    free = (f"{backend}:{n}" for n in range(len(names), 1 << 62))
    result: list[str] = []
    for given in ids:
        if given is not None:
            name = f"{backend}:{given}"
        elif only:
            name = backend
        else:
            name = next(n for n in free if key(n) not in names and key(n) not in explicit)
        if key(name) in names:
            raise Broken(f"two devices are called {name!r}")
        names.add(key(name))
        result.append(name)
    return result


def parse_spec(spec: str) -> tuple[str, dict[str, Param]]:
    """The name and the parameters: ``"cpu?threads=2&pin=true"`` gives ``("cpu", {"threads": 2, "pin": True})``.

    Values become bool (``true``, ``false``), int, float or else str; ``%xx`` is decoded.

    Raises:
        ValueError: a parameter without ``=``, without a name, or given twice.
    """
    name, separator, query = spec.partition("?")
    params: dict[str, Param] = {}
    for part in query.split("&") if separator else ():
        pairs = parse_qsl(part, keep_blank_values=True)
        if "=" not in part or len(pairs) != 1 or not pairs[0][0]:
            raise ValueError(f"{part!r} in {spec!r} is no parameter; write name=value")
        param, value = pairs[0]
        if param in params:
            raise ValueError(f"{spec!r} gives {param!r} twice")
        params[param] = _value(value)
    return name, params


def _value(text: str) -> Param:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
