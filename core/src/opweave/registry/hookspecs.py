"""The hooks that a plugin's module may implement. Each may leave out arguments that it does not need.

A module is imported when one of its hooks is asked for, also where nobody asks for its devices: keep its top level
cheap, and import a driver or a framework within the functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pluggy import HookspecMarker

if TYPE_CHECKING:
    from opweave.contract.backend import Backend
    from opweave.contract.device import Device
    from opweave.graph.opdef import OpDef
    from opweave.registry.records import Diagnosis, FileFormat
    from opweave.registry.registry import Registry

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
    """Add commands to the command line; ``app`` is a ``typer.Typer``. Existing commands cannot be replaced.

    Called for ``opweave --help`` and for commands that are not built in; no devices are asked for before.
    """


@hookspec
def opweave_doctor(registry: Registry, devices: Sequence[Device]) -> Iterable[Diagnosis]:  # type: ignore[empty-body]
    """What ``opweave doctor`` says about the plugin here: a `Diagnosis` for each thing that it looks at.

    Called when all plugins are loaded, also where this one is unavailable. A check that fails is told as such, and the
    others go on.

    Args:
        registry: the one that loaded the plugin.
        devices: the plugin's own that are in use; none where it is unavailable.
    """


@hookspec
def opweave_formats() -> Iterable[FileFormat]:  # type: ignore[empty-body]
    """File formats of weights and models that the plugin reads; asked when a file is read for the first time."""


@hookspec
def opweave_program_built(program: Any) -> None:
    """A scheduler has built ``program``. Look, keep it or wrap what it needs; a failure here becomes a warning.

    Only plugins that are loaded are told.
    """
