"""What a check is: a question to a device that is answered by passing, being refused, not applying, or failing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from opweave.conformance.check import generator
from opweave.conformance.result import Result

if TYPE_CHECKING:
    from opweave.contract.backend import Backend
    from opweave.contract.device import Device
    from opweave.registry.records import PluginRecord

__all__ = [
    "Check", "Checklist", "Inapplicable", "Mismatch", "Subject", "expect", "expect_equal",
    "expect_raises", "inapplicable",
]  # fmt: skip


class Subject(NamedTuple):
    """What is examined.

    Attributes:
        record: what the registry knows about the plugin.
        backend: the plugin's backend.
        devices: those of its devices that are examined.
        device: the one that is examined now; for checks of the backend as a whole, the first.
        rng: the random numbers of the check.
        seed: what they come from.
    """

    record: PluginRecord
    backend: Backend
    devices: tuple[Device, ...]
    device: Device
    rng: np.random.Generator
    seed: int


class Check(NamedTuple):
    """One thing to find out.

    Attributes:
        id: unique; what patterns are matched with.
        level: 0 hygiene, 1 memory, 2 operations, 3 asynchrony, 4 beside a second device, 5 faults.
        about: what has to hold, in a sentence.
        ask: does it; raises `Mismatch` where the answer is no, `Inapplicable` where there is no question.
        per_device: it is asked for each device, else once for the backend.
        op, dtype: the row and the column of the matrix, for cases.
    """

    id: str
    level: int
    about: str
    ask: Callable[[Subject], Result | None]
    per_device: bool = True
    op: str = ""
    dtype: str = ""

    def perform(self, subject: Subject) -> Result:
        """Ask, whatever happens meanwhile."""
        try:
            with np.errstate(all="ignore"):
                result = self.ask(subject)
                return Result("passed") if result is None else result
        except Inapplicable as why:
            return Result("skipped", str(why))
        except Mismatch as why:
            return Result("failed", str(why))
        except Exception as error:
            return Result("failed", f"{type(error).__name__}: {error}")


class Checklist:
    """The checks of a level, collected by decorator. The first line of the docstring tells what has to hold::

    memory = Checklist(1, "memory")

    @memory("fill")
    def _(subject: Subject) -> None: ...
    """

    def __init__(self, level: int, prefix: str, *, per_device: bool = True) -> None:
        self.level, self.prefix, self.per_device = level, prefix, per_device
        self.checks: list[Check] = []

    def __call__(self, name: str) -> Callable[[Callable[[Subject], None]], None]:
        def register(ask: Callable[[Subject], None]) -> None:
            about = (ask.__doc__ or "").strip().split("\n")[0]
            self.checks.append(Check(f"{self.prefix}-{name}", self.level, about, ask, self.per_device))

        return register


def subject_for(check: str, record: PluginRecord, backend: Backend, devices: tuple[Device, ...], device: Device,
                seed: int) -> Subject:  # fmt: skip
    """The subject of the check called ``check``."""
    return Subject(record, backend, devices, device, generator(seed, check), seed)


# --- asking ---------------------------------------------------------------------------------------------------------


class Mismatch(Exception):
    """It is not as it has to be."""


class Inapplicable(Exception):
    """There is nothing to check here."""


def inapplicable(why: str) -> NoReturn:
    raise Inapplicable(why)


def expect(holds: object, otherwise: str) -> None:
    """Raises `Mismatch` saying ``otherwise`` unless ``holds``."""
    if not holds:
        raise Mismatch(otherwise)


def expect_equal(got: Any, want: Any, what: str) -> None:
    """Two byte arrays are equal; says where they first differ."""
    got, want = np.frombuffer(got, np.uint8), np.frombuffer(want, np.uint8)
    expect(got.size == want.size, f"{what}: {got.size} bytes, not {want.size}")
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        at = int(wrong[0])
        raise Mismatch(f"{what}: {wrong.size} of {want.size} bytes differ, at {at} it is {got[at]}, not {want[at]}")


def expect_raises(kind: type[Exception], what: str, action: Callable[[], object]) -> Exception:
    """``action`` raises exactly the kind of error that is promised."""
    try:
        action()
    except kind as error:
        return error
    except Exception as error:
        raise Mismatch(f"{what} raises {type(error).__name__} ({error}) and not {kind.__name__}") from error
    raise Mismatch(f"{what} raises no {kind.__name__}")
