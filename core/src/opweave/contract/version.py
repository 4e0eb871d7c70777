"""The version of the contract, and the hooks that leave it. `docs/compatibility.md` says what may change with which
release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

__all__ = ["CHANGED_HOOKS", "RELEASES", "VERSION", "ChangedHook"]

VERSION: Final = 1
"""The version of the contract that this opweave has. It counts up with each change that a backend has to follow."""

RELEASES: Final[Mapping[int, str]] = {1: "0.1"}
"""Version of the contract -> the first release of opweave that has it."""


class ChangedHook(NamedTuple):
    """A hook that is no longer called from some release on. Until then overriding it is a `DeprecationWarning`, which
    each class gives once, when its backend is registered; from then on the plugin is incompatible.

    Attributes:
        owner: the class of the contract whose hook it is.
        hook: its name.
        instead: what an author overrides instead, as a sentence that begins in lower case.
        gone: the release of opweave that does not call it any more, ``"0.3"``. Until then the default of what replaces
            it calls it.
    """

    owner: Literal["Backend", "BufferType", "Device", "Stream"]
    hook: str
    instead: str
    gone: str


CHANGED_HOOKS: tuple[ChangedHook, ...] = ()
"""Rows stay after the hook is gone, so that a backend that still overrides it is told, and not ignored in silence."""
