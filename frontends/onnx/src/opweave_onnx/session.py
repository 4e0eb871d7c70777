"""`Session`: what the runners of one model share: scheduler, weights, functions, operators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from threading import RLock
from typing import Any, Final

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_onnx.functions import Function, standard_function
from opweave_onnx.graphs import Graph, Node
from opweave_onnx.operators import OPERATORS, Operator
from opweave_onnx.stages import Runner
from opweave_onnx.tensors import Array, Arrays

__all__ = ["PlanningSession", "Session", "missing_operators"]

SMALL: Final = 1024
"""An initializer of up to so many bytes is no weight, but a constant whose value is known while a graph is traced."""


BODIES_KEPT: Final = 256
"""How many programs for parts of loops and recurrent networks a session keeps."""


class Session:
    """What the runners of one model share.

    Attributes:
        where: the file, for messages.
        max_programs: for how many combinations of shapes a runner keeps programs.
        functions: those that the model defines.
        runs: whether its programs can be run.
    """

    runs = True

    def __init__(
        self,
        where: str,
        scheduler: ow.Scheduler,
        weights: Mapping[str, Tensor],
        arrays: Mapping[str, Array],
        functions: Mapping[tuple[str, str], Function],
        tensors: Arrays,
        max_programs: int,
    ) -> None:
        self.where: Final = where
        self.scheduler: Final = scheduler
        self.max_programs: Final = max_programs
        self.functions: Final = functions
        self.tensors: Final = tensors
        self._weights: Final = weights
        self._arrays: Final = {tensor: arrays[name] for name, tensor in weights.items()}
        self._runners: Final[dict[Graph, Runner]] = {}
        self._bodies: Final[OrderedDict[Hashable, Any]] = OrderedDict()
        self._lock: Final = RLock()
        self._derived: Final[dict[tuple[Tensor, Hashable], Tensor]] = {}

    def build(self, outputs: Mapping[str, Tensor]) -> ow.Program[dict[str, Array]] | None:
        """The program for outputs; ``None`` if there are none."""
        return self.scheduler.build(outputs) if outputs else None

    def runner(self, graph: Graph) -> Runner:
        """The runner of a graph that has programs of its own, such as the body of a loop."""
        if graph not in self._runners:
            self._runners[graph] = Runner(self, graph, graph.captured)
        return self._runners[graph]

    def body(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """A program that is run several times within a run. Of more than `BODIES_KEPT` the least recently used one is
        dropped.

        Args:
            key: identifies the program.
            build: builds it, if it is not kept.
        """
        with self._lock:
            if key not in self._bodies:
                self._bodies[key] = build()
                if len(self._bodies) > BODIES_KEPT:
                    self._bodies.popitem(last=False)  # not closed: another thread may run it
            self._bodies.move_to_end(key)
            return self._bodies[key]

    def weight(self, graph: Graph, name: str, array: Array) -> Any:
        """The value of an initializer while a graph is traced: the tensor of a weight, else the array."""
        tensor = self._weights.get(name)
        return tensor if tensor is not None and self._arrays[tensor] is array else array

    def array(self, tensor: Tensor) -> Array | None:
        """The value of a constant or weight, ``None`` for others."""
        known = self._arrays.get(tensor)
        if known is None and tensor.leaf is not None and tensor.leaf.kind == "constant":
            return tensor.leaf.data
        return known

    def derived(self, x: Tensor, key: Hashable, compute: Callable[[], Array]) -> Tensor:
        """A tensor that is computed on the host from a known one: from a weight once for all programs, as a weight;
        else as a constant.

        Args:
            x: the known tensor.
            key: distinguishes the result from others that are computed from ``x``.
            compute: computes the values.
        """
        if x not in self._arrays:
            return ow.constant(compute())
        with self._lock:
            if (x, key) not in self._derived:
                name = f"{x.name} derived"
                self._derived[x, key] = ow.weights({name: compute()})[name]
            return self._derived[x, key]

    def operator(self, node: Node) -> Operator:
        """The builder of a node: by a function of the model, by one of `OPERATORS`, or by the body that the standard
        defines. The last one raises `UnsupportedOpError` when it is called and there is none."""
        own = self.functions.get((node.domain, node.op))
        if own is not None:
            return own.operator(node, self.tensors)
        operator = OPERATORS.get((node.domain, node.op))
        if operator is not None:
            return operator
        return Operator(lambda call, *inputs: standard_function(call, inputs), raw=True)

    def close(self) -> None:
        """Close the programs of bodies of loops and recurrent networks."""
        with self._lock:
            for program in self._bodies.values():
                program.close()
            self._bodies.clear()
        for runner in self._runners.values():
            runner.close()


class PlanningSession(Session):
    """A session that assigns and partitions graphs, but builds no programs and takes no memory."""

    runs = False

    def build(self, outputs: Mapping[str, Tensor]) -> Any:
        """The planned graph of outputs; ``None`` if there are none."""
        return self.scheduler.partition(outputs) if outputs else None


def weights_of(initializers: Mapping[str, Array]) -> dict[str, Array]:
    """The initializers that become weights: those of more than `SMALL` bytes that are no scalars or vectors of signed
    integers."""
    return {
        name: a for name, a in initializers.items() if a.nbytes > SMALL and not (a.ndim < 2 and a.dtype.kind == "i")
    }


def missing_operators(graph: Graph, functions: Collection[tuple[str, str]]) -> dict[tuple[str, str], list[Node]]:
    """The nodes of a graph, and of graphs in its attributes, whose operators are not known, by domain and operator."""
    from opweave_onnx.functions import has_function

    found: dict[tuple[str, str], list[Node]] = {}
    for node in graph.nodes:
        key = node.domain, node.op
        if key not in functions and key not in OPERATORS and not has_function(node):
            found.setdefault(key, []).append(node)
        for value in node.attributes.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Graph):
                    for kind, nodes in missing_operators(inner, functions).items():
                        found.setdefault(kind, []).extend(nodes)
    return found
