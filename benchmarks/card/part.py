"""`Part`: one thing that ``benchmarks/gpu.py`` tries, and `Context`: what a part is given, in a process of its own.

A part writes one JSON document a line into a file as it goes, so that whatever happens to its process, what it found
before is known:

=========  ===========================================================================================================
kind       the other entries
=========  ===========================================================================================================
row        ``table``, ``figures``: a row of figures
failure    ``what``, ``why``: something is wrong
begin      ``what``: what is tried from now on, for a process that ends or hangs while it does
done       ``what``: it was tried; a part that `Part.resumes` does not try it again
absent     ``why``: what the part is about is not on this machine
=========  ===========================================================================================================
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, NoReturn, TypeVar

__all__ = ["Absent", "Context", "Part"]

T = TypeVar("T")


class Part(NamedTuple):
    """One thing to try.

    Attributes:
        name: on the command line and in the results.
        title: for the page.
        function: ``"module:function"`` that is called with a `Context`.
        seconds: its limit, of runs of eight minutes; others in proportion.
        fills: it takes the time that is left.
        resumes: where its process ends by itself (a device that is lost takes it along), it is started again, without
            what it has done.
        workers: so many processes of it run at once; ``0``: half as many as there are processors, at most eight.
        beside: it runs beside the parts before the next one that is `alone`.
        alone: it measures times; nothing else runs meanwhile.
        short: it is in the shortest form.
        environment: variables of its process.
    """

    name: str
    title: str
    function: str
    seconds: float
    fills: bool = False
    resumes: bool = False
    workers: int = 1
    beside: bool = False
    alone: bool = False
    short: bool = True
    environment: tuple[tuple[str, str], ...] = ()


class Absent(Exception):
    """What a part is about is not on this machine."""


@dataclass
class Context:
    """What a part's function is given.

    Attributes:
        device: name of the device to try.
        short: the shortest form: smallest sizes, one sample.
        seconds: how long the part may take.
        seed: of all random values.
        worker, workers: the number of this process of the part, and how many there are.
        file: for the lines.
        skip: what an earlier process of the part has done or did not survive.
    """

    device: str
    short: bool
    seconds: float
    seed: int
    worker: int
    workers: int
    file: Path
    skip: frozenset[str] = frozenset()
    began: float = field(default_factory=monotonic)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.began + self.seconds - monotonic()

    @property
    def is_stand_in(self) -> bool:
        """Whether the device plays a card."""
        return not self.device.startswith("torch:cuda")

    def pick(self, short: T, stand_in: T, card: T) -> T:
        """The size to try: the shortest form, what a processor takes some seconds for, or what a card is there for."""
        return short if self.short else stand_in if self.is_stand_in else card

    def row(self, table: str, /, **figures: Any) -> None:
        self._write(kind="row", table=table, figures=figures)

    def failure(self, what: str, why: str) -> None:
        self._write(kind="failure", what=what, why=why)

    def begin(self, what: str) -> None:
        self._write(kind="begin", what=what)

    def done(self, what: str) -> None:
        self._write(kind="done", what=what)

    def absent(self, why: str) -> NoReturn:
        raise Absent(why)

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """An exception in the block is a failure of ``what``, after which the part goes on."""
        self.begin(what)
        try:
            yield
        except Absent as error:
            self.row("not here", what=what, why=str(error))
        except Exception as error:
            traceback.print_exc()
            self.failure(what, f"{type(error).__name__}: {error}")
        self.done(what)

    def _write(self, **line: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:  # closed, so that a crash loses nothing
            file.write(json.dumps(line, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    """Numbers of NumPy as Python's, everything else as text."""
    return value.item() if hasattr(value, "item") else str(value)
