"""Combinations of devices (`opweave.combine`) for commands: those that are asked for, and those of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from opweave.registry.naming import key

__all__ = ["make_combinations"]

VARIABLE: Final = "OPWEAVE_COMBINE"
"""The environment variable that lists combinations: ``opencl:0+opencl:1,cpu:0+cpu:1``."""

PREFIX: Final = "combined:"


def make_combinations(names: Iterable[str] = ()) -> None:
    """Make the combinations that are among ``names`` (``combined:opencl:0+opencl:1``) and those of the environment.

    Raises:
        UnknownNameError, PluginError, SchedulerError: as `opweave.combine`.
    """
    listed = [entry for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    listed += [name[len(PREFIX) :] for name in map(key, names) if name.startswith(PREFIX)]
    for entry in listed:
        from opweave.combined import combine  # most commands use devices as they are

        combine([member.strip() for member in entry.split("+")])
