"""The graphs of a training: what a physical batch computes, and the step that follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from opweave import ops
from opweave.backward import gradients
from opweave.errors import SchedulerError, ShapeError
from opweave.graph.dtypes import as_dtype, i64, wide_type
from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor, input
from opweave.leaves import state
from opweave.ops.movement import after
from opweave_training.data import Batch
from opweave_training.optimizers import LossScale, Optimizer, all_finite, clip_by_norm

__all__ = ["Built", "Loss", "StepGraphs"]

Loss = Callable[[Tensor, Tensor], Tensor]


class Built(NamedTuple):
    """Outputs of a program, and the tensors that belong to each replica."""

    outputs: dict[str, Tensor]
    replicas: list[list[Tensor]]


class StepGraphs:
    """Builds the graphs of a training.

    A program works on one physical batch for each replica, or for the first few; their inputs, and their losses and
    numbers of right labels among the outputs, have the replica's number behind their names, but for the first one.

    Args:
        model, optimizer, loss, reduction, target, accumulate, clip_norm, loss_scale, skip_nonfinite: as of `Trainer`.
        replicas: physical batches of a program.

    Attributes:
        sums: name -> state in which gradients add up, if several programs make a step.
        counts: whether the model wants the number of the physical batch.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        optimizer: Optimizer,
        loss: Loss,
        reduction: Literal["mean", "sum"],
        target: str,
        accumulate: int,
        clip_norm: float | None,
        loss_scale: LossScale | None,
        skip_nonfinite: bool,
        replicas: int,
    ) -> None:
        self._model, self._optimizer, self._loss, self._target = model, optimizer, loss, target
        self._clip, self._scaling, self._skips = clip_norm, loss_scale, skip_nonfinite
        self._averaged: Final = reduction == "mean"
        self._rate: Final = input("learning_rate", (), optimizer.rate_dtype)
        self._order: list[str] = []  # of the gradients, as the backward graph finds them
        self.sums: Final = (
            {name: state(f"{name}.accumulated", p.shape, wide_type(p.dtype)) for name, p in optimizer.params.items()}
            if accumulate > 1
            else {}
        )
        self._signature: Final = inspect.signature(model)
        self.counts: Final = "step" in self._signature.parameters

    def evaluation(self, batch: Batch) -> Built:
        return Built(self._forward(batch, 0, training=False), [])

    def prediction(self, batch: Batch) -> Built:
        return Built({"predictions": self._predicted(self._inputs(batch, 0), 0, training=False)}, [])

    def step(self, batches: Sequence[Batch], examples: int) -> Built:
        """One program makes the step: of all physical batches, which have this many examples."""
        outputs, found = self._all(batches, examples)
        totals = found[0]
        for grads in found[1:]:
            totals = {name: totals[name] + grad for name, grad in grads.items()}
        return Built(
            outputs | {"loss": after(outputs["loss"], self._updates(totals))}, self._of_replicas(outputs, found)
        )

    def part(self, batches: Sequence[Batch], examples: int) -> Built:
        """One of several programs that make a step of this many examples: its gradients are added up."""
        outputs, found = self._all(batches, examples)
        self._order = list(found[0])
        added = dict(self.sums)
        for grads in found:
            added = {name: ops.accumulate(added[name], grad) for name, grad in grads.items()}
        outputs |= {"loss": after(outputs["loss"], added.values())}
        return Built(outputs, self._of_replicas(outputs, found))

    def apply(self) -> Built:
        """The step with the gradients that were added up."""
        # In the order of a step of one program, so that the norm of all gradients adds up in the same order.
        written = self._updates({name: self.sums[name] for name in self._order})
        written += [ops.assign(total, 0.0) for total in self.sums.values()]
        return Built({"rate": after(ops.copy(self._rate), written)}, [])

    def _all(self, batches: Sequence[Batch], examples: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Outputs and gradients of each replica, the latter of a mean times the share of its batch in the examples of
        the step."""
        outputs: dict[str, Tensor] = {}
        found = []
        for i, batch in enumerate(batches):
            made = self._forward(batch, i, training=True)
            grads = self._grads(made[_named("loss", i)])
            share = len(batch[self._target]) / examples
            if self._averaged and share != 1:
                grads = {name: ops.cast(g * share, wide_type(g.dtype)) for name, g in grads.items()}
            outputs |= made
            found.append(grads)
        return outputs, found

    def _of_replicas(self, outputs: Mapping[str, Tensor], found: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
        return [[*grads.values()] for grads in found] if len(found) > 1 else []

    def _forward(self, batch: Batch, replica: int, *, training: bool) -> dict[str, Tensor]:
        inputs = self._inputs(batch, replica)
        if self._target not in inputs:
            raise SchedulerError(f"the data set has no {self._target!r}, but {', '.join(inputs)}")
        wanted = inputs.pop(self._target)
        predicted = self._predicted(inputs, replica, training=training)
        loss = self._loss(predicted, wanted)
        if loss.shape:
            what = "mean" if self._averaged else "sum"
            raise ShapeError(f"the loss is the {what} over the examples, of shape (), not {loss.describe()}")
        result = {_named("loss", replica): loss}
        if wanted.dtype.is_integer and predicted.ndim and wanted.shape == predicted.shape[:-1]:
            right = ops.count_equal(ops.argmax(predicted, -1), ops.cast(wanted, i64))
            result[_named("right", replica)] = right
        return result

    def _inputs(self, batch: Batch, replica: int) -> dict[str, Tensor]:
        return {name: input(_named(name, replica), a.shape, as_dtype(a.dtype)) for name, a in batch.items()}

    def _predicted(self, inputs: Mapping[str, Tensor], replica: int, *, training: bool) -> Tensor:
        given: dict[str, Tensor | None] = {**inputs}
        if self.counts:
            given["step"] = input(_named("step", replica), (), i64) if training else None
        try:
            self._signature.bind(**given)
        except TypeError as error:
            raise SchedulerError(f"the model is called with the arrays {', '.join(inputs)}: {error}") from None
        return self._model(**given)

    def _grads(self, loss: Tensor) -> dict[str, Tensor]:
        """The gradients, not scaled, in the order in which the backward graph finds them, so that each can be used and
        its memory be free before the next one is there."""
        params = self._optimizer.params
        read: dict[Tensor, int] = {}  # leaf -> the first node that reads it
        for i, node in enumerate(Graph(loss).nodes):
            for source in node.srcs:
                read.setdefault(source, i)
        backwards = dict(sorted(params.items(), key=lambda item: -read.get(item[1], 0)))
        if self._scaling is None:
            return gradients(loss, backwards)
        return self._scaling.unscaled(gradients(loss, backwards, self._scaling.scale))[0]

    def _updates(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """What makes the step: the next versions of all states."""
        written: list[Tensor] = []
        finite = all_finite(grads) if self._skips or self._scaling is not None else None
        if self._scaling is not None and finite is not None:
            written += self._scaling.update(finite).values()
        if self._clip is not None:
            grads, _ = clip_by_norm(grads, self._clip)
        return [*written, *self._optimizer.step(grads, self._rate, finite).values()]


def _named(name: str, replica: int) -> str:
    return f"{name}.{replica}" if replica else name
