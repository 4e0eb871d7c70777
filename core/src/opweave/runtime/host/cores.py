"""How many processors this process may use: of the machine, by its affinity, and by the quota of its control group."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import NamedTuple

from opweave.runtime.host.cgroups import MEMBERSHIP, ROOT, groups

__all__ = ["Cores", "usable_cores"]


class Cores(NamedTuple):
    """Numbers of processors.

    Attributes:
        machine: of the machine.
        affinity: on which the process may run.
        quota: processor time that its control group may use per time (``docker run --cpus``); ``None``: no limit.
    """

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
        membership: the file in which Linux lists the control groups of the process.
        root: the folder of the control groups.
    """
    machine = os.cpu_count() or 1
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:
        affinity = machine
    return Cores(machine, affinity, _quota(membership, root))


def _quota(membership: Path, root: Path) -> float | None:
    """The smallest quota of the process's control group and its parents, in processors; ``None``: no limit."""
    read = {1: _version_1, 2: _version_2}
    found = [quota for group in groups("cpu", membership, root) if (quota := read[group.version](group.folder))]
    return min(found, default=None)


def _version_2(folder: Path) -> float | None:
    """``cpu.max`` contains ``max 100000``, or a quota and a period in microseconds."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period) if quota != "max" else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version_1(folder: Path) -> float | None:
    """Quota and period in microseconds are in two files; a quota of -1 is no limit."""
    try:
        quota, period = (int((folder / f"cpu.cfs_{n}_us").read_text(encoding="ascii")) for n in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
