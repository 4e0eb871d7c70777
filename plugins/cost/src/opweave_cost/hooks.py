"""What the entry point ``cost`` names: the strategy of placement ``"cost"``, the commands ``profile`` and ``what-if``,
checks for ``opweave doctor``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from opweave.registry import Diagnosis, hookimpl

if TYPE_CHECKING:
    import typer

    from opweave.registry import Registry
    from opweave.scheduler.place.assign import Assignment
    from opweave.scheduler.place.prediction import Prediction
    from opweave.scheduler.place.strategy import PlacementProblem, Strategy
    from opweave.scheduler.plan.splits import Partition


class ByCost:
    """The strategy ``"cost"``, which also predicts (`opweave.scheduler.place.strategy.Predictor`)."""

    def __call__(self, problem: PlacementProblem) -> tuple[Assignment, Prediction | None]:
        from opweave_cost.place import place_by_cost

        return place_by_cost(problem)

    def predict(self, partition: Partition) -> Prediction:
        from opweave_cost.predict import predict

        return predict(partition)

    def remarks(self, partition: Partition) -> list[str]:
        from opweave_cost.remarks import remarks

        return remarks(partition)


@hookimpl
def opweave_placements() -> Mapping[str, Strategy]:
    return {"cost": ByCost()}


@hookimpl
def opweave_cli(app: typer.Typer) -> None:
    from opweave_cost.commands import profile, what_if

    app.command("profile")(profile)
    app.command("what-if")(what_if)


@hookimpl
def opweave_doctor(registry: Registry) -> Iterator[Diagnosis]:
    from opweave_cost.store import known_profile

    for device in registry.devices():
        made = known_profile(device)
        if made is not None and made.is_doubtful:
            yield Diagnosis(
                f"profile of {device.name}", "slow",
                "other programs used the processors while it was measured; placement by cost goes by its figures",
                f"opweave profile --refresh {device.name}, while the machine has nothing else to do",
            )  # fmt: skip
