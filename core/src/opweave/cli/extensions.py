"""Commands that plugins add by the hook ``opweave_cli``."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import typer
from typer.main import get_command_name, get_group

from opweave import registry
from opweave.cli import probe
from opweave.cli.output import plain, quiet_stdout
from opweave.errors import Broken
from opweave.registry import State

__all__ = ["add_plugin_commands", "collect"]


def collect() -> dict[str, Any]:
    """Names of the plugins whose module cannot be imported, and why."""
    known = registry.REGISTRY
    known.load_hook_modules()
    return {"broken": {record.name: record.error for record in known.plugins() if record.state is State.BROKEN}}


def add_plugin_commands(app: typer.Typer, reserved: Collection[str]) -> None:
    """Add the plugins' commands to ``app``. A plugin that fails is named on standard error; the others go on.

    The plugins are imported in another process first, so that none can take this one down.

    Args:
        reserved: names of commands that no plugin may take.
    """
    for name, why in probe.ask("extensions")["broken"].items():
        registry.REGISTRY.exclude(name, Broken(why))
        print(plain(f"opweave: no commands from plugin {name!r}: {why}"), file=sys.stderr)
    with quiet_stdout():
        registry.REGISTRY.load_hook_modules()
    taken = set(reserved)
    for plugin, module in list(registry.REGISTRY.hooks.implementers("opweave_cli")):
        part = typer.Typer()
        try:
            with quiet_stdout():
                registry.REGISTRY.hooks.call(module, "opweave_cli", app=part)
            names = _command_names(part)
            if names & taken:
                raise ValueError(f"the command {' and '.join(sorted(names & taken))} is taken")
        except (Exception, SystemExit) as error:
            # To standard error, and plain: this is about a plugin and not the answer to what was asked.
            print(f"opweave: no commands from plugin {plugin!r}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        taken |= names
        app.registered_commands += part.registered_commands
        app.registered_groups += part.registered_groups


def _command_names(part: typer.Typer) -> set[str]:
    """Names of the commands in ``part``. Raises whatever typer finds wrong with their parameters."""
    if part.registered_commands or part.registered_groups:
        get_group(part)
    commands = {c.name or get_command_name(c.callback.__name__) for c in part.registered_commands if c.callback}
    return commands | {str(group.name) for group in part.registered_groups if isinstance(group.name, str)}
