"""How many processors this process may use: those of the machine, its affinity, and the quota of its control group."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import NamedTuple

from opweave.host.cgroups import MEMBERSHIP, ROOT, groups

__all__ = ["Cores", "usable_cores"]


class Cores(NamedTuple):
    """Processors of the machine, of the process's affinity, and by quota (``docker run --cpus``; ``None``: none)."""

    machine: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """How many threads can compute at once; at least 1."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, ceil(self.quota)))


def usable_cores(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Cores:
    """What this process may use.

    Args:
        membership, root: where Linux tells the control groups of the process, and where they lie.
    """
    machine = os.cpu_count() or 1
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:
        affinity = machine
    return Cores(machine, affinity, _quota(membership, root))


def _quota(membership: Path, root: Path) -> float | None:
    """The least quota of the process's control group and of those around it, in processors."""
    read = {1: _version_1, 2: _version_2}
    found = [quota for group in groups("cpu", membership, root) if (quota := read[group.version](group.folder))]
    return min(found, default=None)


def _version_2(folder: Path) -> float | None:
    """``cpu.max`` holds ``max 100000``, or a quota and a period in microseconds."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period) if quota != "max" else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version_1(folder: Path) -> float | None:
    """A quota of -1 is none."""
    try:
        quota, period = (int((folder / f"cpu.cfs_{n}_us").read_text(encoding="ascii")) for n in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
