"""`Runner`: runs a graph of ONNX for feeds of any shapes, by programs of a scheduler.

For each combination of shapes a graph is traced once (`opweave_onnx.trace`). Where tracing needs a value that devices
compute (a shape, a condition, the number of elements that are not zero), the trace is cut: the nodes before the cut are
one program, the host reads the value, and the nodes behind it are traced for this value. A `Stage` is a program and the
function that the host runs after it. The stages of one combination of shapes are a tree, whose branches are the values,
or the shapes, that were found. A run along known branches traces nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock, RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.graph.tensor import Tensor
from opweave_onnx.graphs import Graph
from opweave_onnx.tensors import Array

if TYPE_CHECKING:
    from opweave.scheduler import Program
    from opweave_onnx.session import Session

__all__ = ["Name", "Runner", "Stage", "arrays_in", "key_of", "named_arrays"]

BRANCHES_KEPT: Final = 64
"""Branches of one stage that are kept; the oldest one is dropped first."""


class Name(str):
    """The name of a fed or computed array, used in place of the array itself."""


@dataclass(eq=False)
class Stage:
    """A program and what follows it.

    Attributes:
        program: computes the values that the host and later stages read; ``None`` if there is nothing to compute.
        outputs: of the last stage: name -> array, `Name`, or lists of them.
        function: called by the host with ``sources``; ``None`` for the last stage.
        sources: arrays and `Name`s.
        by_value: whether the next stage depends on the values that the function returns, or on their shapes only.
        label: the prefix of the names of the arrays that the function returns.
        branches: key of what the function returned -> the next stage.
    """

    program: Program[dict[str, Array]] | None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    sources: Sequence[Any] = ()
    by_value: bool = False
    label: str = ""
    branches: OrderedDict[Any, Stage] = field(default_factory=OrderedDict)

    def compute(self, values: dict[str, Array]) -> dict[str, Array]:
        """Run the program; returns what it computed."""
        if self.program is None:
            return {}
        return self.program.run({name: values[name] for name in self.program.inputs})

    def look(self, values: Mapping[str, Array]) -> Any:
        """Call the function; returns its result."""
        assert self.function is not None
        return self.function(*[resolved(source, values) for source in self.sources])

    def close(self) -> None:
        """Close the programs of this and all later stages."""
        for stage in self.branches.values():
            stage.close()
        if self.program is not None:
            self.program.close()


def resolved(value: Any, values: Mapping[str, Array]) -> Any:
    """The arrays that `Name`s in ``value`` stand for."""
    if isinstance(value, Name):
        return values[value]
    if isinstance(value, list):
        return [resolved(v, values) for v in value]
    return value


def key_of(value: Any, by_value: bool = False) -> Any:
    """A key of an array, or of nested lists of them: dtype and shape, and with ``by_value`` the values."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([key_of(v, by_value) for v in value])
    return (value.dtype, value.shape, value.tobytes() if by_value else None)


def key_of_feeds(feeds: Mapping[str, Any]) -> Any:
    """A key of the names, dtypes and shapes of feeds."""
    return tuple([(name, key_of(value)) for name, value in feeds.items()])


def named_arrays(value: Any, label: str) -> dict[str, Array]:
    """The arrays in a value or in nested lists, by name: ``label``, in lists ``label.0``, ``label.1``, ..."""
    if isinstance(value, np.ndarray):
        return {label: value}
    if value is None:
        return {}
    if isinstance(value, (list, tuple)):
        return {name: a for i, v in enumerate(value) for name, a in named_arrays(v, f"{label}.{i}").items()}
    return {label: value}


def arrays_in(value: Any) -> Any:
    """Numbers and arrays in nested lists as arrays."""
    if value is None or isinstance(value, np.ndarray):
        return value
    return [arrays_in(v) for v in value] if isinstance(value, (list, tuple)) else np.asarray(value)


class Runner:
    """Runs one graph.

    Attributes:
        graph: the graph.
        captured: names that are fed besides its inputs, because they come from graphs around it.
        traced: how often a graph was traced, and the seconds it took.
    """

    def __init__(self, session: Session, graph: Graph, captured: frozenset[str] = frozenset()) -> None:
        self.session: Final = session
        self.graph: Final = graph
        self.captured: Final = captured
        self.traced = (0, 0.0)
        self._roots: Final[OrderedDict[Any, Stage]] = OrderedDict()
        self._kept: Final = Lock()
        self._lock: Final = RLock()  # held while a graph is traced; runs along known branches do not wait for it

    @property
    def stages(self) -> list[Stage]:
        """The first stage of each known combination of shapes, the least recently used one first."""
        return list(self._roots.values())

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run once: name -> array, or list of arrays for a sequence, in and out."""
        stage = self._root(feeds)
        values = dict(feeds)
        for label, value in feeds.items():
            if not isinstance(value, np.ndarray):
                values.update(named_arrays(value, label))
        done: list[tuple[dict[str, Array], Any]] = []
        while True:
            computed = stage.compute(values)
            values.update(computed)
            if stage.function is None:
                return {name: resolved(value, values) for name, value in stage.outputs.items()}
            found = arrays_in(stage.look(values))
            done.append((computed, found))
            values.update(named_arrays(found, stage.label))
            following = stage.branches.get(key_of(found, stage.by_value))
            stage = following or self._extend(feeds, stage, done)

    def knows(self, feeds: Mapping[str, Any]) -> bool:
        """Whether there is a first stage for feeds of these shapes."""
        return key_of_feeds(feeds) in self._roots

    def root(self, feeds: Mapping[str, Any]) -> Stage:
        """The first stage for feeds of these shapes; nothing is run."""
        return self._root(feeds)

    def close(self) -> None:
        """Close all programs."""
        with self._lock, self._kept:
            for stage in self._roots.values():
                stage.close()
            self._roots.clear()

    def _root(self, feeds: Mapping[str, Any]) -> Stage:
        key = key_of_feeds(feeds)
        known = self._used(key)
        if known is not None:
            return known
        with self._lock:
            known = self._used(key)
            if known is None:
                known = self._trace(feeds, [])
                with self._kept:
                    self._roots[key] = known
                    dropped = [
                        self._roots.popitem(last=False)[1] for _ in range(len(self._roots) - self.session.max_programs)
                    ]
                for stage in dropped:
                    stage.close()
            return known

    def _used(self, key: Any) -> Stage | None:
        """The known first stage for a key, marked as the most recently used one; else ``None``."""
        with self._kept:
            known = self._roots.get(key)
            if known is not None:
                self._roots.move_to_end(key)
            return known

    def _extend(self, feeds: Mapping[str, Any], stage: Stage, done: list[tuple[dict[str, Array], Any]]) -> Stage:
        """The stage that follows ``stage`` for the value that was found last; traced if it is not known."""
        with self._lock:
            key = key_of(done[-1][1], stage.by_value)
            if key not in stage.branches:
                stage.branches[key] = self._trace(feeds, done)
                while len(stage.branches) > BRANCHES_KEPT:
                    stage.branches.popitem(last=False)[1].close()
            return stage.branches[key]

    def _trace(self, feeds: Mapping[str, Any], done: Sequence[tuple[dict[str, Array], Any]]) -> Stage:
        from opweave_onnx.trace import Trace

        start = perf_counter()
        stage = Trace(self.session, self.graph, feeds, done).stage()
        self.traced = self.traced[0] + 1, self.traced[1] + perf_counter() - start
        return stage
