"""`compare`: runs a graph on two devices, compares every node, and writes a script for the first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave import registry
from opweave.errors import Cancelled, OpweaveError, SchedulerError, UnsupportedOpError
from opweave.graph.graph import Graph, rebuilt
from opweave.graph.precision import PRECISIONS, Precision
from opweave.graph.tensor import Tensor, input
from opweave.leaf_memory import read_leaf, write_state
from opweave.leaves import Blocks, state, weights
from opweave.runtime.device import Device
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave.scheduler.place.capabilities import Capabilities
from opweave.scheduler.place.precision import Allowed, checked_precision, precisions_of
from opweave.tools.distance import distance
from opweave.tools.writable import check_writable
from opweave_conformance.reproduction import write_script

if TYPE_CHECKING:
    from opweave.scheduler import Program

__all__ = ["Comparison", "NodeError", "compare"]

Array = np.ndarray[Any, Any]

ALLOWED: Final = {"f64": 1e-20, "f32": 1e-9, "f16": 1e-5, "bf16": 1e-3, "int8": 1e-2}
"""Normalised mean square errors up to which results count as equal, by dtype or by the precision that they are computed
in, whichever is larger; integers must be equal."""


class NodeError(NamedTuple):
    """The error of the second device at one node, computed from the first device's values of the sources.

    Attributes:
        node: the node.
        nmse: mean square error over the mean square of the first device's values; infinite where NaN, infinities or
            integers differ.
        largest: largest error of an element, relative to the element plus the root mean square of all.
        reason: why the second device did not compute the node (no kernel, an error), or ``""``.
        diverges: whether the error is larger than allowed.
        precision: in which the second device computed the node; of an output the roughest one of the graph.
    """

    node: Tensor
    nmse: float
    largest: float
    reason: str
    diverges: bool
    precision: Precision = "exact"


class Comparison:
    """The result of `compare`; true if the devices agree at every node.

    Attributes:
        first, second: names of the devices.
        nodes: one row for each node that was compared, in order.
        outputs: for each output the error of the second device when it computes the whole graph, so that errors add up;
            none if the comparison ended early.
        ended: whether it ended early, before all nodes were compared.
        script: the file that repeats the first difference, or ``""``.
    """

    def __init__(self, first: str, second: str) -> None:
        self.first, self.second = first, second
        self.nodes: list[NodeError] = []
        self.outputs: list[NodeError] = []
        self.script: str = ""
        self.ended = False

    @property
    def first_divergence(self) -> NodeError | None:
        """The first node at which the devices differ though their sources are the same."""
        return next((row for row in self.nodes if row.diverges), None)

    def __bool__(self) -> bool:
        """Whether they agree at every node."""
        return self.first_divergence is None

    def __str__(self) -> str:
        """A table: the first difference, the worst nodes, the outputs."""
        found = self.first_divergence
        run = sum(not row.reason for row in self.nodes)
        lines = [f"{self.second} against {self.first}: {run} of {len(self.nodes)} nodes computed on both"]
        if found is None:
            lines.append("no difference beyond rounding")
        else:
            lines.append(f"first difference: {found.node.describe()}")
            lines.append(f"    {_figures(found)}")
        for precision in list(PRECISIONS)[1:]:
            rough = [row.nmse for row in self.nodes if row.precision == precision]
            if rough:
                lines.append(f"computed in {precision}: {len(rough)} nodes, each with a normalised mean square error "
                             f"of {min(rough):.2e} to {max(rough):.2e}")  # fmt: skip
        if self.script:
            lines.append(f"    to repeat it: python {self.script}")
        worst = sorted((row for row in self.nodes if not row.reason), key=lambda row: -row.nmse)[:10]
        if worst:
            width = max(len(row.node.name) for row in worst)
            lines.append("worst nodes, each computed from the same sources:")
            lines += [f"    {row.node.name:<{width}}  {_figures(row)}" for row in worst]
        if self.ended:
            lines.append("ended early")
        else:
            lines.append(f"outputs, all nodes computed on {self.second}:")
        lines += [f"    {row.node.name}  {_figures(row)}" for row in self.outputs]
        refused = [row for row in self.nodes if row.reason]
        if refused:
            lines.append(f"not computed on {self.second}:")
            lines += [f"    {row.node.name}: {row.reason}" for row in refused[:20]]
        return "\n".join(lines)

    def __repr__(self) -> str:
        found = self.first_divergence
        state_ = "agree" if found is None else f"differ at {found.node.name}"
        return f"<Comparison of {self.first} and {self.second}: they {state_}>"


def _figures(row: NodeError) -> str:
    how = "" if row.precision == "exact" else f" ({row.precision})"
    return row.reason or f"normalised mean square error {row.nmse:.2e}, largest error {row.largest:.2e}{how}"


def compare(
    target: Tensor | Sequence[Tensor],
    feeds: Mapping[Any, Any] | None = None,
    *,
    first: Device | str = "host",
    second: Device | str,
    precision: Precision | Mapping[str, Precision] = "exact",
    allowed: Mapping[str, float] | float | None = None,
    nodes: Iterable[Tensor] | Callable[[Tensor], bool] | None = None,
    callback: Callable[[Tensor, Array, Array | None], object] | None = None,
    stop_at_first: bool = False,
    script: str | PathLike[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Run a graph on two devices and compare every node.

    Each node is computed on the second device from the *first* device's values of its sources, in the same layouts, so
    that an error shows at the node that makes it and not further on. States keep their values.

    Args:
        target: the outputs.
        feeds: input tensor or name -> array.
        first: the device that is taken to be correct; nodes that it does not support are computed by ``host``.
        second: the device to test.
        precision: how roughly the second device may compute products, as of `opweave.Scheduler`, to see the error.
        allowed: dtype or precision -> normalised mean square error up to which results count as equal, or one for all.
        nodes: which ones to compare, or a function that is asked for each; ``None``: all.
        callback: called with each node that was compared and its value on the first and on the second device (``None``
            where that did not compute it); ``False`` ends the comparison there.
        stop_at_first: end at the first node at which the devices differ.
        script: where to write a script that repeats the first difference, with its data beside it (``.npz``).
        progress: called with the number of nodes compared so far, and of all.

    Raises:
        SchedulerError, ShapeError, DTypeError, UnknownNameError: no such device, inputs that are missing or do not fit,
            nodes that the graph does not compute.
        PathError: ``script`` cannot be written; raised before anything runs.
    """
    outputs = (target,) if isinstance(target, Tensor) else tuple(target)
    one, other = _device(first), _device(second)
    rounding = checked_precision(precision)
    if script is not None:
        check_writable(script)
    bounds = _bounds(allowed)
    result = Comparison(one.name, other.name)
    graph = Graph(outputs)
    leaves, precisions = graph.leaves, precisions_of(graph.nodes, rounding)
    states = {t: read_leaf(t) for t in leaves if t.leaf is not None and t.leaf.kind == "state"}
    with _scheduler(one) as believed, Scheduler(other) as questioned:
        program = believed.build(outputs, pins=_pins(believed, graph))
        computed = [item.node for split in program.splits for item in split.steps if item.node is not None]
        wanted = _wanted(computed, nodes)
        shown = {node for node in computed if node in wanted} | {s.root for node in wanted for s in node.srcs}
        last = {source.root: node for node in computed for source in node.srcs}
        known = {**states, **_inputs(program, feeds)}

        def compare_node(node: Tensor, value: Array) -> bool:
            if node in wanted:
                row, got = _judge(node, value, known, questioned, precisions.get(node, "exact"), bounds)
                result.nodes.append(row)
                if row.diverges and not row.reason and script is not None and not result.script:
                    result.script = write_script(script, *isolated(node, known), (one.name, other.name))
                ended = callback is not None and callback(node, value, got) is False
                result.ended = ended or (stop_at_first and row.diverges)
                if progress is not None:
                    progress(len(result.nodes), len(wanted))
            known[node] = value
            for source in node.srcs:
                if last.get(source.root) is node and source.root.op is not None:
                    known.pop(source.root, None)
            return not result.ended

        try:
            with program.observe(compare_node, [node for node in computed if node in shown]):
                results = program.run(feeds)
        except Cancelled:
            if not result.ended:
                raise
    _restore(states)
    if not result.ended:
        result.outputs += _whole(graph, results, feeds, other, rounding, bounds)
        _restore(states)
    return result


