"""One graph over many devices: `assign` (which device, why), `partition` (splits, copies between devices), `allocate`
(memory), `bind` and `lower` (calls), `program` (running)."""

from typing import TYPE_CHECKING, Any

from opweave.scheduler.allocate import MemoryUse
from opweave.scheduler.program import PlannedGraph, Program
from opweave.scheduler.scheduler import Scheduler
from opweave.scheduler.splits import Copy, Split

if TYPE_CHECKING:
    from opweave.scheduler.assign import CAUSES
    from opweave.scheduler.report import Explanation

__all__ = ["CAUSES", "Copy", "Explanation", "MemoryUse", "PlannedGraph", "Program", "Scheduler", "Split"]


_LATER = {"CAUSES": "opweave.scheduler.assign", "Explanation": "opweave.scheduler.report"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'opweave.scheduler' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
