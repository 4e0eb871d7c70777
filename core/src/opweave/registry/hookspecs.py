"""The hooks that a plugin's module may implement. An implementation may leave out arguments that it does not need.

A module is imported when one of its hooks is called, even if its devices are not used. So keep the import of the module
cheap, and import drivers and frameworks within the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pluggy import HookspecMarker

if TYPE_CHECKING:
    from opweave.contract.backend import Backend
    from opweave.graph.opdef import OpDef
    from opweave.registry.records import Diagnosis, FileFormat
    from opweave.runtime.device import Device

hookspec = HookspecMarker("opweave")


@hookspec
def opweave_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """The plugin's backends; called once when it is loaded.

    A single backend gets the name of the entry point. If there are several, each sets a ``name`` of its own; if one is
    unavailable, the others are used all the same.
    """


@hookspec
def opweave_score() -> float:  # type: ignore[empty-body]
    """How well this variant of the plugin (entry point ``acme@cu12``) suits this machine: that of the highest score is
    used, one of 0 not at all. Called before the other hooks; without it the score is 1."""


@hookspec
def opweave_ops() -> Iterable[OpDef]:  # type: ignore[empty-body]
    """Operations that the plugin defines; called once when it is loaded, before `opweave_backends`."""


@hookspec
def opweave_cli(app: Any) -> None:
    """Add commands to the command line; ``app`` is a ``typer.Typer``. Existing commands cannot be replaced.

    Called for ``opweave --help`` and for commands that are not built in. No devices are looked for.
    """


@hookspec
def opweave_doctor(registry: Any, devices: Sequence[Device]) -> Iterable[Diagnosis]:  # type: ignore[empty-body]
    """What ``opweave doctor`` prints about the plugin: a `Diagnosis` for each thing that it checks.

    Called after all plugins were loaded, also if this one is unavailable. If the hook raises, ``opweave doctor``
    reports that and goes on with the other plugins.

    Args:
        registry: the `opweave.registry.Registry` that loaded the plugin.
        devices: the plugin's usable devices; none if it is unavailable.
    """


@hookspec
def opweave_formats() -> Iterable[FileFormat]:  # type: ignore[empty-body]
    """File formats of weights and models that the plugin reads; called when a file is loaded."""


@hookspec
def opweave_placements() -> Mapping[str, Callable[..., Any]]:  # type: ignore[empty-body]
    """Strategies of placement by name, for ``Scheduler(placement=name)``: functions of the type
    `opweave.scheduler.place.strategy.Strategy`. Called when one other than ``"priority"`` is asked for. No devices are
    looked for."""


@hookspec
def opweave_rewrites() -> Mapping[str, Callable[..., Any]]:  # type: ignore[empty-body]
    """Rewrites of graphs by name: functions of the type `opweave.scheduler.place.strategy.Rewrite`. Called when a
    scheduler is made with a ``memory_limit``, for that of the name ``"memory_limit"``. No devices are looked for."""


@hookspec
def opweave_make_devices(names: Sequence[str]) -> None:
    """Make the devices among ``names`` that are only there once somebody has asked for them, such as combinations of
    others, and those that an environment variable of the plugin lists. Called by commands before they look for devices.
    An error ends the command."""


@hookspec
def opweave_program_built(program: Any) -> None:
    """Called after a scheduler has built ``program``, to inspect, record or observe it. A failure becomes a warning.

    Only plugins that are already loaded are called.
    """
