"""One graph over many devices. A graph goes through the packages in this order: `place` (which device, why), `plan`
(splits, copies, memory), `compile` (calls), `run`; `explain` says what came of it. `Scheduler` owns devices and
programs, `Builder` calls the passes, `Program` is what they give."""

from typing import TYPE_CHECKING

from opweave.lazy import later
from opweave.scheduler.place.prediction import MemoryUse
from opweave.scheduler.plan.splits import Copy, Split
from opweave.scheduler.program import PlannedGraph, Program
from opweave.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from opweave.scheduler.explain.report import Explanation
    from opweave.scheduler.place.assign import CAUSES

__all__ = ["CAUSES", "Copy", "Explanation", "MemoryUse", "PlannedGraph", "Program", "Scheduler", "Split"]

__getattr__ = later(
    __name__, {"CAUSES": "opweave.scheduler.place.assign", "Explanation": "opweave.scheduler.explain.report"}
)
