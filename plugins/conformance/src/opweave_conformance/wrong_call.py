"""`wrong_call`: what commands do about names that do not exist."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from opweave.cli.output import plain
from opweave.errors import UnknownNameError

__all__ = ["wrong_call"]


@contextmanager
def wrong_call() -> Iterator[None]:
    """Exits with 2 where a name does not exist: 1 says that the backend does not conform."""
    try:
        yield
    except UnknownNameError as error:
        print(plain(f"error: {error}"), file=sys.stderr)
        raise typer.Exit(2) from None
