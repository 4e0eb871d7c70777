"""What the entry point ``training`` names: computing values again, for ``opweave.Scheduler(memory_limit=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opweave.registry import hookimpl

if TYPE_CHECKING:
    from opweave.scheduler.place.strategy import Rewrite


@hookimpl
def opweave_rewrites() -> Mapping[str, Rewrite]:
    from opweave_training.recompute import less_memory  # commands need none of it

    return {"memory_limit": less_memory}
