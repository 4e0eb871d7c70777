"""The curves of a training on one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Final, NamedTuple

from opweave.errors import SchedulerError
from opweave.training.metrics import Epoch, Metrics

__all__ = ["curves"]

WIDTH: Final = 720
HEIGHT: Final = 200


class _Line(NamedTuple):
    label: str
    colour: str
    points: str
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
    found = {"training": [value(row.train) for row in history]}
    held = [row.validation for row in history if row.validation is not None]
    if len(held) == len(history):
        found["validation"] = [value(metrics) for metrics in held]
    return _drawn(title, found)


def _drawn(title: str, found: dict[str, list[float]]) -> _Plot:
    finite = [v for values in found.values() for v in values if isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    lines = []
    for (label, values), colour in zip(found.items(), ("#3b76b5", "#d9822b"), strict=False):
        across = WIDTH / max(len(values) - 1, 1)
        up = HEIGHT / ((high - low) or 1.0)
        points = [f"{i * across:.1f},{HEIGHT - (v - low) * up:.1f}" for i, v in enumerate(values) if isfinite(v)]
        if points:
            lines.append(_Line(label, colour, " ".join(points), values[-1]))
    return _Plot(title, low, high, lines)
