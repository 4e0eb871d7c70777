"""What passes over examples find: losses and accuracies with their uncertainties."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, nan, sqrt
from typing import NamedTuple

__all__ = ["Epoch", "Metrics", "Tally", "since_best"]


class Metrics(NamedTuple):
    """What a pass over examples found.

    Attributes:
        examples: their number.
        loss, loss_uncertainty: the mean, and its standard error from the means of the batches, NaN of one batch.
        accuracy, accuracy_uncertainty: the share of right labels, and its standard error as if those of one example
            were right or wrong together; NaN without labels.
        seconds: what it took.
    """

    examples: int
    loss: float
    loss_uncertainty: float
    accuracy: float
    accuracy_uncertainty: float
    seconds: float


class Epoch(NamedTuple):
    """An epoch of `Trainer.fit`: its number from 0, the metrics, and the learning rate of its last step."""

    epoch: int
    train: Metrics
    validation: Metrics | None
    rate: float


class Tally:
    """Sums over batches, from which `Metrics` follow. Kept in checkpoints, exactly."""

    def __init__(self, sums: Sequence[float] = (0, 0, 0, 0, 0, 0)) -> None:
        self.batches, self.examples, self.loss, self.square, self.right, self.seconds = sums

    def add(self, examples: int, loss: float, right: float, seconds: float) -> None:
        self.batches += 1
        self.examples += examples
        self.loss += loss * examples
        self.square += loss * loss * examples
        self.right += right
        self.seconds += seconds

    def sums(self) -> list[float]:
        return [self.batches, self.examples, self.loss, self.square, self.right, self.seconds]

    def metrics(self) -> Metrics:
        n, batches = self.examples, self.batches
        if not n:
            return Metrics(0, nan, nan, nan, nan, self.seconds)
        loss, accuracy = self.loss / n, self.right / n
        error = sqrt(max(self.square / n - loss * loss, 0.0) / (batches - 1)) if batches > 1 else nan
        share = sqrt(accuracy * (1 - accuracy) / (n - 1)) if n > 1 else nan
        return Metrics(int(n), loss, error, accuracy, share, self.seconds)


def since_best(history: Sequence[Epoch]) -> int:
    """How many epochs there have been after that of the lowest loss, of validation where there is any."""
    losses = [inf if isnan(loss) else loss for loss in ((row.validation or row.train).loss for row in history)]
    return len(losses) - 1 - losses.index(min(losses))
