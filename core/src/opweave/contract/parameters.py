"""Checks of parameters of ``device.open(...)`` that several backends have."""

from __future__ import annotations

from opweave.errors import PluginError

__all__ = ["check_threads"]


def check_threads(n: object) -> int:
    """A number of threads as an int, at least 1. Text is accepted, because ``open_device("cpu?threads=2")`` passes
    text.

    Raises:
        PluginError: ``n`` is not a positive whole number.
    """
    try:
        count = int(n) if isinstance(n, str) else n.__index__()  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        count = 0
    if count < 1 or isinstance(n, bool):
        raise PluginError(f"threads must be a positive whole number, not {n!r}")
    return int(count)
