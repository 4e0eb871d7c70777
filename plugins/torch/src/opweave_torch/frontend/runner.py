"""`Runner`: runs a graph of ATen for arguments of any shapes, by one program of a scheduler for each combination."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch

import opweave as ow
from opweave.errors import HazardError
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import write_state
from opweave.leaf_updates import has_copies
from opweave.ops.movement import after
from opweave.units import human_bytes
from opweave.warning import OpweaveWarning
from opweave_torch.frontend.contents import COMPARED, Contents
from opweave_torch.frontend.folding import fold, fold_batch_norms
from opweave_torch.frontend.source import Source
from opweave_torch.frontend.trace import Trace
from opweave_torch.frontend.updates import Updates
from opweave_torch.frontend.values import Complex, array_of, as_real, dtype_of, shape_and_dtype, tensor_of

__all__ = ["Runner"]

SMALL: Final = 1024
"""Bytes of a computed constant up to which it takes part in the arithmetic of each trace, and is no weight."""


class _Fed(int):
    """Stands for the argument at this position in what is returned."""


class _Computed(str):
    """Stands for the output of the program of this name in what is returned."""


class _Joined(_Computed):
    """The same, of complex numbers, whose parts the output has along its last axis."""


@dataclass(eq=False)
class Traced:
    """The graph for one combination of shapes.

    Attributes:
        wanted: name -> what a program computes.
        inputs: name of an input -> the position of the argument.
        results: what is returned.
        written: position of an argument -> what is written to it.
    """

    wanted: dict[str, Tensor]
    inputs: Mapping[str, int]
    results: Sequence[Any]
    written: Mapping[int, Any]
    program: Any = None


class Runner:
    """Runs one graph.

    Attributes:
        source: the graph.
        scheduler: builds the programs.
        weights: parameters, buffers that do not change, and what was made of them, by name.
        states: buffers that the graph changes, by name.
        traced: how often the graph was traced, and the seconds it took, building programs included.

    Args:
        compared: bytes of parameters of which there are copies up to which each call compares all of them.
    """

    weights: ow.Weights

    def __init__(
        self, source: Source, scheduler: ow.Scheduler, weights: Any = None, max_programs: int = 64,
        compared: int = COMPARED,
    ) -> None:  # fmt: skip
        self.source: Final = source
        self.scheduler: Final = scheduler
        self.max_programs: Final = max_programs
        self.traced = (0, 0.0)
        self._lock: Final = RLock()
        self._programs: Final[OrderedDict[Any, Traced]] = OrderedDict()
        self.states: Final[dict[str, Tensor]] = {}
        self._pending: Final[dict[str, np.ndarray[Any, Any]]] = {}
        self._placed: Final = weights
        self._compared: Final = compared
        self._remarked = False
        self._read()

    def _read(self) -> None:
        """Read parameters, constants and buffers: make weights of them, and fold what depends on them alone."""
        source = self.source
        norms, folded = fold_batch_norms(source), fold(source)
        unread = {*folded, *norms, *[made.conv for made in norms.values()]}
        named: dict[str, tuple[torch.fx.Node, torch.Tensor]] = {}
        self._leaves: dict[torch.fx.Node, Any] = {}
        self._used: set[Tensor] = set()  # weights whose values graphs depend on
        operands = [arg for norm, made in norms.items() for arg in (*made.conv.args[1:3], *norm.args[1:5])]
        parameters = [n for n in _above([*folded, *operands]) if n.op == "placeholder" and n.name in source.leaves]
        # What results were computed of beforehand.
        self._folded = [source.leaves[node.name][1].detach() for node in parameters]
        for node in source.graph.nodes:
            if node.op == "placeholder" and node.name in source.states:
                self._leaves[node] = self._state_of(*source.leaves[node.name])
            elif node.op == "placeholder" and node.name in source.leaves:
                if any(user not in unread for user in node.users):
                    name, value = source.leaves[node.name]
                    named[name] = node, value
            elif node.op == "get_attr":
                value = source.attribute(node)
                if isinstance(value, torch.Tensor):
                    named[str(node.target)] = node, value
            elif node in folded:
                self._take_folded(node, folded[node], named)
        for made in norms.values():
            for part in ("weight", "bias"):
                named[f"{made.conv.name}.{part}"] = made.conv, getattr(made, part)
        arrays = {name: array_of(as_real(value)) for name, (_, value) in named.items()}
        self.weights = ow.weights(arrays, self._placed)
        self._known = {self.weights[name]: value.detach() for name, (_, value) in named.items()}
        self._norms = {norm: made.conv for norm, made in norms.items()}
        self._args = {
            c: (c.args[0], self.weights[f"{c.name}.weight"], self.weights[f"{c.name}.bias"], *c.args[3:])
            for c in self._norms.values()
        }
        for name, (node, value) in named.items():
            if node not in self._args:
                weight = self.weights[name]
                self._leaves[node] = Complex.of(weight) if value.is_complex() else weight
        made_here = set(self._norms.values()) | folded.keys()
        self._given = [self.weights[name] for name, (node, _) in named.items() if node not in made_here]
        self._contents: Contents | None = None

    def _state_of(self, name: str, value: torch.Tensor) -> Tensor:
        if name not in self.states:
            self.states[name] = ow.state(name, tuple(value.shape), dtype_of(value.dtype, f"buffer {name!r}"))
            self._pending[name] = array_of(value).copy()
        return self.states[name]

    def _take_folded(
        self, node: torch.fx.Node, value: Any, named: dict[str, tuple[torch.fx.Node, torch.Tensor]]
    ) -> None:
        """Take what was computed beforehand, large tensors as weights."""
        if isinstance(value, torch.Tensor) and value.nbytes > SMALL and _is_spread(value):
            named[node.name] = node, value
        else:
            self._leaves[node] = value

    def refresh(self) -> None:
        """Read parameters and buffers that do not change again; programs are built anew."""
        with self._lock:
            self.close()
            self._read()

    def _look(self) -> None:
        """Read the parameters again if they were written since copies were made of them."""
        with self._lock:
            if self._contents is not None and self._contents.changed():
                self.refresh()

    def _note_contents(self) -> None:
        """Note what parameters contain of which there are copies: on devices, in the forms that kernels keep, in what
        was folded."""
        copied = [self._known[leaf] for leaf in self._given if leaf in self._used or has_copies(leaf)]
        self._contents = Contents([*copied, *self._folded], self._compared)
        if not self._contents.exact and not self._remarked:
            self._remarked = True
            size = sum([t.nbytes for t in (*copied, *self._folded)])
            warnings.warn(
                f"devices keep copies of {human_bytes(size)} of parameters of {self.source.where}, of which each call "
                "compares samples: what is written to few of their elements through Tensor.data or arrays of NumPy is "
                "not seen; call opweave_torch.refresh() after that, or raise the limit: options={'compared': BYTES} of "
                "torch.compile, compared=BYTES of import_program",
                OpweaveWarning,
                stacklevel=2,
            )

    def run(self, values: Sequence[Any], on_device: bool = False) -> list[Any]:
        """Run once, with tensors, arrays or numbers for the placeholders; returns tensors, or what else is returned."""
        self._look()
        traced = self.built(values)
        found: Mapping[str, Any] = {}
        if traced.program is not None:
            feeds = {name: _feed(values[position]) for name, position in traced.inputs.items()}
            found = traced.program.run(feeds, on_device=on_device)
        returned: dict[str, Any] = {}

        def result(value: Any) -> Any:
            if type(value) is _Computed:
                if value not in returned:
                    made = found[value]
                    returned[value] = tensor_of(made) if isinstance(made, np.ndarray) else torch.from_dlpack(made)
                return returned[value]
            if type(value) is _Joined:
                return torch.view_as_complex(result(_Computed(value)))
            if type(value) is _Fed:
                given = values[value]
                return given if isinstance(given, torch.Tensor) else tensor_of(given)
            return value

        results = [result(value) for value in traced.results]
        for position, value in traced.written.items():
            target = values[position]
            new = result(value)
            if isinstance(target, torch.Tensor):
                with torch.no_grad():
                    target.copy_(new)
            else:
                np.copyto(target, array_of(new))
        return results

    def built(self, values: Sequence[Any]) -> Traced:
        """What runs for arguments of these shapes, with a program."""
        key = tuple([(v.shape, v.dtype) if hasattr(v, "shape") else v for v in values])
        with self._lock:
            traced = self._programs.get(key)
            if traced is None or (traced.program is not None and not traced.program.is_current):
                start = perf_counter()
                traced = self._programs[key] = self._build(values, self.scheduler.build)
                self._write_states()
                self._note_contents()
                self.traced = self.traced[0] + 1, self.traced[1] + perf_counter() - start
                while len(self._programs) > self.max_programs:
                    _close(self._programs.popitem(last=False)[1])
            self._programs.move_to_end(key)
            return traced

    def planned(self, values: Sequence[Any]) -> Any:
        """The planned graph for arguments of these shapes, without memory; ``None`` if there is nothing to compute."""
        return self._build(values, self.scheduler.partition).program

    def read(self, name: str) -> torch.Tensor:
        """The present values of a state."""
        if name in self._pending:
            return tensor_of(self._pending[name].copy())
        return tensor_of(ow.read(self.states[name]))

    def write(self, name: str, values: Any) -> None:
        """Set a state."""
        self._pending[name] = array_of(values) if isinstance(values, torch.Tensor) else np.asarray(values)
        self._write_states()

    def close(self) -> None:
        """Close all programs."""
        with self._lock:
            for traced in self._programs.values():
                _close(traced)
            self._programs.clear()

    def _write_states(self) -> None:
        """Write the values that wait until a program has placed a state."""
        for name in list(self._pending):
            if self.states[name].placement is not None:
                write_state(self.states[name], self._pending.pop(name))

    def _build(self, values: Sequence[Any], build: Callable[[Any], Any]) -> Traced:
        try:
            traced = self._trace(values, in_place=True)
            traced.program = build(traced.wanted) if traced.wanted else None
        except HazardError:
            # The old values of a state are still needed when the new ones are there.
            traced = self._trace(values, in_place=False)
            traced.program = build(traced.wanted) if traced.wanted else None
        return traced

    def _trace(self, values: Sequence[Any], in_place: bool) -> Traced:
        fed: list[Any] = []
        names: dict[str, int] = {}
        for i, (node, value) in enumerate(zip(self.source.fed, values, strict=True)):
            if not hasattr(value, "shape"):
                fed.append(value)
                continue
            # The caller waits for the run, so that fed arrays need not be copied.
            fed.append(_input(node.name, value))
            names[node.name] = i
        states = {node: value for node, value in self._leaves.items() if isinstance(value, Tensor) and _is_state(value)}
        trace = Trace(
            self.source, self._leaves, self._known, self._norms, self._args, fed, Updates(self.source, states, in_place)
        )
        self._used |= trace.used
        sources = _Results(names, self._known)
        results = [sources.of(_unwritten(trace.of(output))) for output in self.source.outputs]
        written = {position: sources.of(trace.of(node)) for position, node in self.source.written.items()}
        wanted = sources.wanted
        updates = []
        for node_name, last in self.source.states.items():
            state, value = self.states[self.source.leaves[node_name][0]], trace.of(last)
            if value is state:
                continue
            value = trace.tensor(value)
            updates.append(value if value.root is not state and _writes(value, state) else ow.assign(state, value))
        if updates:
            name = next(iter(wanted), "updates")
            wanted[name] = after(wanted.get(name, ow.constant(0.0, "f32")), updates)
        inputs = _inputs_of(wanted, names)
        return Traced(wanted, inputs, results, written)


class _Results:
    """Where the results of a graph come from.

    Attributes:
        wanted: the tensors that a program computes, by name.

    Args:
        fed: name of an input -> its position among the arguments.
        known: weights whose values torch has.
    """

    def __init__(self, fed: Mapping[str, int], known: Mapping[Tensor, torch.Tensor]) -> None:
        self.wanted: Final[dict[str, Tensor]] = {}
        self._fed, self._known = fed, known

    def of(self, value: Any) -> Any:
        """What stands for a value, and for each in lists and tuples, in `Traced`."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.of(v) for v in value])
        if isinstance(value, Complex):
            return _Joined(self.of(value.pairs))
        if not isinstance(value, Tensor):
            return value
        if value.leaf is not None and value.leaf.kind == "input":
            return _Fed(self._fed[value.leaf.name])
        if value in self._known:
            return self._known[value]
        for name, tensor in self.wanted.items():
            if tensor is value:
                return _Computed(name)
        name = f"result{len(self.wanted)}"
        self.wanted[name] = value
        return _Computed(name)


