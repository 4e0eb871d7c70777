"""`Check`: one requirement that a device meets or not, and the functions that checks are written with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from opweave_conformance.check import generator
from opweave_conformance.result import Result

if TYPE_CHECKING:
    from opweave.contract import Backend, Call, Device, Stream
    from opweave.registry.records import PluginRecord

__all__ = [
    "Check", "Checklist", "Inapplicable", "Mismatch", "Subject", "expect", "expect_equal",
    "expect_raises", "inapplicable",
]  # fmt: skip

E = TypeVar("E", bound=Exception)


class Subject(NamedTuple):
    """The backend and device under test.

    Attributes:
        record: the registry's record of the plugin.
        backend: the plugin's backend.
        devices: its devices under test.
        device: the device of this check; for checks of the backend as a whole, the first.
        rng: the check's random generator.
        seed: the seed of ``rng``.
        failing_call: makes a call that queues work which fails, where the author named it.
    """

    record: PluginRecord
    backend: Backend
    devices: tuple[Device, ...]
    device: Device
    rng: np.random.Generator
    seed: int
    failing_call: Callable[[Stream], Call] | None = None


class Check(NamedTuple):
    """One requirement and the function that checks it.

    Attributes:
        id: unique; what patterns are matched with.
        level: 0 hygiene, 1 memory, 2 operations, 3 asynchrony, 4 beside a second device, 5 faults,
            6 gradients.
        about: the requirement, in a sentence.
        ask: checks it; raises `Mismatch` if it is not met, `Inapplicable` if it does not apply to the device.
        per_device: it is performed for each device, else once for the backend.
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
        """The result of the check; an exception of any kind is a failure."""
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
    """The checks of a level, collected by decorator. The first line of a check's docstring is its `Check.about`::

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
                seed: int, failing_call: Callable[[Stream], Call] | None = None) -> Subject:  # fmt: skip
    """The subject of the check called ``check``."""
    return Subject(record, backend, devices, device, generator(seed, check), seed, failing_call)


# --- assertions -----------------------------------------------------------------------------------------------------


class Mismatch(Exception):
    """The requirement is not met."""


class Inapplicable(Exception):
    """The check does not apply to the device: it is skipped."""


def inapplicable(why: str) -> NoReturn:
    """Skip the check for the given reason."""
    raise Inapplicable(why)


def expect(holds: object, otherwise: str) -> None:
    """Raises `Mismatch` saying ``otherwise`` unless ``holds``."""
    if not holds:
        raise Mismatch(otherwise)


def expect_equal(got: Any, want: Any, what: str) -> None:
    """Raises `Mismatch` with the first difference unless two byte arrays are equal."""
    got, want = np.frombuffer(got, np.uint8), np.frombuffer(want, np.uint8)
    expect(got.size == want.size, f"{what}: {got.size} bytes, not {want.size}")
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        at = int(wrong[0])
        raise Mismatch(f"{what}: {wrong.size} of {want.size} bytes differ, at {at} it is {got[at]}, not {want[at]}")


def expect_raises(kind: type[E], what: str, action: Callable[[], object]) -> E:
    """The error of ``kind`` that ``action`` raises; raises `Mismatch` if it raises another one or none."""
    try:
        action()
    except kind as error:
        return error
    except Exception as error:
        raise Mismatch(f"{what} raises {type(error).__name__} ({error}) and not {kind.__name__}") from error
    raise Mismatch(f"{what} raises no {kind.__name__}")
