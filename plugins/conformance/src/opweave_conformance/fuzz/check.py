"""`check`: runs a graph on the devices of a scheduler and compares every output with the references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import opweave as ow
from opweave import leaf_memory, registry
from opweave.errors import UnsupportedOpError
from opweave.graph.graph import Graph
from opweave.graph.opdef import find_op
from opweave.graph.precision import Precision
from opweave.graph.tensor import Tensor, node
from opweave.ops.movement import after, copy
from opweave.scheduler.place.precision import checked_precision, precisions_of
from opweave_conformance.fuzz.samples import COUNT, Samples, differences, evaluate

if TYPE_CHECKING:
    from opweave.scheduler import Program, Scheduler
    from opweave_conformance.fuzz.leaves import Leaves

__all__ = ["REACHED", "Mismatch", "apply", "check", "tune"]

Array = np.ndarray[Any, Any]

MORE: Final = 32
"""Samples where a device seems wrong with fewer: the spread of few may be small by chance."""

REACHED: Final[Counter[tuple[str, str]]] = Counter()
"""How often `check` ran an operation on a device in this process, by their names."""


class Mismatch(Exception):
    """A device computed something that is farther from the reference than it may be."""


def apply(op: str, *srcs: Tensor, **attrs: Any) -> Tensor:
    """The node that applies an operation to ``srcs``, with attributes as they are in nodes."""
    if op == "after":
        return after(srcs[0], srcs[1:])
    return node(find_op(op), srcs, attrs)


def tune(device: str, **values: int) -> None:
    """Give the named limits of a device (`opweave.contract.Limit`) values; raises `KeyError` for one that it lacks."""
    known = {limit.name: limit for limit in registry.device(device).limits}
    for name, value in values.items():
        known[name].value = value


def check(
    scheduler: Scheduler,
    leaves: Leaves,
    outputs: Sequence[Tensor],
    *,
    pins: Mapping[Tensor, str] | None = None,
    precision: Precision = "exact",
    runs: int = 1,
    how: str = "run",
    largest: Sequence[Tensor] = (),
) -> None:
    """Build a program and run it, and compare outputs, observed values and states with the references.

    Args:
        pins: node -> the device that runs it, where that supports it.
        precision: how roughly products may be computed.
        runs: how often; inputs have new values in each.
        how: ``"run"``; ``"submit"``: all of them before the first result is asked for; ``"observe"``: with every value
            shown; ``"warm"``: after `Program.warm`; ``"reserve"``: after `Scheduler.reserve`; ``"on_device"``: with
            inputs that lie on the device that reads them, where it exports arrays, and outputs that stay where they
            were computed until all runs are over.
        largest: the outputs in other sizes, of inputs of the same names: the graph runs as a compiled function whose
            ``max_shapes`` are the shapes of these inputs.

    Raises:
        Mismatch: something is wrong; says what.
        OpweaveError: as `Scheduler.build` and `Program.run`.
    """
    outputs = tuple(outputs)
    graph = Graph(outputs)
    supported = {t: d for t, d in (pins or {}).items() if scheduler.supports(d, t)}
    if how == "reserve":
        scheduler.reserve(outputs)
    program: Any = None
    if largest:
        function, names = _as_function(scheduler, outputs, largest, precision)
        program = function.program(**{n: v for n, v in leaves.feeds().items() if n in names})
    else:
        program = scheduler.build(outputs, supported, precision=precision)
    expected = _Expected(graph, leaves, precision)
    if how == "warm":
        program.warm()
    under_way: list[tuple[int, Any]] = []
    kept: list[tuple[int, Any]] = []
    for run in range(runs):
        if run:
            leaves.next_run()
        feeds = {name: value for name, value in leaves.feeds().items() if name in program.inputs}
        if how == "submit":
            under_way.append((run, program.submit(feeds)))
            expected.add()
            continue
        observed: list[tuple[Tensor, Array]] = []
        if how == "observe":
            with program.observe(partial(_keep, observed)):
                got = program.run(feeds)
        elif how == "on_device":
            kept.append((run, program.run(_on_device(scheduler, program, graph, feeds), on_device=True)))
            expected.add()
            expected.compare_states(run)
            continue
        else:
            got = program.run(feeds)
        expected.add()
        expected.compare(run, got, observed)
        expected.compare_states(run)
    for run, future in under_way:
        expected.compare(run, future.result(), [])
    for run, got in kept:
        expected.compare(run, [leaf_memory.read_leaf(ow.from_dlpack(array)) for array in got], [])
    expected.compare_states(runs - 1)
    _count(program, graph)
    program.close()


def _as_function(
    scheduler: Scheduler, outputs: Sequence[Tensor], largest: Sequence[Tensor], precision: Precision
) -> tuple[Any, list[str]]:
    """The compiled function that gives ``outputs``, or ``largest`` for inputs of the shapes of those; and the names of
    its arguments."""
    inputs, larger = _inputs(outputs), _inputs(largest)

    def traced(**given: Tensor) -> tuple[Tensor, ...]:
        return tuple(outputs if all(given[name].shape == inputs[name].shape for name in inputs) else largest)

    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in inputs]
    traced.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    shapes = {name: larger[name].shape for name in inputs}
    return ow.compile(traced, devices=scheduler, max_shapes=shapes, precision=precision), list(inputs)


def _inputs(outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    return {t.name: t for t in Graph(outputs).leaves if t.leaf is not None and t.leaf.kind == "input"}


def _on_device(scheduler: Scheduler, program: Program, graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Any]:
    """The inputs' values, in the memory of the device that reads them where it is one that exports arrays."""
    found: dict[str, Any] = dict(feeds)
    for name, tensor in _inputs(graph.outputs).items():
        nodes = [t for t in graph.nodes if not t.is_view and t.size and any(s.root is tensor for s in t.srcs)]
        readers = {program.device_of(t).name for t in nodes} & {device.name for device in scheduler.devices}
        if len(readers) != 1 or tensor.dtype.is_quantized or not tensor.size:
            continue
        copied, reader = copy(tensor), readers.pop()
        if scheduler.supports(reader, copied):
            with closing(scheduler.build(copied, {copied: reader})) as copying, suppress(UnsupportedOpError):
                found[name] = copying.run({name: feeds[name]}, on_device=True)
    return found


