"""The strategy of placement that also predicts what was placed otherwise, where one is installed: ``"cost"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from opweave import registry
from opweave.scheduler.place.strategy import strategy

if TYPE_CHECKING:
    from opweave.runtime.device import Device
    from opweave.scheduler.place.assign import Assignment
    from opweave.scheduler.place.prediction import Prediction
    from opweave.scheduler.place.strategy import PlacementProblem
    from opweave.scheduler.plan.splits import Partition

__all__ = ["Predictor", "find_predictor", "predictor"]


class Predictor(Protocol):
    """A strategy that also predicts what was placed otherwise."""

    def __call__(self, problem: PlacementProblem, /) -> tuple[Assignment, Prediction | None]: ...

    def predict(self, partition: Partition) -> Prediction:
        """What a run of a partitioned graph takes."""
        ...

    def known_rate(self, device: Device, dtype: str) -> float | None:
        """Floating-point operations per second in products of a dtype, where the device has been measured."""
        ...


def predictor() -> Predictor:
    """The first strategy that predicts.

    Raises:
        SchedulerError: there is none; it says what to install.
    """
    return find_predictor() or cast("Predictor", strategy("cost"))


def find_predictor() -> Predictor | None:
    """The first strategy that predicts, ``None`` without a package that offers one."""
    return next((offered for offered in registry.REGISTRY.placements().values() if hasattr(offered, "predict")), None)
