"""Commands that plugins add by the hook ``opweave_cli``."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from opweave import registry
from opweave.cli import probe
from opweave.cli.output import plain, quiet_stdout
from opweave.errors import Broken
from opweave.registry import State

if TYPE_CHECKING:
    import typer

__all__ = ["add_plugin_commands", "collect"]


def collect() -> dict[str, Any]:
    """Import the plugins with hooks; returns the names of those that fail, and why, as a document."""
    known = registry.REGISTRY
    known.load_hook_modules()
    return {"broken": {record.name: record.error for record in known.plugins() if record.state is State.BROKEN}}


def add_plugin_commands(app: typer.Typer, reserved: Collection[str]) -> set[str]:
    """Add the plugins' commands to ``app``; returns their names. A plugin that fails is named on standard error; the
    others go on.

    The plugins are imported in another process first, so that none can take this one down.

    Args:
        reserved: names of commands that plugins may not use.
    """
    from typer import Typer  # `collect` needs none of it

    for name, why in probe.ask("extensions")["broken"].items():
        registry.REGISTRY.exclude(name, Broken(why))
        print(plain(f"opweave: no commands from plugin {name!r}: {why}"), file=sys.stderr)
    with quiet_stdout():
        registry.REGISTRY.load_hook_modules()
    used = set(reserved)
    for plugin, module in list(registry.REGISTRY.hooks.implementers("opweave_cli")):
        part = Typer()
        try:
            with quiet_stdout():
                registry.REGISTRY.hooks.call(module, "opweave_cli", app=part)
            names = _command_names(part)
            if names & used:
                raise ValueError(f"there is already a command {' and '.join(sorted(names & used))}")
        except (Exception, SystemExit) as error:
            # To standard error: it is not part of the command's output.
            print(f"opweave: no commands from plugin {plugin!r}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        used |= names
        app.registered_commands += part.registered_commands
        app.registered_groups += part.registered_groups
    return used - set(reserved)


def _command_names(part: typer.Typer) -> set[str]:
    """Names of the commands in ``part``. Raises typer's error if their parameters are invalid."""
    from typer.main import get_group

    return set(get_group(part).commands) if part.registered_commands or part.registered_groups else set()
