"""Checks of the parameters that several backends take in ``device.open(...)``."""

from __future__ import annotations

from opweave.errors import PluginError

__all__ = ["check_threads"]


def check_threads(n: object) -> int:
    """A number of threads as a positive int. Digits are accepted too: ``open_device("cpu?threads=2")`` gives text.

    Raises:
        PluginError: no positive whole number.
    """
    try:
        count = int(n) if isinstance(n, str) else n.__index__()  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        count = 0
    if count < 1 or isinstance(n, bool):
        raise PluginError(f"threads must be a positive whole number, not {n!r}")
    return int(count)