def _inputs(program: Program, feeds: Mapping[Any, Any] | None) -> dict[Tensor, Array]:
    """The inputs of a program that are fed, with their values."""
    fed = {(key.name if isinstance(key, Tensor) else key): value for key, value in (feeds or {}).items()}
    return {
        tensor: np.asarray(fed[name]).astype(tensor.dtype.numpy, copy=False)
        for name, tensor in program.inputs.items()
        if name in fed
    }


def _wanted(computed: Sequence[Tensor], nodes: Iterable[Tensor] | Callable[[Tensor], bool] | None) -> set[Tensor]:
    """The nodes to compare, of those that the program computes."""
    if nodes is None:
        return set(computed)
    if callable(nodes):
        return {node for node in computed if nodes(node)}
    wanted = {node.root for node in nodes}
    for node in wanted - set(computed):
        raise SchedulerError(f"{node.describe()} is not computed by this graph")
    return wanted


def _bounds(allowed: Mapping[str, float] | float | None) -> Mapping[str, float]:
    """dtype or precision -> the error up to which results count as equal."""
    if isinstance(allowed, Mapping):
        return {**ALLOWED, **allowed}
    return dict.fromkeys(ALLOWED, float(allowed)) if isinstance(allowed, (int, float)) else ALLOWED


def _device(where: Device | str) -> Device:
    return where if isinstance(where, Device) else registry.device(where)


