"""Names: of plugins, of devices (``<entry-point name>:<id>``), and of devices with parameters (``cpu?threads=2``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from opweave.errors import Broken

__all__ = ["canonical", "check_name", "device_names", "key", "parse_spec"]

_NAME = re.compile(r"[^\s:?,;/\\]+")
_ID = re.compile(r"[^\s?,;]+")

Param = bool | int | float | str


def key(name: str) -> str:
    """The form in which names are compared: without regard to case."""
    return name.strip().lower()


def canonical(distribution: str) -> str:
    """A distribution's name as package indexes compare them: ``Opweave_CPU`` is ``opweave-cpu``."""
    return re.sub(r"[-_.]+", "-", distribution).strip().lower()


def check_name(name: object) -> None:
    """Raises `Broken` unless ``name`` can begin the name of a device."""
    if not isinstance(name, str):
        raise Broken(f"the name of a backend is a text, not {name!r}")
    if not (_NAME.fullmatch(name) and name.isprintable()):
        raise Broken(
            f"{name!r} cannot begin the name of a device: no spaces, no control characters and none of : ? , ; / \\",
            remedy="rename the entry point in the plugin's pyproject.toml, or the file",
        )


def device_names(backend: str, ids: Sequence[object], existing: Iterable[str] = ()) -> list[str]:
    """The names of a backend's devices by their ids.

    An only device without an id is called like its backend; several without ids are numbered.

    Args:
        backend: the backend's name.
        ids: what the devices have as ``id``.
        existing: names of devices that the backend has already.

    Raises:
        Broken: an id is no text, has characters that a name cannot have, or is there twice.
    """
    for given in ids:
        if given is not None and not (isinstance(given, str) and _ID.fullmatch(given) and given.isprintable()):
            raise Broken(f"the device id {given!r} is not a text without spaces, control characters and ? , ;")
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
    """``"cpu?threads=2&pin=true"`` gives ``("cpu", {"threads": 2, "pin": True})``.

    Values are read as ``true``/``false``, integer or number where they look like one, else as text; ``%xx`` is decoded.

    Raises:
        ValueError: a parameter without ``=``, without a name, or given twice.
    """
    from urllib.parse import parse_qsl

    name, mark, query = spec.partition("?")
    params: dict[str, Param] = {}
    for part in query.split("&") if mark else ():
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