def _keep(observed: list[tuple[Tensor, Array]], tensor: Tensor, value: Array) -> None:
    observed.append((tensor, value))


def _count(program: Program, graph: Graph) -> None:
    for tensor in graph.nodes:
        if tensor.op is not None and not tensor.is_view and tensor.size:
            REACHED[tensor.op.name, program.device_of(tensor).name] += 1


class _Expected:
    """What the runs of a graph have to give, by the references."""

    def __init__(self, graph: Graph, leaves: Leaves, precision: Precision) -> None:
        self.graph: Final = graph
        self.leaves: Final = leaves
        self.precisions: Final = precisions_of(graph.nodes, checked_precision(precision))
        self.states: Final[dict[Tensor, Samples]] = {}
        self.written: Final = {t.memory: t for t in graph.nodes if t.op is not None and t.op.writes}
        self.runs: Final[list[tuple[dict[Tensor, Samples], dict[Tensor, Samples]]]] = []

    def add(self) -> None:
        """Compute the next run, with the present values of the inputs and what the run before left in the states."""
        before = {t: [value] for t, value in self.leaves.values.items()} | self.states
        known = self._evaluated(before, COUNT)
        self.runs.append((before, known))
        self.states.update({state: known[last] for state, last in self.written.items()})

    def _evaluated(self, before: dict[Tensor, Samples], count: int) -> dict[Tensor, Samples]:
        known = {t: before[t] for t in self.graph.leaves}
        evaluate(self.graph.nodes, known, np.random.default_rng(count), self.precisions, count)
        return known

    def compare(self, run: int, got: Sequence[Array], observed: Sequence[tuple[Tensor, Array]]) -> None:
        """Raises `Mismatch` where observed values or the outputs of a run are wrong."""
        for tensor, value in observed:
            if not tensor.op or not tensor.op.writes:
                self._compare(run, tensor, value, "observed ")
        for i, (tensor, value) in enumerate(zip(self.graph.outputs, got, strict=True)):
            self._compare(run, tensor, np.asarray(value), f"output {i}, ")

    def compare_states(self, run: int) -> None:
        """Raises `Mismatch` where what the states hold after a run is wrong."""
        for state, last in self.written.items():
            self._compare(run, last, leaf_memory.read_leaf(state), f"the state after it, {state.name}, ")

    def _compare(self, run: int, tensor: Tensor, got: Array, what: str) -> None:
        before, known = self.runs[run]
        if tensor not in known or not differences(got, known[tensor]):
            return
        found = differences(got, self._evaluated(before, MORE)[tensor])
        if found:
            raise Mismatch(f"run {run}: {what}{tensor.describe()}: {found}")
