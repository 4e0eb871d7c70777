"""`decisions`: which limits a device's kernels read, and which side of each the numbers were that it decided about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

    _sides: dict[Side, int]

    def __new__(cls, value: int, sides: dict[Side, int]) -> _Observed:
        self = super().__new__(cls, value)
        self._sides = sides
        return self

    def note(self, above: bool) -> None:
        side: Side = "above" if above else "below"
        self._sides[side] = self._sides.get(side, 0) + 1


def _compared(name: str, above: bool) -> Callable[[_Observed, Any], Any]:
    """A comparison that notes its side. ``above``: where it holds, the other number reaches the limit."""
    compare: Final = getattr(int, name)

    def method(self: _Observed, other: Any) -> Any:
        holds = compare(self, other)
        if holds is not NotImplemented:
            self.note(holds is above)
            if isinstance(other, _Observed):  # Python asks only the first of two
                other.note(holds is not above)
        return holds

    return method


def _divided(name: str) -> Callable[[_Observed, Any], Any]:
    """A division of another number by the limit, which notes whether that reaches beyond it."""
    divide: Final = getattr(int, name)

    def method(self: _Observed, other: Any) -> Any:
        result = divide(self, other)
        if result is not NotImplemented:
            self.note(abs(other) > int(self))
        return result

    return method


def _computed(name: str) -> Callable[[_Observed, Any], Any]:
    """An operation whose result, such as a limit for each thread, decides as the limit does."""
    compute: Final = getattr(int, name)

    def method(self: _Observed, other: Any) -> Any:
        result = compute(self, other)
        return result if result is NotImplemented else _Observed(result, self._sides)

    return method


for _name, _above in (("__lt__", True), ("__le__", True), ("__gt__", False), ("__ge__", False)):
    setattr(_Observed, _name, _compared(_name, _above))
for _name in ("__rfloordiv__", "__rmod__"):
    setattr(_Observed, _name, _divided(_name))
for _name in ("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__floordiv__"):
    setattr(_Observed, _name, _computed(_name))
