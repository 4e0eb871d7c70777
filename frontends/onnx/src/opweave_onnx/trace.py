"""`Trace`: builds the nodes of opweave for the nodes of an ONNX graph, one after the other.

While a graph is traced, the value of a name is a NumPy array if it is known (constants, and values computed from them
and from shapes); a `Tensor`; a list of these, for a sequence; or ``None``, for an optional value that is missing.
Results that depend on known values only are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import opweave as ow
from opweave.errors import (
    BoundsError,
    DTypeError,
    FormatError,
    LayoutError,
    OpweaveError,
    SchedulerError,
    ShapeError,
    UnsupportedOpError,
)
from opweave.graph.tensor import Tensor
from opweave_onnx.folding import FOLDED, fold
from opweave_onnx.graphs import Graph, Node, Value
from opweave_onnx.stages import Name, Stage, arrays_in
from opweave_onnx.tensors import Array, numpy_of

if TYPE_CHECKING:
    from opweave_onnx.session import Session

__all__ = ["Call", "Trace"]

PLAIN_ERRORS: Final = (BoundsError, DTypeError, FormatError, LayoutError, SchedulerError, ShapeError)


class _Cut(Exception):
    """Raised where a trace needs a value that is not known yet; ``stage`` computes it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage


class _NeverComputed(Exception):
    """Raised where a graph that is never run needs a value that is computed."""


class Frame:
    """The values of one graph by name.

    Attributes:
        graph: the graph.
        values: name -> value.
        position: index of the node that is being built.
        around: the frame of the graph around it; ``None`` for the outermost, and for the body of a function.
    """

    def __init__(self, graph: Graph, values: dict[str, Any], around: Frame | None) -> None:
        self.graph, self.values, self.around, self.position = graph, values, around, -1

    def __getitem__(self, name: str) -> Any:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.values:
                return frame.values[name]
            frame = frame.around
        raise FormatError(f"graph {self.graph.name!r} reads {name!r}, which is not defined there")


