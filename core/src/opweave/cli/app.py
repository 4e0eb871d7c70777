"""The command line: commands and options."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from opweave import registry
from opweave.cli.devices import show_devices
from opweave.cli.doctor import show_doctor
from opweave.cli.extensions import add_plugin_commands
from opweave.cli.options import Json
from opweave.cli.output import accept_any_text, plain, quiet_stdout
from opweave.cli.plugins import show_plugins
from opweave.cli.probe import SECONDS, leave_out_deadly
from opweave.cli.weights import show_weights
from opweave.errors import OpweaveError
from opweave.packages import pip_install
from opweave.registry.discovery import core_version

__all__ = ["build_app", "main"]

_COMMANDS = ("devices", "doctor", "plugins", "weights")
_PACKAGES = {
    "bench": "opweave-conformance",
    "conformance": "opweave-conformance",
    "fuzz": "opweave-conformance",
    "new-backend": "opweave-conformance",
    "onnx": "opweave-onnx",
    "opencl": "opweave-opencl",
    "profile": "opweave-cost",
    "serve-devices": "opweave-remote",
    "what-if": "opweave-cost",
}
"""Commands of this project's other packages, which may not be installed."""
_Isolated = Annotated[
    bool, typer.Option("--isolated", help="Load each plugin in a process of its own; default: only after a crash.")
]
_Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Timeout of the process that loads the plugins."),
]


def build_app() -> typer.Typer:
    """The built-in commands."""
    app = typer.Typer(
        name="opweave",
        help="Run one compute graph on many devices.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    app.command("devices")(_devices)
    app.command("doctor")(_doctor)
    app.command("plugins")(_plugins)
    app.command("weights")(_weights)
    return app


def main() -> None:
    """Run the command that ``sys.argv`` names. Exits with 0, 1 for an error, 2 for a wrong call."""
    accept_any_text()
    app = build_app()
    arguments = _arguments()
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    # Plugins are imported only if the command may be one of theirs, so that none can break the built-in commands.
    if command not in _COMMANDS and not {"--version", "-V"} & set(arguments):
        added = add_plugin_commands(app, _COMMANDS)
        if command in _PACKAGES and command not in added:
            package = _PACKAGES[command]
            print(
                f"error: the command {command!r} is one of {package}, which is not installed or cannot be loaded\n"
                f"  remedy: {pip_install(package)}; `opweave plugins` shows why a plugin is not loaded",
                file=sys.stderr,
            )
            sys.exit(2)
    try:
        if command is not None and command not in _COMMANDS:  # those make the devices that they need
            with quiet_stdout():
                registry.REGISTRY.make_devices()
        app(prog_name="opweave")
    except OpweaveError as error:
        notes = getattr(error, "__notes__", ())
        print(plain("\n".join([f"error: {error}", *notes])), file=sys.stderr)
        sys.exit(1)
    finally:
        atexit.unregister(_seal_stdout)
        atexit.register(_seal_stdout)  # last, to be called first


def _arguments() -> list[str]:
    """What was typed behind the program's name, also so far where a shell asks how to complete it."""
    typed = os.environ.get("COMP_WORDS", "") if "_OPWEAVE_COMPLETE" in os.environ else ""
    return typed.split()[1:] or sys.argv[1:]


def _seal_stdout() -> None:
    """From here on, what plugins and drivers print while the process ends goes to standard error."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        os.dup2(2, 1)
        sys.stdout = sys.stderr


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"opweave {core_version() or '(not installed)'}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _devices(
    as_json: Json = False,
    features: Annotated[bool, typer.Option("--features", help="Show the features that drivers report.")] = False,
    isolated: _Isolated = False,
    timeout: _Timeout = SECONDS,
) -> None:
    """List the devices of all plugins, the preferred first."""
    show_devices(as_json=as_json, features=features, isolated=isolated, seconds=timeout)


def _doctor(
    as_json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 also if something is slow.")] = False,
    isolated: _Isolated = False,
    timeout: _Timeout = SECONDS,
) -> None:
    """Find what is wrong or slow on this machine, and how to fix it. Exits with 1 if something is wrong."""
    found = show_doctor(as_json=as_json, isolated=isolated, seconds=timeout)
    if "wrong" in found or (strict and "slow" in found):
        raise typer.Exit(1)


def _plugins(
    as_json: Json = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if a plugin is broken or incompatible.")
    ] = False,
    isolated: _Isolated = False,
    timeout: _Timeout = SECONDS,
) -> None:
    """List the installed plugins; for those that cannot be used, cause and remedy."""
    plugins = show_plugins(as_json=as_json, isolated=isolated, seconds=timeout)
    if strict and any(plugin["state"] in ("broken", "incompatible") for plugin in plugins):
        raise typer.Exit(1)


def _weights(
    path: Annotated[str, typer.Argument(help="A file, an index or a folder of weights.", metavar="FILE")],
    names: Annotated[
        list[str] | None, typer.Argument(help="Only tensors whose name matches, e.g. 'layers.0.*'.", metavar="PATTERN")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the tensors of a file or folder of weights: name, dtype, shape, bytes; and its metadata."""
    leave_out_deadly(question="extensions")
    show_weights(path, names or (), as_json=as_json)
