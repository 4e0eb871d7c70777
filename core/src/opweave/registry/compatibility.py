"""Whether a plugin was made for this version of the contract: by what it requires, before it is imported, and by the
hooks that its classes override."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from opweave import contract
from opweave.contract import version as changes
from opweave.contract.version import RELEASES, VERSION
from opweave.errors import Incompatible
from opweave.registry.discovery import core_version, requirements
from opweave.registry.naming import canonical

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from opweave.contract.version import ChangedHook

__all__ = ["check_hooks", "why_incompatible"]


# --- by what it requires ----------------------------------------------------------------------------------------------


def why_incompatible(distribution: str, requires: Sequence[str], version: str | None) -> Incompatible | None:
    """Why a plugin with these requirements is incompatible with opweave ``version``; ``None`` if it is not, or if that
    is unknown.

    A requirement with an upper bound (``opweave>=0.1,<0.2``) says of every release whether the plugin was made for it.
    One with a lower bound only says nothing of releases to come: the plugin was made for the contract of that release.
    """
    if version is None:
        return None
    for requirement in requirements(requires):
        if canonical(requirement.name) != "opweave":
            continue
        wanted = f"opweave{requirement.specifier}"
        if not requirement.specifier.contains(version, prereleases=True):
            return Incompatible(
                f"it was made for {wanted}; this is opweave {version}",
                remedy=f'pip install --upgrade {distribution}, or pip install "{wanted}"',
            )
        made_for = _contract_of(requirement.specifier)
        if made_for < VERSION:
            return Incompatible(
                f"it was made for {wanted}, which is version {made_for} of the contract for backends; "
                f"opweave {version} has version {VERSION}",
                remedy=f'pip install --upgrade {distribution}, or pip install "opweave<{RELEASES[made_for + 1]}"',
            )
    return None


def _contract_of(wanted: SpecifierSet) -> int:
    """The version of the contract that a plugin was made for whose requirement this opweave meets."""
    from packaging.version import Version

    least = [Version(part.version) for part in wanted if part.operator in (">=", ">")]
    if not least or any(part.operator not in (">=", ">", "!=") for part in wanted):
        return VERSION  # it says nothing, or it says where it ends
    return max((number for number, first in RELEASES.items() if Version(first) <= max(least)), default=1)


# --- by the hooks that it overrides -----------------------------------------------------------------------------------

_told: WeakSet[type] = WeakSet()


def check_hooks(owner: str, classes: type | Callable[[], Iterable[type]]) -> None:
    """Warn, once for each class, of hooks that it overrides and that will no longer be called.

    Args:
        owner: the class of the contract that it is derived from.
        classes: the class, or a function that gives several; it is called only where a hook of ``owner`` changes.

    Raises:
        Incompatible: one of the hooks is no longer called.
    """
    rows = [row for row in changes.CHANGED_HOOKS if row.owner == owner]
    if not rows:
        return
    base = getattr(contract, owner)
    for cls in [classes] if isinstance(classes, type) else classes():
        own = {name for kind in cls.__mro__ if not issubclass(base, kind) for name in vars(kind)}
        overridden = [row for row in rows if row.hook in own]
        for row in overridden:
            _judge(cls, row)
        if overridden:
            _told.add(cls)


def _judge(cls: type, row: ChangedHook) -> None:
    from packaging.version import Version

    version = core_version()
    what = f"{cls.__module__}.{cls.__qualname__} overrides {row.owner}.{row.hook}"
    if version is not None and Version(version) >= Version(row.gone):
        raise Incompatible(
            f"{what}, which opweave does not call since {row.gone}",
            remedy=f'{row.instead}, or pip install "opweave<{row.gone}"',
        )
    if cls not in _told:
        message = f"{what}, which opweave {row.gone} will no longer call; {row.instead}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
