"""`warm`: have the calls of a program compile before its first run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from opweave.errors import raise_backend_failure

if TYPE_CHECKING:
    from opweave.scheduler.run.runs import ProgramState

__all__ = ["warm"]

PATIENCE: Final = 1.0
"""Seconds after which progress is shown."""

T = TypeVar("T")


def warm(state: ProgramState) -> None:
    """Call the streams' ``_warm`` for every call of every slot."""
    state.check_open()
    work = [(plan.stream, call) for run_list in state.lists for plan in run_list.plans for call in plan.calls]
    for stream, call in _shown(work):
        try:
            stream._warm(call)
        except Exception as error:
            raise_backend_failure(error, stream.device.name, "compiling before the first run")


def _shown(work: list[T]) -> Iterator[T]:
    """The items, with a bar of progress once they take long."""
    start = monotonic()
    for i, item in enumerate(work):
        if monotonic() - start > PATIENCE:
            yield from _with_bar(work, i)
            return
        yield item


def _with_bar(work: list[T], done: int) -> Iterable[T]:
    # importing opweave must not pay for it
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(work), completed=done)
        for item in work[done:]:
            yield item
            progress.advance(task)
