"""How long threads of this process have waited for a processor because others used it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["seconds_waited"]

TASKS: Final = Path("/proc/self/task")


def seconds_waited(tasks: Path = TASKS) -> float:
    """Seconds for which the threads that there are now, added up, were ready to run and had no processor; 0 where the
    system does not say (only Linux does).

    Args:
        tasks: the folder in which Linux has one folder for each thread of the process.
    """
    waited = 0
    for file in tasks.glob("*/schedstat"):
        try:
            # Nanoseconds of running, nanoseconds of waiting, and the number of time slices.
            waited += int(file.read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread has ended, or the kernel keeps no such figures
    return waited * 1e-9
