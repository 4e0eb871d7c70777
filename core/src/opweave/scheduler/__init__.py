"""One graph over many devices: `assign` (which device, why), `split` (seams), `memory` (where), `program` (running);
`placing` and `predict` (by cost), `profiles` and `simulated` (what devices take)."""

from typing import TYPE_CHECKING, Any

from opweave.scheduler.assign import CAUSES
from opweave.scheduler.memory import MemoryUse
from opweave.scheduler.program import Program
from opweave.scheduler.scheduler import PlannedGraph, Scheduler
from opweave.scheduler.split import Copy, Split

if TYPE_CHECKING:
    from opweave.scheduler.cost import Profile
    from opweave.scheduler.explain import Explanation
    from opweave.scheduler.predict import Prediction
    from opweave.scheduler.profiles import profile
    from opweave.scheduler.simulated import simulate

__all__ = [
    "CAUSES", "Copy", "Explanation", "MemoryUse", "PlannedGraph", "Prediction", "Profile", "Program", "Scheduler",
    "Split", "profile", "simulate",
]  # fmt: skip

# What most programs never use is imported when it is first asked for.
_LATER = {
    "Explanation": "explain",
    "Prediction": "predict",
    "Profile": "cost",
    "profile": "profiles",
    "simulate": "simulated",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'opweave.scheduler' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"opweave.scheduler.{_LATER[name]}"), name)
    return value
