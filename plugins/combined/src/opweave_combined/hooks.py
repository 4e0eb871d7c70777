"""What the entry point ``combine`` names: combinations that a command is given or the environment lists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from opweave.registry import hookimpl
from opweave.registry.naming import key

VARIABLE: Final = "OPWEAVE_COMBINE"
"""The environment variable that lists combinations: ``opencl:0+opencl:1,cpu:0+cpu:1``."""

PREFIX: Final = "combined:"


@hookimpl
def opweave_make_devices(names: Sequence[str]) -> None:
    """Raises `UnknownNameError`, `PluginError` and `SchedulerError` as `opweave_combined.combine`."""
    listed = [entry for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    listed += [name[len(PREFIX) :] for name in map(key, names) if name.startswith(PREFIX)]
    for entry in listed:
        from opweave_combined.device import combine  # most commands use devices as they are

        combine([member.strip() for member in entry.split("+")])
