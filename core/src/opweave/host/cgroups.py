"""Control groups of this process, by which Linux bounds what containers and jobs use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["MEMBERSHIP", "ROOT", "ControlGroup", "groups", "memory_bounds"]

ROOT: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")

_NO_LIMIT: Final = 1 << 60
"""Version 1 writes a limit of about 2**63 bytes where there is none."""


class ControlGroup(NamedTuple):
    """A folder in which Linux tells about a control group, and the version of its files, 1 or 2."""

    folder: Path
    version: int


def groups(controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[ControlGroup]:
    """The groups of the process that may bound ``controller`` (``"cpu"``, ``"memory"``), and those around them.

    Args:
        membership, root: where Linux tells the control groups of the process, and where they lie.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, version = root, 2
        elif controller in controllers.split(","):
            base, version = root / controllers, 1
            base = base if base.is_dir() else root / controller
        else:
            continue
        folder = base / path.strip("/")
        # In a container the path may be that outside of it: then only the folders that are there count.
        yield from (ControlGroup(there, version) for there in (folder, *folder.parents) if there.is_relative_to(base))


def memory_bounds(membership: Path = MEMBERSHIP, root: Path = ROOT) -> tuple[int, int] | None:
    """Bytes of memory that the groups of the process leave to it, and that they allow in all; ``None``: no bound.

    What files of others occupy counts as left: the system takes it back before it refuses anything.
    """
    found = [bounds for group in _bounded(membership, root) if (bounds := _bounds(group))]
    return (min(left for left, _ in found), min(limit for _, limit in found)) if found else None


@cache
def _bounded(membership: Path, root: Path) -> Sequence[ControlGroup]:
    """Those with a limit, looked for once: most processes have none, and then nothing is read again."""
    return [group for group in groups("memory", membership, root) if _bounds(group)]


def _bounds(group: ControlGroup) -> tuple[int, int] | None:
    names = (
        ("memory.max", "memory.current") if group.version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    files = "inactive_file" if group.version == 2 else "total_inactive_file"
    try:
        limit, used = (int((group.folder / name).read_text(encoding="ascii")) for name in names)
        lines = (group.folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # "max" is no limit
        return None
    if limit >= _NO_LIMIT:
        return None
    freed = next((int(line.split()[1]) for line in lines if line.split()[:1] == [files]), 0)
    return max(limit - max(used - freed, 0), 0), limit
