"""Learning rates as functions of the number of the step, counted from 0."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, isfinite, pi
from operator import index as as_index
from typing import Any, Final

from opweave.errors import DTypeError, SchedulerError
from opweave.ops.operands import is_number

__all__ = ["Schedule", "as_count", "as_rate", "as_schedule", "cosine", "linear", "steps"]

Schedule = Callable[[int], float]

SAMPLED: Final = (0, 1, 2, 5, 10, 100, 1000, 10_000)
"""Steps by whose values a checkpoint recognises a schedule."""


def cosine(rate: float, total: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Half a cosine from ``rate`` down to ``final`` at step ``total``, and ``final`` from there on: Loshchilov and
    Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017. The first ``warmup`` steps go up to it.

    Raises:
        DTypeError: not 0 <= warmup < total, or a rate that is no finite number of at least 0.
    """
    _check_rates(rate, final)
    _check(total, warmup)

    def at(step: int) -> float:
        if step < warmup:
            return _warm(rate, step, warmup)
        return final + (rate - final) * (1 + cos(pi * _done(step, total, warmup))) / 2

    return at


def linear(rate: float, total: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """A straight line from ``rate`` to ``final``; otherwise as `cosine`."""
    _check_rates(rate, final)
    _check(total, warmup)

    def at(step: int) -> float:
        if step < warmup:
            return _warm(rate, step, warmup)
        return rate + (final - rate) * _done(step, total, warmup)

    return at


def steps(rate: float, every: int, factor: float = 0.1) -> Schedule:
    """``rate``, multiplied by ``factor`` after each ``every`` steps.

    Raises:
        DTypeError: ``every`` is not positive, or a rate or factor is no finite number of at least 0.
    """
    _check_rates(rate, factor)
    if not isinstance(every, int) or every < 1:
        raise DTypeError(f"steps: every is a positive number of steps, not {every!r}")
    return lambda step: rate * factor ** (step // every)


def as_rate(what: str, value: float) -> float:
    """A learning rate, or a number that is treated like one.

    Raises:
        DTypeError: it is no finite number of at least 0.
    """
    if not (is_number(value) and isfinite(value) and value >= 0):
        raise DTypeError(f"{what} is a finite number of at least 0, not {value!r}")
    return float(value)


def as_schedule(rate: float | Schedule) -> Schedule:
    """A schedule, or a number as the schedule that stays there; raises as `as_rate`."""
    if callable(rate):
        return rate
    constant = as_rate("a learning rate", rate)
    return lambda step: constant


def as_count(what: str, value: Any, least: int = 1) -> int:
    """A number of something as a Python int.

    Raises:
        SchedulerError: it is no integer of at least ``least``.
    """
    try:
        number = least - 1 if isinstance(value, bool) else int(as_index(value))
    except TypeError:
        number = least - 1
    if number < least:
        raise SchedulerError(f"{what} is an integer of at least {least}, not {value!r:.60}")
    return number


def _check_rates(*rates: float) -> None:
    for rate in rates:
        as_rate("a learning rate, and its factor,", rate)


def _check(total: int, warmup: int) -> None:
    if not 0 <= warmup < total:
        raise DTypeError(f"a schedule has more steps in all than to warm up, not {total!r} and {warmup!r}")


def _warm(rate: float, step: int, warmup: int) -> float:
    return rate * (step + 1) / (warmup + 1)


def _done(step: int, total: int, warmup: int) -> float:
    return min((step - warmup) / (total - warmup), 1.0)
