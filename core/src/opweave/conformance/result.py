"""`Result`: what came of a case or a check."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Result", "Status"]

Status = Literal["passed", "refused", "skipped", "failed", "unsupported", "xfailed"]
"""``refused``: the device says that it does not run it. ``skipped``: the check does not apply to the device.
``unsupported``, ``xfailed``: refused, failed, as ``conformance.toml`` says beforehand."""


class Result(NamedTuple):
    """What came of a case or a check.

    Attributes:
        status: how it counts.
        reason: why it did not pass, else ``""``.
        nmse: normalised mean square error of a case, NaN where nothing was computed.
        error: the largest error of an element, relative to the element plus the root mean square of all, or NaN.
        id, level, op, dtype: of the case or check; `run_case` leaves all but ``id`` out, and a `Suite` fills them in.
        name: ``id``, with the device's name before it where several devices are examined.
        device: name of the device that was asked.
        repeat: the command that performs this check alone.
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

    def __bool__(self) -> bool:
        """Whether the device keeps its word: it is right, or says that it cannot."""
        return self.status != "failed"
