"""Variants of a plugin, of which one is used: wheels of one backend for several drivers or processors.

Entry points with one name and different words behind an ``@`` are variants: ``acme@cu12``, ``acme@cu13``. Each says by
a score how well it suits this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from opweave.errors import Unavailable
from opweave.registry.naming import key
from opweave.registry.records import Plugin, State

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["rank", "settle"]


def rank(
    plugin: Plugin,
    plugins: Sequence[Plugin],
    forced: str,
    attempt: Callable[[Plugin, Callable[[], object]], object],
    ask: Callable[[Plugin], None],
) -> list[Plugin]:
    """The variants to try, the best first; of equal scores the one whose name comes first.

    Those that score 0, are not the one that is forced, or whose score cannot be had, are failed with the reason.

    Args:
        plugin: one of the variants.
        plugins: all plugins.
        forced: the variant that the user asks for, or ``""``.
        attempt: runs code of a plugin; what it raises becomes the plugin's failure.
        ask: imports a variant and sets its score.
    """
    family = [p for p in plugins if p.variant and key(p.name) == key(plugin.name) and p.state is State.DISCOVERED]
    if forced and not any(key(p.variant) == key(forced) for p in plugins if key(p.name) == key(plugin.name)):
        known = ", ".join(sorted(p.variant for p in family))
        for other in family:
            other.fail(Unavailable(f"OPWEAVE_VARIANTS asks for the variant {forced!r} of {plugin.name}, which is not "
                                   "installed", remedy=f"variants that are: {known}"))  # fmt: skip
        return []
    for variant in family:
        if forced and key(variant.variant) != key(forced):
            why = f"OPWEAVE_VARIANTS takes the variant {forced} of {plugin.name}"
            variant.fail(Unavailable(why, remedy=_taking(variant)), state=State.DISABLED)
        else:
            attempt(variant, partial(ask, variant))
    left = [p for p in family if p.state is State.DISCOVERED]
    for variant in left:
        if variant.score <= 0 and not forced:
            variant.fail(Unavailable("it does not suit this machine: its score is 0", remedy=_taking(variant)))
    return sorted([p for p in left if p.state is State.DISCOVERED], key=lambda p: (-p.score, key(p.variant)))


def settle(taken: Plugin, ranked: Sequence[Plugin]) -> None:
    """Disable the variants that were not tried, because ``taken`` works."""
    for other in ranked:
        if other.state is State.DISCOVERED:
            why = f"the variant {taken.variant} of {taken.name} is taken, with score {taken.score:g}; this one has "
            other.fail(Unavailable(f"{why}{other.score:g}", remedy=_taking(other)), state=State.DISABLED)


def _taking(variant: Plugin) -> str:
    return f"OPWEAVE_VARIANTS={variant.name}={variant.variant} takes it all the same"
