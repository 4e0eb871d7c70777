"""`Result`: the outcome of a case or a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from opweave_conformance.decisions import Side

__all__ = ["Result", "Status"]

Status = Literal["passed", "refused", "skipped", "failed", "unsupported", "xfailed"]
"""``refused``: the device reports the case as not supported. ``skipped``: the check does not apply to the device.
``unsupported``, ``xfailed``: refused or failed as ``conformance.toml`` lists it."""


class Result(NamedTuple):
    """The outcome of a case or a check.

    Attributes:
        status: how it counts.
        reason: why it did not pass, else ``""``.
        nmse: normalised mean square error of a case, NaN where nothing was computed.
        error: the largest error of an element, relative to the element plus the root mean square of all, or NaN.
        id, level, op, dtype: of the case or check; `run_case` sets ``id`` only, a `Suite` sets all.
        name: ``id``, preceded by the device's name if several devices are tested.
        device: name of the device that was tested.
        repeat: the command that performs this check alone.
        paths: of a check of a limit, by operation: how often its kernels took each side of the limit.
    """

    status: Status
    reason: str = ""
    nmse: float = float("nan")
    error: float = float("nan")
    id: str = ""
    level: int = -1
    op: str = ""
    dtype: str = ""
    name: str = ""
    device: str = ""
    repeat: str = ""
    paths: Mapping[str, Mapping[Side, int]] = {}

    def __bool__(self) -> bool:
        """Whether the device conforms: its result is correct, or it refused the case."""
        return self.status != "failed"
