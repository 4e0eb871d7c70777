"""`Trainer`: steps, epochs and evaluation of a model over data sets, with checkpoints from which it goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan, sqrt
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np

from opweave import ops, registry
from opweave.errors import SchedulerError, ShapeError
from opweave.graph.dtypes import DType, as_dtype, f32, i64
from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor, input
from opweave.leaves import state
from opweave.ops.movement import after
from opweave.scheduler import Program, Scheduler
from opweave.training.backward import gradients
from opweave.training.checkpoint import restore, write_checkpoint
from opweave.training.data import Batch, Dataset
from opweave.training.optimizers import LossScale, Optimizer, all_finite, clip_by_norm
from opweave.training.schedules import Schedule

__all__ = ["Epoch", "Metrics", "Trainer"]

Loss = Callable[[Tensor, Tensor], Tensor]


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


Callback = Callable[["Trainer", Epoch], Any]


class _Tally:
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


class Trainer:
    """Trains a model.

    Args:
        model: called with the inputs by name, as tensors with a first axis of examples; returns predictions. It reads
            the optimizer's parameters.
        optimizer: with the parameters.
        lr: the learning rate: a number, or a function of the number of the step.
        loss: called with predictions and target; returns the mean over the examples, of shape (). By default
            ``ow.cross_entropy``.
        target: the name of the target in data sets. If it has integers, in the shape of the predictions without their
            last axis, they are labels, and accuracy is counted.
        batch: examples of a physical batch.
        accumulate: physical batches of a logical one, after which there is a step with the mean of their gradients.
        clip_norm: the largest Euclidean norm of all gradients together (`clip_by_norm`); ``None``: any.
        loss_scale: for parameters or values of half types; steps with infinite gradients are left out.
        seed: of the order of the examples, which differs from epoch to epoch.
        devices: a device, its name, several, or a scheduler; by default `opweave.default_devices`.

    Attributes:
        steps: how many there have been.
        epoch: number of the present epoch.
        history: the epochs that are complete.
        scheduler: what runs the programs.

    Raises:
        SchedulerError: ``batch`` or ``accumulate`` is not positive.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        optimizer: Optimizer,
        lr: float | Schedule,
        *,
        loss: Loss = ops.cross_entropy,
        target: str = "labels",
        batch: int = 32,
        accumulate: int = 1,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        seed: int = 0,
        devices: Any = None,
    ) -> None:
        if batch < 1 or accumulate < 1:
            raise SchedulerError(f"batches have examples, and steps have batches: not {batch} and {accumulate}")
        self._model, self._loss, self._target = model, loss, target
        self._optimizer: Final = optimizer
        self._lr: Final[Schedule] = lr if callable(lr) else lambda step: float(lr)
        self._batch, self._accumulate, self._clip = batch, accumulate, clip_norm
        self._scaling = loss_scale
        self._seed = seed
        self._owned: Final = not isinstance(devices, Scheduler)
        self.scheduler: Final[Scheduler] = (
            devices
            if isinstance(devices, Scheduler)
            else Scheduler(list(registry.default_devices()) if devices is None else devices)
        )
        self.steps = 0
        self.epoch = 0
        self.history: list[Epoch] = []
        self._place = 0  # physical batches of the present epoch that are done
        self._tally = _Tally()
        self._programs: dict[Any, Program] = {}
        self._sums: Final = (
            {name: state(f"{name}.accumulated", p.shape, _wide(p.dtype)) for name, p in optimizer.params.items()}
            if accumulate > 1
            else {}
        )

    def close(self) -> None:
        """Close the scheduler, unless it was given."""
        self._programs.clear()
        if self._owned:
            self.scheduler.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- programs ---------------------------------------------------------------------------------------------------

    def _program(self, kind: str, batch: Batch) -> Program:
        """The program for batches of this shape; built once."""
        key = (kind, *[(name, a.shape, a.dtype.str) for name, a in batch.items()])
        known = self._programs.get(key)
        if known is None:
            known = self._programs[key] = self.scheduler.build(getattr(self, f"_{kind}_outputs")(batch))
        return known

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        inputs = {name: input(name, a.shape, as_dtype(a.dtype)) for name, a in batch.items()}
        if self._target not in inputs:
            raise SchedulerError(f"the data set has no {self._target!r}, but {', '.join(inputs)}")
        wanted = inputs.pop(self._target)
        predicted = self._model(**inputs)
        loss = self._loss(predicted, wanted)
        if loss.shape:
            raise ShapeError(f"the loss is the mean over the examples, of shape (), not {loss.describe()}")
        result = {"loss": loss}
        if wanted.dtype.is_integer and predicted.ndim and wanted.shape == predicted.shape[:-1]:
            result["right"] = ops.count_equal(ops.argmax(predicted, -1), ops.cast(wanted, i64))
        return result

    _evaluation_outputs = _forward

    def _grads(self, loss: Tensor) -> dict[str, Tensor]:
        """The gradients, not scaled, in the order in which the backward graph finds them."""
        params = self._optimizer.params
        read = {leaf: i for i, leaf in enumerate(Graph(loss).leaves)}
        backwards = dict(sorted(params.items(), key=lambda item: -read.get(item[1], 0)))
        if self._scaling is None:
            return gradients(loss, backwards)
        return self._scaling.unscaled(gradients(loss, backwards, self._scaling.scale))[0]

    def _updates(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """What makes the step: the next versions of all states."""
        written: list[Tensor] = []
        finite = None
        if self._scaling is not None:
            finite = all_finite(grads)
            written += self._scaling.update(finite).values()
        if self._clip is not None:
            grads, _ = clip_by_norm(grads, self._clip)
        return [*written, *self._optimizer.step(grads, input("learning_rate", (), f32), finite).values()]

    def _step_outputs(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self._forward(batch)
        return outputs | {"loss": after(outputs["loss"], self._updates(self._grads(outputs["loss"])))}

    def _part_outputs(self, batch: Batch) -> dict[str, Tensor]:
        """A physical batch of several: its gradients are added up."""
        outputs = self._forward(batch)
        grads = self._grads(outputs["loss"])
        added = [ops.accumulate(total, grads[name] * (1 / self._accumulate)) for name, total in self._sums.items()]
        return outputs | {"loss": after(outputs["loss"], added)}

    def _apply_outputs(self, batch: Batch) -> Tensor:
        """The step with the gradients that were added up."""
        written = self._updates(self._sums)
        written += [ops.assign(total, 0.0) for total in self._sums.values()]
        return after(ops.copy(input("learning_rate", (), f32)), written)

    # --- running ----------------------------------------------------------------------------------------------------

    def run_epoch(self, data: Dataset | Mapping[str, Any], on_step: Callable[[Trainer], Any] | None = None) -> Metrics:
        """Train on every example once, in an order that follows from seed and epoch, from where the present epoch is.
        What is left of less than a logical batch is left out.

        Args:
            data: the examples.
            on_step: called after each step.

        Raises:
            SchedulerError: less examples than a logical batch, or no target among the arrays.
            ExecutionError: a run failed; names node and device.
        """
        examples = _dataset(data)
        order = examples.order(self._seed, self.epoch)
        logical = self._batch * self._accumulate
        if len(order) < logical:
            raise SchedulerError(f"a step takes {logical} examples, and there are {len(order)}")
        start = perf_counter()
        for batch in examples.batches(self._batch, order[: len(order) // logical * logical], self._place):
            self._train(batch, start)
            if self._place % self._accumulate == 0 and on_step is not None:
                on_step(self)
            start = perf_counter()
        metrics = self._tally.metrics()
        self.epoch, self._place, self._tally = self.epoch + 1, 0, _Tally()
        return metrics

    def _train(self, batch: Batch, start: float) -> None:
        rate = np.float32(self._lr(self.steps))
        if self._accumulate == 1:
            found = self._program("step", batch).run({**batch, "learning_rate": rate})
        else:
            found = self._program("part", batch).run(batch)
        self._place += 1
        if self._place % self._accumulate == 0:
            if self._accumulate > 1:
                self._program("apply", {}).run(learning_rate=rate)
            self.steps += 1
        self._note(self._tally, batch, found, start)

    def evaluate(self, data: Dataset | Mapping[str, Any]) -> Metrics:
        """The metrics of all examples, without training. Raises as `run_epoch`."""
        tally = _Tally()
        start = perf_counter()
        for batch in _dataset(data).batches(self._batch, keep_rest=True):
            found = self._program("evaluation", batch).run(batch)
            self._note(tally, batch, found, start)
            start = perf_counter()
        return tally.metrics()

    def _note(self, tally: _Tally, batch: Batch, found: Mapping[str, Any], start: float) -> None:
        wanted = batch[self._target]
        right = found.get("right", nan) * (len(wanted) / wanted.size)  # in examples, of which each may have many labels
        tally.add(len(wanted), float(found["loss"]), float(right), perf_counter() - start)

    def fit(
        self,
        data: Dataset | Mapping[str, Any],
        epochs: int,
        validation: Dataset | Mapping[str, Any] | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        patience: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        progress: bool = False,
    ) -> list[Epoch]:
        """Train until there have been ``epochs`` epochs in all, those before a checkpoint included.

        Args:
            data: the examples to train on.
            epochs: how many.
            validation: further examples, evaluated after each epoch.
            callbacks: called after each epoch with the trainer and the `Epoch`; what returns True ends the training.
            patience: end after this many epochs in a row without a lower loss (of validation, if there is any).
            checkpoint: a file that is written after each epoch, and every ``every`` steps.
            every: see checkpoint.
            progress: show a progress bar on standard error.

        Returns:
            The history.

        Raises:
            SchedulerError, ExecutionError, CheckpointError: as `run_epoch` and `save`.
        """
        train, held = _dataset(data), None if validation is None else _dataset(validation)

        def save(_: Trainer) -> None:
            if checkpoint is not None and every is not None and self.steps % every == 0:
                self.save(checkpoint, train)

        for _ in self._shown(epochs, progress):
            found = self.run_epoch(train, save)
            rate = float(self._lr(max(self.steps - 1, 0)))
            row = Epoch(self.epoch - 1, found, None if held is None else self.evaluate(held), rate)
            self.history.append(row)
            if checkpoint is not None:
                self.save(checkpoint, train)
            asked = [callback(self, row) is True for callback in callbacks]  # each is called
            if any(asked) or self._is_stuck(patience):
                break
        return self.history

    def _is_stuck(self, patience: int | None) -> bool:
        if patience is None:
            return False
        losses = [(row.validation or row.train).loss for row in self.history]
        best = losses.index(min(losses))
        return len(losses) - 1 - best >= patience

    def _shown(self, epochs: int, progress: bool) -> Iterator[int]:
        """The numbers of the epochs that are left, with a bar if it is wanted."""
        if not progress:
            yield from range(self.epoch, epochs)
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("training", total=epochs, completed=self.epoch)
            for epoch in range(self.epoch, epochs):
                yield epoch
                loss = (self.history[-1].validation or self.history[-1].train).loss
                bar.update(task, advance=1, description=f"loss {loss:.4g}")

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def _states(self) -> dict[str, Tensor]:
        scaling = {} if self._scaling is None else self._scaling.states
        sums = {tensor.name: tensor for tensor in self._sums.values()}
        return {**self._optimizer.params, **self._optimizer.states, **scaling, **sums}

    def _structure(self, data: Dataset) -> str:
        """A hash of what has to be equal for a training to go on as if it had never stopped."""
        facts = {
            "states": {name: (t.dtype.name, t.shape) for name, t in self._states.items()},
            "optimizer": (type(self._optimizer).__name__, self._optimizer.options),
            "batches": (self._batch, self._accumulate, self._clip),
            "data": repr(data),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str], data: Dataset | Mapping[str, Any]) -> None:
        """Write a checkpoint: a safetensors file with parameters, moments and the scale of the loss, and with step,
        seed, place in the order of the examples, and history.

        Args:
            path: of the file; what was there stays until the new one is complete.
            data: the examples that it is trained on, whose number and kind are noted.

        Raises:
            CheckpointError: the file cannot be written.
            ExecutionError: a failed run left a state half written.
            Unavailable: the package safetensors is not installed.
        """
        facts = {
            "structure": self._structure(_dataset(data)),
            "steps": self.steps,
            "epoch": self.epoch,
            "place": self._place,
            "seed": self._seed,
            "tally": self._tally.sums(),
            "history": self.history,
        }
        write_checkpoint(path, self._states, facts)

    def load(self, path: str | os.PathLike[str], data: Dataset | Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what follows is equal, bit for bit, to what would have followed it.

        Args:
            path: of the file.
            data: the examples to go on with.

        Raises:
            CheckpointError: a file that is missing, damaged or of another training; nothing is changed.
            Unavailable: the package safetensors is not installed.
        """
        facts = restore(path, self._states, self._structure(_dataset(data)))
        self.steps, self.epoch, self._place = facts["steps"], facts["epoch"], facts["place"]
        self._seed, self._tally = facts["seed"], _Tally(facts["tally"])
        self.history = [
            Epoch(epoch, Metrics(*train), None if held is None else Metrics(*held), rate)
            for epoch, train, held, rate in facts["history"]
        ]


def _dataset(data: Dataset | Mapping[str, Any]) -> Dataset:
    return data if isinstance(data, Dataset) else Dataset(data)


def _wide(dtype: DType) -> DType:
    return dtype if dtype.itemsize >= f32.itemsize else f32
