"""`pip_install`: the command that installs packages of this project, for the remedies of errors."""

from __future__ import annotations

import json
import shlex
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["pip_install"]


def pip_install(*requirements: str) -> str:
    """A command that installs packages of this project from where ``opweave`` itself was installed from: its clone, the
    folder of its wheel, or else the package index.

    Args:
        requirements: names, with extras where these are needed: ``"opweave-cpu"``, ``"opweave-opencl[pocl]"``.
    """
    place = _origin()
    if place is None:
        return shlex.join(["pip", "install", *requirements])
    if place.is_file():
        return shlex.join(["pip", "install", "--find-links", str(place.parent), *requirements])
    return shlex.join(["pip", "install", *[_in_clone(place, requirement) for requirement in requirements]])


def _in_clone(core: Path, requirement: str) -> str:
    """The folder of a package beside the core's in a clone, with the extras; the requirement where it is not there."""
    name, bracket, rest = requirement.partition("[")
    extras = bracket + rest
    part = name.removeprefix("opweave-")
    for folder in (core.parent / "plugins" / part, core.parent / "frontends" / part, core.parent / part):
        if (folder / "pyproject.toml").is_file():
            return f"{folder}{extras}"
    return f"{core}{extras}" if name == "opweave" else requirement


@cache
def _origin() -> Path | None:
    """The folder or the wheel that ``opweave`` was installed from, which pip notes by PEP 610; ``None``: an index."""
    try:
        noted = metadata.distribution("opweave").read_text("direct_url.json")
        url = urlsplit(json.loads(noted or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return None
    from urllib.request import url2pathname  # brings HTTP, which importing opweave must not pay for

    place = Path(url2pathname(url.path)) if url.scheme == "file" else None
    return place if place is not None and place.exists() else None
