"""One graph over many devices: `assign` (which device, why), `split` (seams), `memory` (where), `program` (running);
`placing` and `predict` (by cost), `profiles` and `simulate` (what devices take)."""

from opweave.scheduler.assign import CAUSES
from opweave.scheduler.cost import Profile
from opweave.scheduler.explain import Explanation
from opweave.scheduler.memory import MemoryUse
from opweave.scheduler.predict import Prediction
from opweave.scheduler.profiles import profile
from opweave.scheduler.program import Program
from opweave.scheduler.scheduler import PlannedGraph, Scheduler
from opweave.scheduler.simulate import simulate
from opweave.scheduler.split import Copy, Split

__all__ = [
    "CAUSES", "Copy", "Explanation", "MemoryUse", "PlannedGraph", "Prediction", "Profile", "Program", "Scheduler",
    "Split", "profile", "simulate",
]  # fmt: skip
