"""Bytes and seconds as text for people."""

from __future__ import annotations

__all__ = ["human_bytes", "human_time"]


def human_bytes(n: int) -> str:
    """``n`` bytes with a binary unit and three significant digits, ``"7.62 GiB"``."""
    if n < 1000:
        return f"{n} B"
    size = n / 1024
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} PiB" if size < 999.5 else f"{size:.0f} PiB"


def human_time(seconds: float) -> str:
    """``seconds`` with three significant digits, ``"31.8 µs"``; from a thousand seconds on all before the point."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"
