"""The curves of a training on one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Final, NamedTuple

from opweave.errors import SchedulerError
from opweave_training.metrics import Epoch, Metrics

__all__ = ["curves"]

WIDTH: Final = 720
HEIGHT: Final = 200


class _Line(NamedTuple):
    """A curve in parts, between which it has no finite values."""

    label: str
    colour: str
    parts: list[str]
    last: float


class _Plot(NamedTuple):
    title: str
    low: float
    high: float
    lines: list[_Line]


def curves(history: Sequence[Epoch]) -> str:
    """Loss and accuracy of each epoch, in training and validation, and the learning rate, as an HTML page.

    Args:
        history: of `Trainer`.

    Raises:
        SchedulerError: no epochs.
    """
    if not history:
        raise SchedulerError("there are no epochs to plot")
    from jinja2 import Environment  # local: training must not pay for it

    plots = [
        _plot("loss", history, lambda m: m.loss),
        _plot("accuracy", history, lambda m: m.accuracy),
        _drawn("learning rate", {"rate": [row.rate for row in history]}),
    ]
    template = Path(__file__).with_name("curves.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        plots=[plot for plot in plots if plot.lines], history=history, width=WIDTH, height=HEIGHT
    )


def _plot(title: str, history: Sequence[Epoch], value: Callable[[Metrics], float]) -> _Plot:
    held = [None if row.validation is None else value(row.validation) for row in history]
    return _drawn(title, {"training": [value(row.train) for row in history], "validation": held})


def _drawn(title: str, found: Mapping[str, Sequence[float | None]]) -> _Plot:
    finite = [v for values in found.values() for v in values if v is not None and isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    up = HEIGHT / ((high - low) or 1.0)
    lines = []
    for (label, values), colour in zip(found.items(), ("#3b76b5", "#d9822b"), strict=False):
        across = WIDTH / max(len(values) - 1, 1)
        points = [
            f"{i * across:.1f},{HEIGHT - (v - low) * up:.1f}" if v is not None and isfinite(v) else ""
            for i, v in enumerate(values)
        ]
        parts = [list(part) for drawn, part in groupby(points, bool) if drawn]
        if parts:
            last = [v for v in values if v is not None][-1]
            # A single point is a line back to itself, which round ends make a dot.
            lines.append(_Line(label, colour, [" ".join(part if part[1:] else part * 2) for part in parts], last))
    return _Plot(title, low, high, lines)
