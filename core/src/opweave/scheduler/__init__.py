"""One graph over many devices: `assign` (which device, why), `split` (seams), `memory` (where), `program` (running)."""

from opweave.scheduler.assign import CAUSES
from opweave.scheduler.explain import Explanation
from opweave.scheduler.program import MemoryUse, Program
from opweave.scheduler.scheduler import PlannedGraph, Scheduler
from opweave.scheduler.split import Copy, Split

__all__ = ["CAUSES", "Copy", "Explanation", "MemoryUse", "PlannedGraph", "Program", "Scheduler", "Split"]
