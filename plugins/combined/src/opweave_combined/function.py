"""`CombinedFunction`: a group of steps as a program of a scheduler over the members of a combination."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import finalize

from opweave import ops
from opweave.contract.step import Arg, Step
from opweave.errors import LayoutError
from opweave.functional.library import ArrayLibrary, in_elements, window_plan
from opweave.graph.blocks import Blocks
from opweave.graph.graph import Graph
from opweave.graph.opdef import OPS
from opweave.graph.tensor import Tensor, constant, node, view_node
from opweave.graph.tensor import input as new_input
from opweave.leaf_memory import place_state, read_leaf, write_state
from opweave.leaves import state, weights
from opweave.ops.movement import SLICE
from opweave.sharding.axes import axes_of
from opweave.sharding.placing import Sharded, place_shards, place_state_shards
from opweave_combined.values import Kept, Value

if TYPE_CHECKING:
    from opweave.graph.layout import Shape
    from opweave.scheduler.program import Program
    from opweave_combined.members import Members

__all__ = ["CombinedFunction"]


NUMBERS: Final = count()
"""Numbers for the names of states, which have to be unique in a graph."""


class Ready(NamedTuple):
    """A program for values that members keep.

    Attributes:
        program: its outputs are those of the function that are no states, and then a piece of each state's new version.
        feeds: positions of the arguments that it is fed -> the name of the input.
        states: position of an output -> the argument whose state it is the new version of.
    """

    program: Program[Any]
    feeds: dict[int, str]
    states: dict[int, int]


class CombinedFunction:
    """What ``_compile_functional`` of a combination returns.

    It has a program for each choice of weights and states among its arguments, because these lie in shards and in
    memory of the members. A program is closed after the first of its values is garbage-collected.
    """

    def __init__(self, members: Members, steps: Sequence[Step], inputs: Sequence[Arg], outputs: Sequence[Arg]) -> None:
        self._members: Final = members
        self._steps: Final = tuple(steps)
        self._inputs: Final = tuple(inputs)
        self._outputs: Final = tuple(outputs)
        self._written: Final = {step.out.value for step in steps if OPS[step.op].writes}
        self._ready: Final[dict[tuple[int, ...], Ready]] = {}

    def __call__(self, *values: Value) -> list[Value]:
        members = self._members
        with members.lock:
            ready = self.prepare(values)
            try:
                members.runner = get_ident()
                results = iter(ready.program.run({name: values[i].to_host() for i, name in ready.feeds.items()}))
            finally:
                members.runner = 0
        made = []
        for i in range(len(self._outputs)):
            at = ready.states.get(i)
            old = None if at is None else values[at]
            made.append(Value(next(results)) if old is None else Value.of(_kept(old), old.shape))
        return made

    def prepare(self, values: Sequence[Value]) -> Ready:
        """The program for these values; those that members are to keep are given to them."""
        self._members.forget_unused()
        kept = {
            i: self._keep(value, arg) if value.kept is None else value.kept
            for i, (value, arg) in enumerate(zip(values, self._inputs, strict=True))
            if value.kept or value.weight or arg.value in self._written or arg.dtype.is_quantized
        }
        key = tuple(map(id, kept.values()))
        found = self._ready.get(key)
        if found is None or found.program.closed:
            found = self._ready[key] = self._build({i: holder.leaf for i, holder in kept.items()})
            for holder in kept.values():
                finalize(holder, self._drop, key).atexit = False
        return found

    def _drop(self, key: tuple[int, ...]) -> None:
        """Called when a value is garbage-collected, which may happen in any call: so the program is closed later."""
        found = self._ready.pop(key, None)
        if found is not None:
            self._members.unused.append(found.program)

    def _keep(self, value: Value, arg: Arg) -> Kept:
        """Give a value to the members: as a state, where the steps write it, else as a weight. It gets its memory when
        it is in a graph."""
        array = value.to_host()
        given = Blocks(array, arg.shape, arg.dtype) if arg.dtype.is_quantized else array
        if arg.value in self._written:
            leaf = state(f"{self._members.name}.state{next(NUMBERS)}", arg.shape, arg.dtype)
            write_state(leaf, given)
        else:
            (leaf,) = weights({f"{self._members.name}.weight": given}).values()
        return value.keep(leaf)

    def _build(self, leaves: dict[int, Tensor]) -> Ready:
        tensors = [
            leaves[i] if i in leaves else new_input(f"{i}", arg.shape, arg.dtype) for i, arg in enumerate(self._inputs)
        ]
        outputs, states = self._graph(tensors)
        graph = Graph(tuple(outputs))
        self._place(graph, [leaf for leaf in leaves.values() if _is_unplaced(leaf)])
        scheduler = self._members.scheduler
        try:
            program = scheduler.build(tuple(outputs))
        except LayoutError:
            split = [leaf for leaf in leaves.values() if _is_split_state(leaf)]
            if not split:
                raise
            # These steps write across the cut that suited other functions, whose programs their next calls build anew.
            scheduler.reset()
            for leaf in split:
                self._make_whole(leaf)
            program = scheduler.build(tuple(outputs))
        return Ready(program, {i: f"{i}" for i in range(len(tensors)) if i not in leaves}, states)

    def _place(self, graph: Graph, fresh: Sequence[Tensor]) -> None:
        """Give weights and states memory: in parts along the axes that suit the graph, else whole. What the scheduler
        places by itself are whole weights."""
        weights = {leaf for leaf in fresh if leaf.leaf is not None and leaf.leaf.kind == "weight"}
        states = {leaf for leaf in fresh if leaf not in weights}
        for leaf, axis in axes_of(graph, weights, states).items():
            try:
                if leaf in weights:
                    place_shards([leaf], Sharded(self._members.shares, axis))
                else:
                    place_state_shards(leaf, Sharded(self._members.shares, axis, multiple=1))
            except LayoutError:
                continue  # too few whole blocks: it stays whole
            assert leaf.leaf is not None
            self._members.note(leaf.leaf, leaf.nbytes)
        for leaf in states:
            if _is_unplaced(leaf):
                place_state(leaf, self._members.roomiest())

    def _make_whole(self, leaf: Tensor) -> None:
        """Give a state in parts memory on one member."""
        assert leaf.leaf is not None
        leaf.leaf.data, leaf.leaf.shards = read_leaf(leaf), None
        place_state(leaf, self._members.roomiest())

    def _graph(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, int]]:
        """The steps as nodes over tensors in place of the inputs."""
        known = {arg.value: tensor for arg, tensor in zip(self._inputs, tensors, strict=True)}
        position = {arg.value: i for i, arg in enumerate(self._inputs)}
        for step in self._steps:
            op, out = OPS[step.op], step.out
            srcs = [WINDOWS.window(known[arg.value], arg) for arg in step.srcs]
            if op.writes:
                region = WINDOWS.window(known[out.value], out)
                known[out.value] = node(op, (region, *srcs), dict(step.attrs))
                continue
            made = node(op, tuple(srcs), dict(step.attrs))
            whole = known.get(out.value)
            if out.offset or not out.is_dense or (whole is not None and whole.nbytes != out.nbytes):
                assert whole is not None
                made = WINDOWS.with_window(whole, out, made)
            known[out.value] = made
        outputs, versions, states = [], [], {}
        for i, out in enumerate(self._outputs):
            tensor = known[out.value]
            if out.value in self._written:
                states[i] = position[out.value]
                versions.append(_corner(tensor))
            else:
                tensor = tensor if tensor.shape == out.shape else ops.reshape(tensor, out.shape)
                outputs.append(ops.copy(tensor) if tensor.memory.leaf is not None else tensor)
        return outputs + versions, states


def _kept(value: Value) -> Kept:
    assert value.kept is not None
    return value.kept


def _is_unplaced(leaf: Tensor) -> bool:
    return leaf.leaf is not None and leaf.leaf.placement is None and leaf.leaf.shards is None


def _is_split_state(leaf: Tensor) -> bool:
    return leaf.leaf is not None and leaf.leaf.kind == "state" and leaf.leaf.shards is not None


def _corner(tensor: Tensor) -> Tensor:
    """A few elements of the version of a state: it is computed then, and little is read. They have all of the axis
    along which caches are cut, so that the state is not gathered."""
    if not tensor.ndim:
        return tensor
    ends = [slice(0, 1)] * (tensor.ndim - 1) + [slice(0, tensor.dtype.block)]
    if tensor.ndim == 3:
        ends[1] = slice(None)
    return tensor[tuple(ends)]


class _Windows(ArrayLibrary):
    """Windows of tensors as nodes of a graph."""

    def reshape(self, array: Tensor, shape: Shape) -> Tensor:
        if array.shape == tuple(shape):
            return array
        if [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:
            return ops.reshape(array, shape)
        bare = array[tuple([0 if n == 1 else slice(None) for n in array.shape])]  # a view, also of what has gaps
        return bare[tuple([None if n == 1 else slice(None) for n in shape])]

    def transpose(self, array: Tensor, axes: Sequence[int]) -> Tensor:
        return ops.transpose(array, axes)

    def broadcast_to(self, array: Tensor, shape: Shape) -> Tensor:
        return ops.broadcast_to(array, shape)

    def take(self, array: Tensor, index: Any) -> Tensor:
        return array[index]

    def window(self, whole: Tensor, arg: Arg) -> Tensor:
        if not arg.offset and arg.is_dense and arg.nbytes == whole.nbytes:
            return self.reshape(whole, arg.shape)
        if whole.dtype.block == 1:
            shape, strides, offset = in_elements(arg)
            if window_plan(whole.size, offset, shape, strides) is None:
                whole, offset = self._around(whole, offset, shape, strides)
            arg = Arg(None, offset * whole.dtype.itemsize, arg.dtype, arg.shape, arg.strides)
            if window_plan(whole.size, offset, shape, strides) is not None:
                return super().window(whole, arg)  # type: ignore[no-any-return]
        # No slices give this window, for example because its rows overlap.
        window = {"window": (arg.offset, arg.shape, arg.strides)}
        return view_node(SLICE, whole, window, arg.shape, arg.strides, whole.offset + arg.offset)

    def _around(self, whole: Tensor, offset: int, shape: Shape, strides: Shape) -> tuple[Tensor, int]:
        """Rows of the leading axis around a window, as many as whole steps of its largest stride take, and where it
        begins in them; all of it where there are none."""
        row = whole.size // whole.shape[0] if whole.ndim > 1 else 0
        steps = [stride for stride, n in zip(strides, shape, strict=True) if n > 1]
        if not row or not steps:
            return whole, offset
        first, big = offset // row, max(steps)
        span = 1 + sum([(n - 1) * stride for n, stride in zip(shape, strides, strict=True)])
        length = -(-(offset - first * row + span) // big) * big
        if length % row or first * row + length > whole.size:
            return whole, offset
        return whole[first : first + length // row], offset - first * row

    def updated(self, array: Tensor, index: Any, values: Tensor) -> Tensor:
        return ops.set_region(array, values, [constant(piece.start or 0, "i64") for piece in index])


WINDOWS: Final = _Windows()
