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
    """The folder with Linux's files about a control group, and the version of their format, 1 or 2."""

    folder: Path
    version: int


def groups(controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[ControlGroup]:
    """The groups of the process that may have a limit for ``controller`` (``"cpu"``, ``"memory"``), and their parents.

    Args:
        membership: the file in which Linux lists the control groups of the process.
        root: the folder of the control groups.
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
        # In a container the path may be that on the host, and most of its folders do not exist here. Their files then
        # cannot be read, which counts as no limit.
        yield from (ControlGroup(there, version) for there in (folder, *folder.parents) if there.is_relative_to(base))


def memory_bounds(membership: Path = MEMBERSHIP, root: Path = ROOT) -> tuple[int, int] | None:
    """Bytes of memory that the process can still use within the limits of its groups, and the smallest of these limits;
    ``None`` if there is no limit.

    Cached file pages that are not in use count as usable, since the system frees them before an allocation fails.
    """
    found = [bounds for group in _bounded(membership, root) if (bounds := _bounds(group))]
    return (min(left for left, _ in found), min(limit for _, limit in found)) if found else None


@cache
def _bounded(membership: Path, root: Path) -> Sequence[ControlGroup]:
    """The groups with a memory limit. Found once: most processes have none, and then no file is read again."""
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
