"""One graph over many devices: `assign` (which device, why), `partition` (splits, copies between devices), `allocate`
(memory), `bind` and `lower` (calls), `program` (running)."""

from typing import TYPE_CHECKING, Any

from opweave.scheduler.allocate import MemoryUse
from opweave.scheduler.assign import CAUSES
from opweave.scheduler.program import PlannedGraph, Program
from opweave.scheduler.scheduler import Scheduler
from opweave.scheduler.splits import Copy, Split

if TYPE_CHECKING:
    from opweave.scheduler.report import Explanation

__all__ = ["CAUSES", "Copy", "Explanation", "MemoryUse", "PlannedGraph", "Program", "Scheduler", "Split"]


def __getattr__(name: str) -> Any:
    if name != "Explanation":
        raise AttributeError(f"module 'opweave.scheduler' has no attribute {name!r}")
    from opweave.scheduler.report import Explanation  # most programs never ask for it

    globals()[name] = Explanation
    return Explanation
