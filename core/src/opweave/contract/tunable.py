"""`Limit`: a number by which a kernel chooses its path; `Tunable`: one of which each machine has a best value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

from opweave.errors import PluginError
from opweave.graph.tensor import Signature, Tensor

__all__ = ["NEVER", "Limit", "Limits", "Tunable"]

NEVER: Final = 1 << 62
"""A value that no size reaches."""


class Limit:
    """A number that decides which path of a kernel runs, or how large the pieces of its work are.

    A kernel is many programs: by size, by threads, by the parts that it cuts its work into. Which of them runs is
    decided by numbers that small operands do not reach. A kernel that reads each such number here can be proven on
    small ones: the conformance suite sets the limits of a device to small and large values, and runs the cases of the
    operations that read them (``path-...``, level 2).

    Kernels read ``value`` when they are asked for a workspace, and when they are bound; never while they run. It does
    not change while programs are made, so that a kernel finds the workspace that it asked for.

    Args:
        name: what it is, with its unit, as a Python identifier: ``"longest_row"``. Unique within a device.
        default: its value.
        smallest, largest: the least and the greatest value that make sense.
        bounds: the least and the greatest value with which results are right; what a longest sum is allowed to be is
            bounded by the errors that add up in it. Default: any positive number.

    Attributes:
        value: the number in force.

    Raises:
        PluginError: a number is no positive whole number, or they are not in order.
    """

    __slots__ = ("_value", "bounds", "default", "largest", "name", "smallest")

    version: ClassVar[int] = 0
    """How often a limit has been set in this process; part of the key of what `Stream.artefact` keeps."""
    _observer: ClassVar[Callable[[Limit, int], int] | None] = None

    def __init__(
        self, name: str, default: int, smallest: int, largest: int, *, bounds: tuple[int, int] = (1, NEVER)
    ) -> None:
        numbers = bounds[0], smallest, default, largest, bounds[1]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise PluginError(f"limit {name}: {list(numbers)!r:.60} are not all positive whole numbers")
        if list(numbers) != sorted(numbers):
            raise PluginError(f"limit {name}: bounds, smallest, default and largest value are not in order: {numbers}")
        self.name: Final = name
        self.default: Final = default
        self.smallest: Final = smallest
        self.largest: Final = largest
        self.bounds: Final = bounds
        self._value = default

    @property
    def value(self) -> int:
        """The number in force."""
        return self._value if Limit._observer is None else Limit._observer(self, self._value)

    @value.setter
    def value(self, value: int) -> None:
        self._value = value
        Limit.version += 1
        Signature.answers += 1

    def values(self) -> dict[str, int]:
        """What the conformance suite sets it to, each once: 1, the smallest value that makes sense, 13, which divides
        few sizes, the largest value that makes sense, and `NEVER`, or the bounds where these are narrower (and 13 more
        than the least); of a choice between no more than eight ways, all of them, each named by its number."""
        least, most = self.bounds
        if most - least < 8:
            return {str(value): value for value in range(least, most + 1)}
        few = 13 if least < 13 else least + 13
        wanted = {"1": 1, "smallest": self.smallest, "few": few, "largest": self.largest, "never": NEVER}
        found: dict[str, int] = {}
        for name, value in wanted.items():
            value = min(max(value, least), most)
            if value not in found.values():
                found[name] = value
        return found

    @staticmethod
    @contextmanager
    def observed(observer: Callable[[Limit, int], int]) -> Iterator[None]:
        """A ``with`` block in which a limit that is read, in any thread, is what ``observer`` returns for it and its
        value: the conformance suite counts reads, and on which side of a limit numbers lie."""
        before, Limit._observer = Limit._observer, observer
        try:
            yield
        finally:
            Limit._observer = before

    @contextmanager
    def at(self, value: int) -> Iterator[None]:
        """A ``with`` block in which it has another value; for tests, between programs."""
        before = self._value
        self.value = value
        try:
            yield
        finally:
            self.value = before

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}={self._value}>"


class Limits:
    """The limits of a plugin's kernels, collected where each is declared, beside its kernel::

        limit = Limits()
        LONGEST_ROW = limit("longest_row", 1 << 13, 64, 1 << 13)

    `Device.limits` lists those of all modules that were imported: ``(*self.tunables, *limit)``.
    """

    def __init__(self) -> None:
        self._declared: Final[list[Limit]] = []

    def __call__(
        self, name: str, default: int, smallest: int, largest: int, *, bounds: tuple[int, int] = (1, NEVER)
    ) -> Limit:
        """A new limit; arguments and errors as of `Limit`."""
        self._declared.append(Limit(name, default, smallest, largest, bounds=bounds))
        return self._declared[-1]

    def __iter__(self) -> Iterator[Limit]:
        return iter(self._declared)


class Tunable(Limit):
    """A limit of which each machine has a best value of its own, with the nodes to measure it.

    Its value is the default until `opweave profile` has measured the device; what that found is set when the device is
    next loaded, in another process too.

    Args:
        name: as of `Limit`.
        default: its value where nothing was measured: one that is never far from the best.
        choices: the values that are measured, the default among them. For a limit they are sizes between which the
            samples lie.
        samples: makes the nodes that are measured, as those of `opweave.graph.opdef.Sample`. The chosen value is the
            one with which these take the least time, each compared with its own least.
        bounds: as of `Limit`.

    Raises:
        PluginError: the default is none of the choices, or a choice is no positive whole number.
    """

    __slots__ = ("choices", "samples")

    def __init__(
        self,
        name: str,
        default: int,
        choices: Sequence[int],
        samples: Callable[[], Sequence[Tensor]],
        *,
        bounds: tuple[int, int] = (1, NEVER),
    ) -> None:
        if not all(type(choice) is int and choice > 0 for choice in choices):
            raise PluginError(f"tunable {name}: {list(choices)!r:.60} are not all positive whole numbers")
        if default not in choices:
            raise PluginError(f"tunable {name}: its default {default!r:.20} is none of its choices")
        super().__init__(name, default, min(choices), max(choices), bounds=bounds)
        self.choices: Final = tuple(choices)
        self.samples: Final = samples
