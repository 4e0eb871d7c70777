"""Commands that plugins add by the hook ``opweave_cli``."""

from __future__ import annotations

import sys
from collections.abc import Collection

import typer
from typer.main import get_command_name, get_group

from opweave import registry
from opweave.cli.output import quiet_stdout

__all__ = ["add_plugin_commands"]


def add_plugin_commands(app: typer.Typer, reserved: Collection[str]) -> None:
    """Add the plugins' commands to ``app``. A plugin that fails is named on standard error; the others go on.

    Args:
        reserved: names of commands that no plugin may take.
    """
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
