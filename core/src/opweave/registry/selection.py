"""What the environment selects, before anything is imported.

=======================  ==============================================================================================
``OPWEAVE_BACKENDS``     the only plugins to load, comma-separated; the order is their priority, and one that fails is
                         an error
``OPWEAVE_DISABLE``      plugins not to load, comma-separated
``OPWEAVE_BACKEND_PATH`` further places, separated as in ``PATH``: folders as ``pip install --target`` makes them, or
                         single ``.py`` files
=======================  ==============================================================================================

A plugin is named by its entry point or by its distribution. The built-in ``host`` is always there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from opweave.errors import Unavailable
from opweave.registry.naming import canonical, key

if TYPE_CHECKING:
    from opweave.registry.records import Plugin

__all__ = ["Selection"]


class Selection(NamedTuple):
    """Names as they were given; ``backends`` is empty where everything is selected."""

    backends: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Selection:
        def parts(variable: str, separator: str) -> tuple[str, ...]:
            return tuple(p for part in environ.get(variable, "").split(separator) if (p := part.strip()))

        return cls(
            parts("OPWEAVE_BACKENDS", ","), parts("OPWEAVE_DISABLE", ","), parts("OPWEAVE_BACKEND_PATH", os.pathsep)
        )

    def why_disabled(self, plugin: Plugin) -> Unavailable | None:
        """Why ``plugin`` is not to be loaded, or ``None``."""
        if any(names(name, plugin) for name in self.disabled):
            return Unavailable("disabled by OPWEAVE_DISABLE", remedy=f"take {plugin.name} out of OPWEAVE_DISABLE")
        if self.backends and not any(names(name, plugin) for name in self.backends):
            return Unavailable("not listed in OPWEAVE_BACKENDS", remedy=f"add {plugin.name} to OPWEAVE_BACKENDS")
        return None

    def rank(self, plugin: Plugin) -> int:
        """Place in ``OPWEAVE_BACKENDS``; plugins that are not listed come after all that are."""
        return next((i for i, name in enumerate(self.backends) if names(name, plugin)), len(self.backends))


def names(name: str, plugin: Plugin) -> bool:
    """Whether ``name`` means ``plugin``."""
    by_distribution = bool(plugin.distribution) and canonical(name) == canonical(plugin.distribution)
    return key(name) == key(plugin.name) or by_distribution
