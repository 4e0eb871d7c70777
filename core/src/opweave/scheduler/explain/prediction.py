"""The strategy of placement that also predicts what was placed otherwise, where one is installed: ``"cost"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from opweave import registry
from opweave.contract.device import Kind
from opweave.scheduler.place.strategy import strategy

if TYPE_CHECKING:
    from opweave.scheduler.place.assign import Assignment
    from opweave.scheduler.place.prediction import Prediction
    from opweave.scheduler.place.strategy import PlacementProblem
    from opweave.scheduler.plan.splits import Partition

__all__ = ["Predictor", "predictor", "remarks_on"]


class Predictor(Protocol):
    """A strategy that also predicts what was placed otherwise."""

    def __call__(self, problem: PlacementProblem, /) -> tuple[Assignment, Prediction | None]: ...

    def predict(self, partition: Partition) -> Prediction:
        """What a run of a partitioned graph takes."""
        ...

    def remarks(self, partition: Partition) -> list[str]:
        """A sentence for each device that computes what a faster one of this machine would run."""
        ...


def predictor() -> Predictor:
    """The first strategy that predicts.

    Raises:
        SchedulerError: there is none; it says what to install.
    """
    return _find_predictor() or cast("Predictor", strategy("cost"))


def remarks_on(partition: Partition) -> list[str]:
    """What a package that predicts remarks on products of quantized weights on processors; it is not imported without
    such products."""
    slow = [split for split in partition.splits if split.target.device.kind in (Kind.CPU, Kind.HOST)]
    products = [node for split in slow for node in split.nodes if node.op is not None and node.op.product]
    if not any(weight.dtype.block > 1 for node in products for weight in node.srcs[1:2]):
        return []
    found = _find_predictor()
    return [] if found is None else found.remarks(partition)


def _find_predictor() -> Predictor | None:
    """The first strategy that predicts, ``None`` without a package that offers one."""
    return next((offered for offered in registry.REGISTRY.placements().values() if hasattr(offered, "predict")), None)