def _above(nodes: Iterable[Any]) -> list[torch.fx.Node]:
    """Nodes, and all that they are computed from; other values are left out."""
    found: dict[torch.fx.Node, None] = {}
    left = [node for node in nodes if isinstance(node, torch.fx.Node)]
    while left:
        node = left.pop()
        if node not in found:
            found[node] = None
            left += node.all_input_nodes
    return list(found)


def _is_spread(value: torch.Tensor) -> bool:
    """Whether the elements are more than one that is repeated."""
    return any(value.stride())


def _is_state(value: Tensor) -> bool:
    return value.leaf is not None and value.leaf.kind == "state"


def _unwritten(value: Any) -> Any:
    """States are returned as copies: what is returned does not change with the next run."""
    return ow.copy(value) if isinstance(value, Tensor) and _is_state(value.root) else value


def _writes(value: Tensor, state: Tensor) -> bool:
    """Whether a value is a version of the state: the result of a node that writes it."""
    return value.op is not None and value.op.name in ("assign", "index_copy") and value.shape == state.shape


def _inputs_of(wanted: Mapping[str, Tensor], names: Mapping[str, int]) -> dict[str, int]:
    """The inputs that outputs need, with their positions."""
    from opweave.graph.graph import Graph

    if not wanted:
        return {}
    leaves = Graph(tuple(wanted.values())).leaves
    return {t.leaf.name: names[t.leaf.name] for t in leaves if t.leaf is not None and t.leaf.kind == "input"}


def _input(name: str, value: Any) -> Any:
    """What stands for an argument; of complex numbers the parts lie along a last axis."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        return Complex.of(ow.input(name, *shape_and_dtype(as_real(value)), borrowed=True))
    return ow.input(name, *shape_and_dtype(value), borrowed=True)


def _feed(value: Any) -> Any:
    """A tensor of the host as an array; one of another device stays there."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        value = as_real(value)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return array_of(value)
    return value


def _close(traced: Traced) -> None:
    if traced.program is not None:
        traced.program.close()
