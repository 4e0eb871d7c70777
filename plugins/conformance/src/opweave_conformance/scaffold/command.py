"""``opweave new-backend``: writes a package and says what to do with it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from opweave import registry
from opweave.cli.options import writable_folder
from opweave.cli.output import plain
from opweave_conformance.scaffold.package import LICENCES, Package, ScaffoldError, write_package

__all__ = ["new_backend"]


def new_backend(
    name: Annotated[str, typer.Argument(help="Of the backend: acme, in a package opweave-acme.", metavar="NAME")],
    memory: Annotated[
        Literal["own", "host"],
        typer.Option("--memory", help="The device has its own memory, or uses the host's."),
    ] = "own",
    asynchronous: Annotated[bool, typer.Option("--async", help="Its stream queues work.")] = False,
    compiler: Annotated[bool, typer.Option("--compiler", help="Its stream compiles all steps of a split.")] = False,
    language: Annotated[
        Literal["python", "c"], typer.Option("--language", help="Of the kernels; those in C are bound by cffi.")
    ] = "python",
    licence: Annotated[
        str | None,
        typer.Option("--license", "--licence", metavar="SPDX", help=f"One of {', '.join(LICENCES)}. Default: asks."),
    ] = None,
    author: Annotated[str, typer.Option("--author", help="Who holds the copyright.")] = "",
    into: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="FOLDER", help="Default: opweave-NAME in the current folder.", callback=writable_folder
        ),
    ] = None,
) -> None:
    """Write the package of a new backend: device, five kernels, tests, workflow. It passes the suite as it stands."""
    package = Package(name, memory, asynchronous, compiler, language, licence or LICENCES[0], author)
    package.check(registry.REGISTRY)  # before anything is asked
    if licence is None:
        package = package._replace(licence=_ask())
    folder = into or Path(package.distribution)
    written = write_package(package, folder, registry.REGISTRY)
    for file in written:
        print(plain(str(file)))
    where = plain(shlex.quote(str(folder)))
    print(f"\ncd {where}\npip install -e '.[test]'\nopweave conformance {name} --seconds 30\npytest")


def _ask() -> str:
    """The licence that the person at the terminal names. Raises `ScaffoldError` where there is nobody to ask."""
    try:
        return str(typer.prompt(f"Licence ({', '.join(LICENCES)})", default=LICENCES[0]))
    except typer.Abort:
        raise ScaffoldError(f"say which licence the package has: --license {LICENCES[0]}, or another") from None