def _scheduler(device: Device) -> Scheduler:
    return Scheduler(device if isinstance(device, HostDevice) else [device, registry.device("host")])


def _pins(scheduler: Scheduler, graph: Graph, allowed: Allowed = ()) -> dict[Tensor, Device]:
    """Pins every node that the first device supports to it."""
    target = scheduler.targets[0]
    nodes = [node for node in graph.nodes if not node.is_view]
    able = Capabilities([target], graph.leaves, nodes, precisions_of(nodes, allowed))
    return {node: target.device for node in nodes if able.supports(target, node)}


def _restore(states: Mapping[Tensor, Array]) -> None:
    for tensor, values in states.items():
        write_state(tensor, values)


def _row(node: Tensor, got: Array, want: Array, program: Program, bounds: Mapping[str, float]) -> NodeError:
    """How far a program's result is from the one that is wanted."""
    used = {item.support.precision for split in program.splits for item in split.steps}
    precision: Precision = max(used, key=PRECISIONS.__getitem__, default="exact")
    nmse, largest, *_ = distance(got, want)
    bound = bounds[node.dtype.name] if node.dtype.is_float else 0.0
    if bound and precision != "exact":
        bound = max(bound, bounds[precision])
    return NodeError(node, nmse, largest, "", nmse > bound, precision)


def _judge(
    node: Tensor,
    value: Array,
    known: Mapping[Tensor, Array],
    scheduler: Scheduler,
    precision: Precision,
    bounds: Mapping[str, float],
) -> tuple[NodeError, Array | None]:
    """How far the second device's value of a node is from the first one's, and that value."""
    try:
        alone, given = isolated(node, known)
        program = scheduler.build((alone,), precision=precision)
        try:
            (got,) = program.run(given)
        finally:
            program.close()
    except UnsupportedOpError as error:
        reason = next(iter(error.reasons.values()), str(error))
        return NodeError(node, float("nan"), float("nan"), reason, False), None
    except OpweaveError as error:
        return NodeError(node, float("inf"), float("inf"), f"{type(error).__name__}: {error}", True), None
    return _row(node, got, value, program, bounds), got


def _whole(
    graph: Graph,
    wanted: Sequence[Array],
    feeds: Mapping[Any, Any] | None,
    device: Device,
    rounding: Allowed,
    bounds: Mapping[str, float],
) -> list[NodeError]:
    try:
        with _scheduler(device) as scheduler:
            pins = _pins(scheduler, graph, rounding)
            program: Program = scheduler.build(graph.outputs, pins=pins, precision=dict(rounding))
            got = program.run(feeds)
    except OpweaveError as error:
        reason = f"{type(error).__name__}: {error}"
        return [NodeError(output, float("inf"), float("inf"), reason, True) for output in graph.outputs]
    compared = zip(graph.outputs, got, wanted, strict=True)
    return [_row(output, here, there, program, bounds) for output, here, there in compared]


def isolated(node: Tensor, known: Mapping[Tensor, Array]) -> tuple[Tensor, dict[str, Array]]:
    """``node`` rebuilt on new leaves with the values and layouts of its sources, and the arrays to feed these with."""
    stand_ins: dict[Tensor, Tensor] = {}
    given: dict[str, Array] = {}
    for source in node.srcs:
        root = source.root
        if root in stand_ins:
            continue
        name = f"source{len(stand_ins)}"
        if node.op is not None and node.op.writes and source is node.srcs[0]:
            stand_ins[root] = state(name, root.shape, root.dtype)
            write_state(stand_ins[root], _value(root, known))
        elif root.dtype.block > 1:
            stand_ins[root] = weights({name: Blocks(_value(root, known), root.shape, root.dtype)})[name]
        else:
            stand_ins[root] = input(name, root.shape, root.dtype)
            given[name] = _value(root, known)
    (alone,) = rebuilt((node,), stand_ins)
    return alone, given


def _value(root: Tensor, known: Mapping[Tensor, Array]) -> Array:
    found = known.get(root)
    if found is not None:
        return found
    if root.leaf is None or root.leaf.kind == "input":
        raise SchedulerError(f"{root.describe()} has no value")
    return read_leaf(root)
