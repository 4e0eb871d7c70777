"""`Trainer`: steps, epochs and evaluation of a model over data sets, with checkpoints from which it goes on."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite, nan
from time import perf_counter
from typing import Any, Final, Literal

import numpy as np

from opweave import ops, registry
from opweave.errors import CheckpointError, DTypeError, OpweaveError, SchedulerError
from opweave.graph.graph import Graph
from opweave.graph.leaf import parts_of
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import read_leaf, write_state
from opweave.ops.operands import is_number
from opweave.scheduler import Program, Scheduler
from opweave.warning import OpweaveWarning
from opweave_training.checkpoint import check_writable, restore, write_checkpoint
from opweave_training.data import Batch, Dataset
from opweave_training.metrics import Epoch, Metrics, Tally, since_best
from opweave_training.optimizers import LossScale, Optimizer
from opweave_training.schedules import SAMPLED, Schedule, as_count, as_schedule
from opweave_training.step import Loss, StepGraphs

__all__ = ["Trainer"]

Array = np.ndarray[Any, Any]
Callback = Callable[["Trainer", Epoch], Any]


class Trainer:
    """Trains a model.

    Args:
        model: called with the inputs by name, as tensors with a first axis of examples; returns predictions. It reads
            the optimizer's parameters. If it has a parameter ``step``, that is the number of the physical batch, i64 of
            shape (), to be a counter of random numbers, and ``None`` in evaluation.
        optimizer: with the parameters.
        lr: the learning rate: a number, or a function of the number of the step. (Options of optimizers may be such
            functions too.) It is fed in f64 where a parameter is f64, else in f32.
        loss: called with predictions and target; returns the mean over the examples, of shape (). By default
            ``ow.cross_entropy``.
        reduction: ``"sum"``: the loss is the sum over the examples, and so is that of a logical batch. Metrics give the
            mean over the examples all the same.
        target: the name of the target in data sets. If it has integers, in the shape of the predictions without their
            last axis, they are labels, and accuracy is counted.
        batch: examples of a physical batch.
        accumulate: physical batches of a logical one, after which there is a step with the mean of their gradients,
            or with their sum.
        drop_last: leave out the last examples of an epoch where they are fewer than a logical batch. Otherwise there is
            a step with them: the mean is that over these examples.
        shuffle: the order of the examples differs from epoch to epoch; ``False``: it is that of the data; a number:
            that of the first so many differs.
        clip_norm: the largest Euclidean norm of all gradients together (`clip_by_norm`); ``None``: any.
        loss_scale: for parameters or values of half types; steps with NaN or infinite gradients are left out.
        skip_nonfinite: leave out steps with NaN or infinite gradients also without a scale of the loss. (States that
            the model writes are written all the same.)
        seed: of the order of the examples, which differs from epoch to epoch.
        devices: a device, its name, several, or a scheduler; by default `opweave.default_devices`. With one that is
            ``parallel``, the next batch is brought to the device while a step runs.
        replicas: some of the devices, each of which works on a physical batch of its own, beside the others
            (data-parallel); a logical batch has that many more physical ones. Their gradients are added in this
            order, so that on devices of one kind the result is, bit for bit, that of accumulating on one of them.
        snapshot_every: after so many steps all states are copied to the host, for `without`; ``None``: never.

    Attributes:
        steps: how many there have been.
        epoch: number of the present epoch.
        history: the epochs that are complete.
        scheduler: what runs the programs.

    Raises:
        SchedulerError: ``batch``, ``accumulate`` or ``snapshot_every`` is no positive integer, or ``seed`` or
            ``shuffle`` none of at least 0; another ``reduction``; a replica that is not among the devices; a parameter
            named like a state of the loss scale.
        DTypeError: a learning rate that is no finite number of at least 0.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        optimizer: Optimizer,
        lr: float | Schedule,
        *,
        loss: Loss = ops.cross_entropy,
        reduction: Literal["mean", "sum"] = "mean",
        target: str = "labels",
        batch: int = 32,
        accumulate: int = 1,
        drop_last: bool = True,
        shuffle: bool | int = True,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        skip_nonfinite: bool = False,
        seed: int = 0,
        devices: Any = None,
        replicas: Sequence[Any] = (),
        snapshot_every: int | None = None,
    ) -> None:
        if snapshot_every is not None:
            snapshot_every = as_count("snapshot_every, a number of steps,", snapshot_every)
        batch, accumulate = as_count("batch", batch), as_count("accumulate", accumulate)
        if loss_scale is not None and (taken := loss_scale.states.keys() & optimizer.params.keys()):
            raise SchedulerError(f"no parameter is named {min(taken)!r}, as a state of the loss scale is")
        self._target: Final = target
        self._optimizer: Final = optimizer
        self._lr: Final[Schedule] = as_schedule(lr)
        self._batch, self._runs, self._replicas = batch, accumulate, max(len(replicas), 1)
        if reduction not in ("mean", "sum"):
            raise SchedulerError(f"the reduction of a loss is 'mean' or 'sum', not {reduction!r:.60}")
        self._logical: Final = batch * accumulate * self._replicas
        self._drop_last: Final = drop_last
        self._first: Final = shuffle if isinstance(shuffle, bool) else as_count("shuffle", shuffle, 0)
        self._averaged: Final = reduction == "mean"
        self._options: Final = (batch, accumulate * self._replicas, clip_norm)
        self._further: Final = {
            "reduction": reduction,
            "drop_last": bool(drop_last),
            "shuffle": repr(self._first),
            "skip": bool(skip_nonfinite),
        }
        self._scaling = loss_scale
        self._seed = as_count("a seed", seed, 0)
        self._owned = not isinstance(devices, Scheduler)
        self.scheduler: Scheduler = (
            devices
            if isinstance(devices, Scheduler)
            else Scheduler(list(registry.default_devices()) if devices is None else devices)
        )
        self.steps = 0
        self.epoch = 0
        self.history: list[Epoch] = []
        self._place = 0  # physical batches of the present epoch that are done
        self._between = True  # whether the states are those of ``_place``: no step has begun that did not end
        self._tally = Tally()
        self._programs: dict[Any, Program] = {}
        self._snapshot_every: Final = snapshot_every
        self._snapshot: tuple[dict[str, Array], dict[str, Any]] | None = None
        self._graphs: Final = StepGraphs(
            model, optimizer, loss, reduction, target, accumulate, clip_norm, loss_scale, skip_nonfinite, self._replicas
        )
        self._training: Final = "step" if self._runs == 1 else "part"  # the program of a physical batch
        self._written: dict[str, Tensor] = {}  # states that the model writes in training
        self._places = [self.scheduler.find(replica) for replica in replicas]

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

    def _program(self, kind: str, *given: Any) -> Program:
        """The program for what builds its graph: batches of these shapes; built once."""
        key = (kind, *_shapes(given))
        known = self._programs.get(key)
        if known is None:
            outputs, replicas = getattr(self._graphs, kind)(*given)
            pins = self._pins(replicas)
            known = self._programs[key] = self.scheduler.build(outputs, pins)
            own, annotated = {**self._states, **self._sums}, known.partition.annotated
            wholes = {part: whole for whole in annotated.sharded for part in parts_of(whole)}
            for node in annotated.graph.nodes if kind == self._training else ():
                state = wholes.get(node.memory, node.memory)
                if node.op is not None and node.op.writes and state.key not in own:
                    self._written[state.key] = state
        return known

    def _pins(self, replicas: Sequence[Sequence[Tensor]]) -> dict[Tensor, Any]:
        """Node -> the device of its replica, where that supports it. What replicas share belongs to the first one."""
        pins: dict[Tensor, Any] = {}
        for i, tensors in enumerate(replicas if self._places else ()):
            place = self._places[i % len(self._places)]
            for node in Graph(tensors).nodes:
                if not node.is_view and node not in pins and self.scheduler.supports(place, node):
                    pins[node] = place
        return pins

    # --- running ----------------------------------------------------------------------------------------------------

    def run_epoch(self, data: Dataset | Mapping[str, Any], on_step: Callable[[Trainer], Any] | None = None) -> Metrics:
        """Train on every example once, in an order that follows from seed and epoch, from where the present epoch is.
        The last examples, where they are fewer than a logical batch, are left out, or a step with ``drop_last=False``.

        Args:
            data: the examples.
            on_step: called after each step.

        Raises:
            SchedulerError: fewer examples than a logical batch, no target among the arrays, or an earlier step was
                interrupted while it wrote the states (see `go_back`).
            ExecutionError: a run failed; names node and device.
        """
        self._check_between()
        examples = _dataset(data)
        order = examples.order(self._seed, self.epoch, self._first)
        logical = self._logical
        if len(order) < logical and self._drop_last:
            raise SchedulerError(f"a step takes {logical} examples, and there are {len(order)}")
        if self._snapshot_every is not None and self._snapshot is None:
            self._know_states(examples)
            self._snapshot = self._values(), self._facts()
        order = order[: len(order) // logical * logical] if self._drop_last else order
        batches = examples.batches(self._batch, order, self._place, keep_rest=True)
        under_way: list[Callable[[], None]] = []
        start = perf_counter()
        while together := list(islice(batches, self._replicas)):
            begun = self._place * self._batch
            step = range(begun // logical * logical, len(order))[:logical]  # the places of its examples
            done = begun + sum([len(next(iter(batch.values()))) for batch in together])
            stepped = done == step.stop
            under_way.append(self._train(together, len(step), stepped, start))
            start = perf_counter()
            keep = stepped and self._snapshot_every is not None and self.steps % self._snapshot_every == 0
            # The next batch is brought to the device meanwhile, unless somebody looks at this step.
            while len(under_way) > (1 if self.scheduler.parallel and not keep and on_step is None else 0):
                under_way.pop(0)()
            self._between = not under_way
            if keep:
                self._snapshot = self._values(), self._facts()
            if stepped and on_step is not None:
                on_step(self)
        for finish in under_way:
            finish()
        self._between = True
        metrics = self._tally.metrics()
        self.epoch, self._place, self._tally = self.epoch + 1, 0, Tally()
        return metrics

    def _train(self, batches: Sequence[Batch], examples: int, last: bool, start: float) -> Callable[[], None]:
        """Begin a program with a batch for each replica, of a step of so many examples, whose last one it may be; what
        is returned waits for it and notes what it found."""
        feeds: dict[str, Any] = {}
        number = self.steps * self._runs * self._replicas + self._place % (self._runs * self._replicas)
        for i, batch in enumerate(batches):
            counted = {"step": np.int64(number + i)} if self._graphs.counts else {}
            feeds |= {f"{name}.{i}" if i else name: a for name, a in {**batch, **counted}.items()}
        rate = self._rates()
        program = self._program(self._training, batches, examples)
        if self._runs == 1:
            feeds |= rate
        feeds = _used(program, feeds)
        between, self._between = self._between, False
        try:
            under_way = program.submit(feeds) if self.scheduler.parallel else None
            result = {} if under_way is not None else program.run(feeds)
        except OpweaveError:
            self._between = between  # nothing was counted, and reading a half-written state raises
            raise
        self._place += len(batches)
        if last:
            if self._runs > 1:
                self._program("apply").run(rate)
            self.steps += 1
        tally = self._tally
        return lambda: self._note(tally, batches, result if under_way is None else under_way.result(), start)

    def _rates(self) -> dict[str, Any]:
        """Learning rate and scheduled options of the next step. A schedule of the caller may go below 0, to go up the
        loss."""
        rate = self._lr(self.steps)
        if not (is_number(rate) and isfinite(rate)):
            raise DTypeError(f"the learning rate of step {self.steps} is a finite number, not {rate!r}")
        return {
            "learning_rate": np.asarray(rate, self._optimizer.rate_dtype.numpy), **self._optimizer.feeds(self.steps)
        }  # fmt: skip

    def evaluate(self, data: Dataset | Mapping[str, Any]) -> Metrics:
        """The metrics of all examples, without training. Raises as `run_epoch`."""
        tally = Tally()
        start = perf_counter()
        for batch in _dataset(data).batches(self._batch, keep_rest=True):
            program = self._program("evaluation", batch)
            found = program.run(_used(program, batch))
            self._note(tally, [batch], found, start)
            start = perf_counter()
        return tally.metrics()

    def predict(self, data: Dataset | Mapping[str, Any]) -> Array:
        """What the model predicts for all examples, in their order; a target among the arrays is left out.

        Raises:
            ExecutionError: as `run_epoch`.
        """
        found = []
        for batch in _dataset(data).batches(self._batch, keep_rest=True):
            given = {name: array for name, array in batch.items() if name != self._target}
            program = self._program("prediction", given)
            found.append(program.run(_used(program, given))["predictions"])
        return np.concatenate(found)

    def _note(self, tally: Tally, batches: Sequence[Batch], found: Mapping[str, Any], start: float) -> None:
        for i, batch in enumerate(batches):
            loss, right = (found.get(f"{name}.{i}" if i else name, nan) for name in ("loss", "right"))
            wanted = batch[self._target]
            share = len(wanted) / wanted.size  # of an example, which may have many labels
            seconds = (perf_counter() - start) / len(batches)
            mean = float(loss) if self._averaged else float(loss) / len(wanted)
            tally.add(len(wanted), mean, float(right) * share, seconds)

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
            SchedulerError: numbers that are no positive integers (``epochs`` may be 0), ``every`` without a checkpoint,
                a callback that cannot be called; or as `run_epoch`.
            ExecutionError: as `run_epoch`.
            CheckpointError: as `save`; before the first step if the folder of the file is not there.
            Unavailable: as `save`.
        """
        epochs = as_count("epochs", epochs, 0)
        patience = None if patience is None else as_count("patience, a number of epochs,", patience)
        every = None if every is None else as_count("every, a number of steps,", every)
        if every is not None and checkpoint is None:
            raise SchedulerError("every says how often a checkpoint is written: pass its file as checkpoint")
        if not (isinstance(callbacks, Sequence) and all(map(callable, callbacks))):
            raise SchedulerError(f"callbacks are a sequence of functions, not {callbacks!r:.60}")
        if checkpoint is not None:
            check_writable(checkpoint)
        train, held = _dataset(data), None if validation is None else _dataset(validation)

        def save(_: Trainer) -> None:
            if checkpoint is not None and every is not None and self.steps % every == 0:
                self.save(checkpoint, train)

        for _ in self._shown(epochs, progress):
            found = self.run_epoch(train, None if every is None else save)
            rate = float(self._lr(max(self.steps - 1, 0)))
            if not isfinite(found.loss) and all(isfinite(row.train.loss) for row in self.history):
                warnings.warn(f"the loss of epoch {self.epoch - 1} is {found.loss}", OpweaveWarning, stacklevel=2)
            row = Epoch(self.epoch - 1, found, None if held is None else self.evaluate(held), rate)
            self.history.append(row)
            if checkpoint is not None:
                self.save(checkpoint, train)
            asked = [callback(self, row) is True for callback in callbacks]  # each is called
            if any(asked) or (patience is not None and since_best(self.history) >= patience):
                break
        return self.history

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
        return {**self._optimizer.params, **self._optimizer.states, **scaling, **self._written}

    @property
    def _sums(self) -> dict[str, Tensor]:
        """States that sum the gradients of a step that several programs make; none where one program makes it."""
        return {tensor.key: tensor for tensor in self._graphs.sums.values()}

    def _values(self) -> dict[str, Array]:
        return {name: np.array(read_leaf(tensor)) for name, tensor in {**self._states, **self._sums}.items()}

    def _know_states(self, data: Dataset) -> None:
        """Build the program of a batch: then the states that the model writes are known."""
        batch = data.take(np.arange(self._batch) % len(data))
        self._program(self._training, [batch] * self._replicas, self._logical)

    def _structure(self, data: Dataset) -> str:
        """A hash of what has to be equal for a training to go on as if it had never stopped."""
        self._know_states(data)
        facts = {
            "states": {name: (t.dtype.name, t.shape) for name, t in self._states.items()},
            "optimizer": (type(self._optimizer).__name__, self._optimizer.options),
            "batches": self._options,
            "rates": [float(self._lr(step)) for step in SAMPLED],
            "data": repr(data),
        }
        if self._further != {"reduction": "mean", "drop_last": True, "shuffle": "True", "skip": False}:
            facts["further"] = self._further
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _facts(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "epoch": self.epoch,
            "place": self._place,
            "seed": self._seed,
            "tally": self._tally.sums(),
            "history": list(self.history),
        }

    def _go_on(self, facts: Mapping[str, Any]) -> None:
        self.steps, self.epoch, self._place = facts["steps"], facts["epoch"], facts["place"]
        self._seed, self._tally, self._between = facts["seed"], Tally(facts["tally"]), True
        self.history = [
            Epoch(epoch, Metrics(*train), None if held is None else Metrics(*held), rate)
            for epoch, train, held, rate in facts["history"]
        ]

    def without(self, device: Any, checkpoint: str | os.PathLike[str] | None = None, data: Any = None) -> None:
        """Go on without a device, which was lost: from the last snapshot (``snapshot_every``), or from a checkpoint.

        What was on the device goes to the others; its replicas, as many as before, are shared among those that are
        left. Call `fit` or `run_epoch` again.

        Args:
            device: one of the scheduler's, e.g. ``error.device`` of an `ExecutionError`.
            checkpoint: a file to go on from instead of the snapshot.
            data: the examples, needed with a checkpoint.

        Raises:
            SchedulerError: not a device of the scheduler, or its only one.
            CheckpointError: neither a snapshot nor a checkpoint; or as `load`.
        """
        self._check_source(checkpoint)
        lost = self.scheduler.find(device)
        self.scheduler, self._owned = self.scheduler.without(lost), True
        self._places = [place for place in self._places if place is not lost]
        self._programs.clear()
        self.go_back(checkpoint, data)

    def go_back(self, checkpoint: str | os.PathLike[str] | None = None, data: Any = None) -> None:
        """Go on from the last snapshot (``snapshot_every``) or from a checkpoint, e.g. after Ctrl-C interrupted a step
        while it wrote the states. Call `fit` or `run_epoch` again.

        ``checkpoint``, ``data`` and the `CheckpointError` are those of `without`.
        """
        self._check_source(checkpoint)
        if checkpoint is not None:
            self.load(checkpoint, data)
            return
        assert self._snapshot is not None
        arrays, facts = self._snapshot
        for name, tensor in {**self._states, **self._sums}.items():
            write_state(tensor, arrays[name])
        self._go_on(facts)

    def _check_source(self, checkpoint: str | os.PathLike[str] | None) -> None:
        if self._snapshot is None and checkpoint is None:
            raise CheckpointError("there is no snapshot to go on from: use snapshot_every=, or pass a checkpoint")

    def _check_between(self) -> None:
        if not self._between:
            raise SchedulerError(
                "a step was interrupted, and nobody knows which states it has written: go on from a snapshot (go_back) "
                "or a checkpoint (load)"
            )

    def save(self, path: str | os.PathLike[str], data: Dataset | Mapping[str, Any]) -> None:
        """Write a checkpoint: a safetensors file with parameters, moments and the scale of the loss, and with step,
        seed, place in the order of the examples, and history.

        Args:
            path: of the file; what was there stays until the new one is complete.
            data: the examples that it is trained on, whose number and kind are noted.

        Raises:
            CheckpointError: the file cannot be written.
            SchedulerError: a step was interrupted while it wrote the states (see `go_back`).
            ExecutionError: a failed run left a state half written.
            Unavailable: the package safetensors is not installed.
        """
        self._check_between()
        structure = self._structure(_dataset(data))
        # Within a step, gradients have been added up; otherwise their sums are 0.
        sums = self._sums if self._place % (self._runs * self._replicas) else {}
        write_checkpoint(path, {**self._states, **sums}, {**self._facts(), "structure": structure})

    def load(self, path: str | os.PathLike[str], data: Dataset | Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what follows is equal, bit for bit, to what would have followed it.

        Since then replicas may have become as many accumulated batches, or the other way round.

        Args:
            path: of the file.
            data: the examples to go on with.

        Raises:
            CheckpointError: a file that is missing, damaged or of another training; nothing is changed.
            Unavailable: the package safetensors is not installed.
        """
        structure = self._structure(_dataset(data))
        self._go_on(restore(path, self._states, structure, self._sums))
        self._snapshot = None  # it belongs to the training before


def _shapes(given: Any) -> list[Any]:
    """What distinguishes the programs that are built for batches and numbers."""
    if isinstance(given, Mapping):
        return [(name, a.shape, a.dtype.str) for name, a in given.items()]
    return [tuple(_shapes(each)) if isinstance(each, (Mapping, list, tuple)) else each for each in given]


def _used(program: Program, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the feeds that are inputs of the program: a model need not use everything that it is called with."""
    return {name: feeds[name] for name in program.inputs if name in feeds}


def _dataset(data: Dataset | Mapping[str, Any]) -> Dataset:
    return data if isinstance(data, Dataset) else Dataset(data)
