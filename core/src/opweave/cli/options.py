"""Options that commands share, those of plugins too."""

from typing import Annotated

import typer

__all__ = ["Json"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
