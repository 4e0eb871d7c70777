"""Errors as values of a message, and back: opweave's classes and four of Python's, by name, with their text."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from opweave import errors
from opweave.errors import (
    AllocationError,
    DeviceLostError,
    ExecutionError,
    OpweaveError,
    UnknownNameError,
    UnsupportedOpError,
)
from opweave_remote.wire import fields

__all__ = ["Failure", "decode_error", "encode_error", "lost"]

_LONGEST: Final = 4000
_CLASSES: Final[dict[str, type[Exception]]] = {
    **{name: getattr(errors, name) for name in errors.__all__},
    "MemoryError": MemoryError,
    "TypeError": TypeError,
    "ValueError": ValueError,
    "NotImplementedError": NotImplementedError,
}
_WITH_OWN_ARGUMENTS: Final = frozenset({"AllocationError", "UnknownNameError", "UnsupportedOpError", "ExecutionError"})


class Failure(NamedTuple):
    """What went wrong on the other side.

    Attributes:
        error: an error of the class that was raised there, or an `ExecutionError` that names another class.
        number: of this failure on its stream, from 1 on; 0: of no stream.
        plan, step: the plan whose run failed, and the index of its group; -1: of no plan, or not known.
    """

    error: Exception
    number: int = 0
    plan: int = -1
    step: int = -1


def encode_error(error: BaseException, number: int = 0, plan: int = -1, step: int = -1) -> list[Any]:
    """An error as plain values."""
    name = next((c.__name__ for c in type(error).__mro__ if _CLASSES.get(c.__name__) is c), "")
    text = str(getattr(error, "message", "") or error)
    if not name or name == "OpweaveError":
        name, text = "ExecutionError", f"{type(error).__name__}: {text}"
    figures = [0, -1]
    if isinstance(error, AllocationError):
        figures = [min(error.requested, (1 << 63) - 1), -1 if error.free is None else error.free]
    reasons = list(error.reasons.values()) if isinstance(error, UnsupportedOpError) else []
    return [name, text[:_LONGEST], number, plan, step, *figures, [str(r)[:_LONGEST] for r in reasons]]


def decode_error(value: Any, device: str = "") -> Failure:
    """What `encode_error` made, for a device of that name here.

    Raises:
        FormatError: ``value`` is nothing that `encode_error` makes.
    """
    name, text, number, plan, step, requested, free, reasons = fields(value, "ssuiiiil", "an error")
    cls = _CLASSES.get(name)
    error: Exception
    if name == "AllocationError":
        error = OpweaveError.__new__(AllocationError, text)
        error.device, error.requested = device, requested
        error.free = None if free < 0 else free
    elif name == "UnknownNameError":
        error = OpweaveError.__new__(UnknownNameError, text)
        error.what, error.name, error.known = "name", "", []
    elif name == "UnsupportedOpError":
        error = UnsupportedOpError(
            text.partition("\n")[0], dict.fromkeys([device] if reasons else [], "; ".join(map(str, reasons)))
        )
    elif cls is None or name in _WITH_OWN_ARGUMENTS:
        error = ExecutionError(text, device=device)
    else:
        error = cls(text)
    return Failure(error, number, plan, step)


def lost(what: str, why: str) -> DeviceLostError:
    """The error for a peer that is gone."""
    return DeviceLostError(f"{what} is lost: {why}; its buffers are gone. Go on without it (Scheduler.without), or "
                           "look for it again (opweave.rescan)")  # fmt: skip
