"""`decisions`: which limits a device's kernels read, and which side of each the numbers were that it decided about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

from opweave.contract import Limit

__all__ = ["Decisions", "Side", "decisions", "merge"]

Side = Literal["below", "above"]
"""Of a limit: ``below``: it was not reached, or the work was not divided; ``above``: it was."""

Decisions = dict[str, dict[Side, int]]
"""By the name of a limit that was read: how often each side of it was taken. No side: its value was computed with, or
handed on to other code, which decides by itself."""


@contextmanager
def decisions() -> Iterator[Decisions]:
    """A ``with`` block in which the limits that are read are noted, and the sides that comparisons with them take."""
    found: Decisions = {}

    def observe(limit: Limit, value: int) -> int:
        return _Observed(value, found.setdefault(limit.name, {}))

    with Limit.observed(observe):
        yield found


def merge(into: Decisions, more: Mapping[str, Mapping[Side, int]]) -> None:
    """Add the counts of ``more``."""
    for name, sides in more.items():
        counts = into.setdefault(name, {})
        for side, count in sides.items():
            counts[side] = counts.get(side, 0) + count


class _Observed(int):
    """The value of a limit. Python asks it first where it is compared with another whole number."""

    sides: dict[Side, int]

    def __new__(cls, value: int, sides: dict[Side, int]) -> _Observed:
        self = super().__new__(cls, value)
        self.sides = sides
        return self

    def note(self, above: bool) -> None:
        side: Side = "above" if above else "below"
        self.sides[side] = self.sides.get(side, 0) + 1


def _method(name: str, follow: Callable[[_Observed, Any, Any], Any]) -> Callable[[_Observed, Any], Any]:
    """A method of whole numbers whose result goes through ``follow``, with the limit's value and the other number."""
    operate: Final = getattr(int, name)

    def method(self: _Observed, other: Any) -> Any:
        result = operate(self, other)
        return result if result is NotImplemented else follow(self, other, result)

    return method


def _compared(limit: _Observed, other: Any, holds: bool, *, above: bool) -> bool:
    """Note the side of a comparison. ``above``: where it holds, the other number reaches the limit."""
    limit.note(holds is above)
    if isinstance(other, _Observed):  # Python asks only the first of two
        other.note(holds is not above)
    return holds


def _divided(limit: _Observed, other: int, result: int) -> int:
    """Note whether a number that is divided by the limit reaches beyond it."""
    limit.note(abs(other) > int(limit))
    return result


def _computed(limit: _Observed, _other: Any, result: int) -> _Observed:
    """A result, such as a limit for each thread, decides as the limit does."""
    return _Observed(result, limit.sides)


for _name, _above in (("__lt__", True), ("__le__", True), ("__gt__", False), ("__ge__", False)):
    setattr(_Observed, _name, _method(_name, partial(_compared, above=_above)))
for _name in ("__rfloordiv__", "__rmod__"):
    setattr(_Observed, _name, _method(_name, _divided))
for _name in ("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__floordiv__"):
    setattr(_Observed, _name, _method(_name, _computed))
