"""`Operands`: the operands of consecutive steps as numbers, so that many of them are looked up by few calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count, repeat
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from opweave.scheduler.plan.splits import SplitStep, StorageView

__all__ = ["Operands", "pick"]

T = TypeVar("T")


def pick(values: Sequence[T], numbers: Sequence[int]) -> list[T]:
    """The values at the positions ``numbers``."""
    return list(map(values.__getitem__, numbers))


class Operands(NamedTuple):
    """What steps read and write, by numbers of views. Steps are sorted by how many sources they have.

    Attributes:
        views: each operand once.
        outs: for every step the number of its result.
        columns: for each number of sources how many steps have as many, and the numbers of all their first sources, of
            all their second ones and so on.
        ranks: for every step its place in the order of ``columns``.
    """

    views: Sequence[StorageView]
    outs: Sequence[int]
    columns: Sequence[tuple[int, Sequence[Sequence[int]]]]
    ranks: Sequence[int]

    @classmethod
    def of(cls, steps: Sequence[SplitStep]) -> Operands:
        """Those of ``steps``. Views that are one object are one operand."""
        outs, srcs = [step[2] for step in steps], [step[3] for step in steps]
        views = {id(view): view for view in chain(outs, chain.from_iterable(srcs))}
        number = dict(zip(views, count()))
        by_count: dict[int, list[int]] = {}
        for i, own in enumerate(srcs):
            by_count.setdefault(len(own), []).append(i)
        columns = [
            (
                len(some),
                [[number[id(view)] for view in column] for column in zip(*[srcs[i] for i in some], strict=True)],
            )
            for some in by_count.values()
        ]
        rank = dict(zip(chain.from_iterable(by_count.values()), count()))
        return cls(
            [*views.values()], [number[id(view)] for view in outs], columns, [rank[i] for i in range(len(steps))]
        )

    def sources(self, values: Sequence[T]) -> list[tuple[T, ...]]:
        """For every step what ``values`` have for its sources, given one value for each view."""
        rows: list[tuple[Any, ...]] = []
        for steps, columns in self.columns:
            rows += zip(*[pick(values, column) for column in columns], strict=True) if columns else repeat((), steps)
        return pick(rows, self.ranks)

    def places(self, buffers: Sequence[object], offsets: Sequence[int]) -> list[int]:
        """For every view a number: equal ones begin at the same byte. Buffers and offsets are given by storage id."""
        first = dict(zip(dict.fromkeys(map(id, buffers)), count(0, _APART)))
        starts = list(map(add, map(first.__getitem__, map(id, buffers)), offsets))
        return list(map(add, map(starts.__getitem__, map(_STORAGE, self.views)), map(_OFFSET, self.views)))


_APART: Final = 1 << 60  # more than the bytes of any buffer
_STORAGE, _OFFSET = itemgetter(0), itemgetter(1)  # of a `StorageView`
