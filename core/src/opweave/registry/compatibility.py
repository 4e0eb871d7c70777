"""Whether a plugin was made for this version of opweave, read from its metadata before anything is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opweave.errors import Incompatible
from opweave.registry.naming import canonical

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["core_version", "requirement_on", "why_incompatible"]


def core_version() -> str | None:
    """The version of the installed ``opweave``, ``None`` where it runs without having been installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("opweave")
    except PackageNotFoundError:
        return None


def requirement_on(distribution: str, requires: Sequence[str]) -> Requirement | None:
    """The requirement on ``distribution`` among ``Requires-Dist`` lines that holds here; skips unreadable lines."""
    if not requires:
        return None
    from packaging.requirements import InvalidRequirement, Requirement

    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and canonical(requirement.name) == canonical(distribution):
            return requirement
    return None


def why_incompatible(distribution: str, requires: Sequence[str], version: str | None) -> Incompatible | None:
    """Why a plugin with these requirements does not fit opweave ``version``, or ``None``: it does, or does not say."""
    requirement = requirement_on("opweave", requires) if version is not None else None
    if requirement is None or requirement.specifier.contains(version or "", prereleases=True):
        return None
    wanted = f"opweave{requirement.specifier}"
    return Incompatible(
        f"it was made for {wanted}; this is opweave {version}",
        remedy=f'pip install --upgrade {distribution}, or pip install "{wanted}"',
    )