class Call:
    """A node while it is built, passed to the builder besides the inputs.

    Attributes:
        node: the node.
        trace: the trace that builds it.
    """

    __slots__ = ("node", "trace")

    def __init__(self, node: Node, trace: Trace) -> None:
        self.node, self.trace = node, trace

    @property
    def version(self) -> int:
        """The version of the operator set."""
        return self.node.version

    def before(self, version: int) -> bool:
        """Whether the node is of the standard domain, in a version before this one."""
        return not self.node.domain and self.node.version < version

    def has(self, name: str) -> bool:
        """Whether an attribute is given."""
        return name in self.node.attributes

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or ``default`` if it is not given.

        Raises:
            FormatError: it is not of the type of ``default``.
        """
        value = self.node.attributes.get(name, default)
        if default is not None and type(value) is not type(default):
            raise FormatError(f"attribute {name!r} is {value!r:.40}, not of the type of {default!r:.40}")
        return value

    def wants(self, output: int) -> bool:
        """Whether the node has an output with this index."""
        return output < len(self.node.outputs) and bool(self.node.outputs[output])

    def known(self, value: Any) -> Array:
        """The array of a value. For a tensor whose value is not known the trace is cut: the host reads the value, and
        the trace continues for it."""
        return self.trace.known(value)

    def integers(self, value: Any) -> tuple[int, ...]:
        """A known array of integers, flat."""
        return tuple([int(v) for v in self.known(value).reshape(-1)])

    def found(self, function: Callable[..., Any], *sources: Any) -> Any:
        """The result of a function of arrays, an array or a list of arrays, whose shapes depend on the values of the
        arrays. If these are not known, the trace is cut: the host calls the function, and the trace continues for the
        shapes of its result."""
        return self.trace.found(function, sources)

    def tensor(self, value: Any) -> Tensor:
        """The value as a tensor."""
        return self.trace.tensor(value)

    def inline(self, graph: Graph, *inputs: Any) -> list[Any]:
        """The outputs of a graph in an attribute of this node, whose nodes are built in place of it."""
        return self.trace.inline(graph, inputs, self.trace.frame)

    def never(self, graph: Graph, first: int, *inputs: Any) -> list[Any]:
        """The outputs, from ``first`` on, of a graph in an attribute of this node that is not run, of which only shapes
        and dtypes matter: those that running it would give. Where these depend on computed values, they are those that
        the graph declares; a length that it does not declare is 0.

        Raises:
            FormatError: they depend on computed values, and the graph does not declare them.
        """
        return self.trace.never(graph, first, inputs)

    def refuse(self, why: str) -> UnsupportedOpError:
        """The error for what is not supported."""
        return UnsupportedOpError(why)


class Trace:
    """Traces a graph for feeds of certain shapes.

    Args:
        feeds: only their shapes and types matter.
        done: for each cut that was reached before, the results of its program, and the result of the host's function.
    """

    def __init__(
        self, session: Session, graph: Graph, feeds: Mapping[str, Any], done: Sequence[tuple[dict[str, Array], Any]]
    ) -> None:
        self.session: Final = session
        self.graph: Final = graph
        self._done: Final = done
        self._cuts = 0
        self._runs = True  # False within a graph of which only shapes and dtypes are wanted
        self._constants: Final[dict[int, tuple[Array, Tensor]]] = {}
        self._frames: Final[list[Frame]] = []
        self.frame = Frame(graph, {name: self._fed(name, value) for name, value in feeds.items()}, None)

    def stage(self) -> Stage:
        """The stage that follows the cuts in ``done``."""
        try:
            self._run(self.frame)
            results = {value.name: self.frame[value.name] for value in self.graph.outputs}
        except _Cut as cut:
            return cut.stage
        wanted: dict[str, Tensor] = {}
        outputs = {name: self._source(value, wanted, name) for name, value in results.items()}
        return Stage(self.session.build(wanted), outputs)

    def _fed(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return [self._fed(f"{name}.{i}", v) for i, v in enumerate(value)]
        return ow.input(name, value.shape, value.dtype)

    def _run(self, frame: Frame) -> None:
        around, self.frame = self.frame, frame
        self._frames.append(frame)
        for name, array in frame.graph.initializers.items():
            if name not in frame.values:
                frame.values[name] = self.session.weight(frame.graph, name, array)
        for frame.position, node in enumerate(frame.graph.nodes):  # noqa: B020
            self._build(node, frame)
        self._frames.pop()
        self.frame = around

    def _build(self, node: Node, frame: Frame) -> None:
        inputs = [frame[name] if name else None for name in node.inputs]
        try:
            with ow.scope(scoped(node.name)):
                results = self._built(node, inputs)
        except (_Cut, _NeverComputed):
            raise
        except UnsupportedOpError as error:
            raise UnsupportedOpError(f"{self.session.where}: {node.describe()}: {error}", error.reasons) from error
        except PLAIN_ERRORS as error:
            raise type(error)(f"{self.session.where}: {node.describe()}: {error}") from error
        except OpweaveError:
            raise
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError, OverflowError,
                ZeroDivisionError) as error:  # fmt: skip
            raise FormatError(
                f"{self.session.where}: {node.describe()} is not valid: {type(error).__name__}: {error}"
            ) from error
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                frame.values[name] = value

    def _built(self, node: Node, inputs: list[Any]) -> Sequence[Any]:
        while inputs and inputs[-1] is None:
            inputs.pop()
        operator = self.session.operator(node)
        if operator.raw:
            return results_of(operator.build(Call(node, self), *inputs))
        known = all(value is None or self._is_known(value) for value in inputs)
        tensors = [None if value is None else self.tensor(value) for value in inputs]
        results = results_of(operator.build(Call(node, self), *tensors))
        if not known:
            return results
        # Results computed from weights replace them, unless they are larger; a large view of a weight stays a view.
        small = max(FOLDED, sum([t.nbytes for t in tensors if t is not None]))
        made = [r for r in results if isinstance(r, Tensor)]
        if sum([r.nbytes for r in made]) > small or any(r.is_view and r.nbytes > FOLDED for r in made):
            return results
        return [fold(r, self.session.array) if isinstance(r, Tensor) else r for r in results]

    def _is_known(self, value: Any) -> bool:
        return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and self.session.array(value) is not None)

    def inline(self, graph: Graph, inputs: Sequence[Any], around: Frame | None) -> list[Any]:
        """The outputs of a graph whose nodes are built here."""
        if len(inputs) > len(graph.inputs):
            raise FormatError(f"graph {graph.name!r} has {len(graph.inputs)} inputs, and is given {len(inputs)}")
        given = {v.name: value for v, value in zip(graph.inputs, inputs, strict=False)}
        given |= {v.name: None for v in graph.inputs[len(inputs) :] if v.name not in graph.initializers}
        frame = Frame(graph, given, around)
        self._run(frame)
        # Results of a function that are not used need not be computed.
        return [frame.values.get(v.name) if around is None else frame[v.name] for v in graph.outputs]

    def never(self, graph: Graph, first: int, inputs: Sequence[Any]) -> list[Any]:
        """See `Call.never`."""
        frames, frame, runs = list(self._frames), self.frame, self._runs
        self._runs = False
        try:
            return self.inline(graph, inputs, frame)[first:] if first < len(graph.outputs) else []
        except (_NeverComputed, OpweaveError) as error:
            return [_declared(graph, value, error) for value in graph.outputs[first:]]
        finally:
            self._frames[:], self.frame, self._runs = frames, frame, runs

    # --- values -----------------------------------------------------------------------------------------------------

    def tensor(self, value: Any) -> Tensor:
        """A value as a tensor. Raises `DTypeError` for a sequence, and for a value that is missing."""
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, np.ndarray):
            raise DTypeError(f"a tensor is needed here, not {'nothing' if value is None else 'a sequence'}")
        known = self._constants.get(id(value))
        if known is None:
            known = self._constants[id(value)] = value, ow.constant(value)
        return known[1]

    def known(self, value: Any) -> Array:
        """See `Call.known`."""
        if isinstance(value, np.ndarray):
            return value
        if not isinstance(value, Tensor):
            raise DTypeError("the value of a tensor is needed here")
        array = self.session.array(value)
        if array is not None:
            return array
        found: Array = self._cut(lambda array: array, (value,), by_value=True)
        self._replace({value: found})
        return found

    def found(self, function: Callable[..., Any], sources: Sequence[Any]) -> Any:
        """See `Call.found`."""
        if all(source is None or isinstance(source, np.ndarray) for source in sources):
            return arrays_in(function(*sources))
        return self._cut(function, sources, by_value=False)

    # --- cuts -------------------------------------------------------------------------------------------------------

    def _cut(self, function: Callable[..., Any], sources: Sequence[Any], by_value: bool) -> Any:
        if not self._runs:
            raise _NeverComputed
        number = self._cuts
        self._cuts += 1
        label = f"cut{number}"
        wanted: dict[str, Tensor] = {}
        inputs = [self._source(source, wanted, f"{label}.source{i}") for i, source in enumerate(sources)]
        if wanted:
            for frame in self._frames:
                needed = frame.graph.needed_after(frame.position - 1)
                for name, value in frame.values.items():
                    if name in needed:
                        self._source(value, wanted, f"{label}.{len(wanted)}")
        if number >= len(self._done):
            program = self.session.build(wanted)
            raise _Cut(Stage(program, {}, function, inputs, by_value, label))
        _, found = self._done[number]
        self._replace({tensor: ow.input(name, tensor.shape, tensor.dtype) for name, tensor in wanted.items()})
        return found if by_value else self._fed(label, found)

    def _source(self, value: Any, wanted: dict[str, Tensor], name: str) -> Any:
        """A value as `Stage` refers to it: an array, a `Name`, or a list of these. Tensors that have to be computed are
        added to ``wanted``."""
        if isinstance(value, list):
            return [self._source(v, wanted, f"{name}.{i}") for i, v in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        if value.leaf is not None and value.leaf.kind == "input":
            return Name(value.leaf.name)
        array = self.session.array(value)
        if array is not None:
            return array
        for known, tensor in wanted.items():
            if tensor is value:
                return Name(known)
        wanted[name] = value
        return Name(name)

    def _replace(self, by: Mapping[Tensor, Any]) -> None:
        def replaced(value: Any) -> Any:
            if isinstance(value, list):
                return [replaced(v) for v in value]
            return by.get(value, value) if isinstance(value, Tensor) else value

        for frame in self._frames:
            for name, value in frame.values.items():
                frame.values[name] = replaced(value)


def _declared(graph: Graph, value: Value, error: Exception) -> Array:
    if not value.elem or value.shape is None:
        raise FormatError(
            f"graph {graph.name!r} is not run, and does not declare the type and the shape of its output "
            f"{value.name!r}, which depend on computed values"
        ) from error
    shape = [n if isinstance(n, int) else 0 for n in value.shape]
    return np.broadcast_to(np.zeros((), numpy_of(value.elem, f"output {value.name!r}")), shape)


def results_of(results: Any) -> Sequence[Any]:
    """The results of a builder as a sequence: a tuple as it is; anything else, also a list, is one result."""
    return results if isinstance(results, tuple) else (results,)


def scoped(name: str) -> str:
    """The name of a node as `opweave.scope` takes it: without empty parts."""
    return "/".join([part for part in name.split("/") if part]) or "node"
