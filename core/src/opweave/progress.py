"""A bar of progress for work that takes long, on a terminal: compiling before the first run, uploading weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import Final, TypeVar

__all__ = ["shown"]

PATIENCE: Final = 1.0
"""Seconds after which progress is shown."""

T = TypeVar("T")


def shown(work: Sequence[T], doing: str) -> Iterator[T]:
    """The items, with a bar of progress on standard error once they take long.

    Args:
        doing: what is being done with them, as the bar says it: ``"compiling"``.
    """
    start = monotonic()
    for i, item in enumerate(work):
        if monotonic() - start > PATIENCE:
            yield from _with_bar(work, i, doing)
            return
        yield item


def _with_bar(work: Sequence[T], done: int, doing: str) -> Iterable[T]:
    # importing opweave must not pay for it
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(doing, total=len(work), completed=done)
        for item in work[done:]:
            yield item
            progress.advance(task)
