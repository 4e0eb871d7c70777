"""The hooks that a plugin's module may implement. Each may leave out arguments that it does not need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pluggy import HookspecMarker

if TYPE_CHECKING:
    from opweave.contract.device import Backend
    from opweave.graph.opdef import OpDef

hookspec = HookspecMarker("opweave")


@hookspec
def opweave_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """The plugin's backends, called once when it is loaded.

    A single one is called like the entry point. Of several each has a ``name`` of its own. Where one is unavailable
    the others are used all the same.
    """


@hookspec
def opweave_ops() -> Iterable[OpDef]:  # type: ignore[empty-body]
    """Operations that the plugin defines, called once when it is loaded, before `opweave_backends`."""


@hookspec
def opweave_cli(app: Any) -> None:
    """Add commands to the command line; ``app`` is a ``typer.Typer``. Existing commands cannot be replaced."""


@hookspec
def opweave_program_built(program: Any) -> None:
    """A scheduler has built ``program``. Look, keep it or wrap what it needs; a failure here becomes a warning."""
