"""`Graph`: the nodes that some outputs need, in an order that is safe to run.

An order is safe if sources come before their readers and, for states, readers of a version come before the node that
writes the next version (anti-dependencies). If there is no such order, `HazardError` is raised.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from opweave.errors import HazardError, LayoutError, SchedulerError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape, span
from opweave.graph.leaf import Leaf
from opweave.graph.tensor import Tensor, shows_columns_of_blocks, with_sources

__all__ = ["Graph", "location_of", "overlapping_leaves", "rebuilt"]


class Graph:
    """The nodes that ``outputs`` need, ordered. Immutable.

    Attributes:
        outputs: the tensors to compute.
        nodes: computed tensors and views in an order that is safe to run.
        leaves: the leaves that they need, in order of first use.

    Raises:
        HazardError: two nodes write the same version of a state; a reader of a version cannot come before the writer of
            the next one; an output is a version that another node overwrites.
        LayoutError: an output that is the transpose of a quantized matrix, or a node that reads one.
        SchedulerError: two different inputs or states with the same name; no output, or one that is no tensor.
    """

    __slots__ = ("leaves", "nodes", "outputs")

    def __init__(self, outputs: Tensor | Sequence[Tensor]) -> None:
        if not isinstance(outputs, Iterable) and not isinstance(outputs, Tensor):
            raise SchedulerError(f"outputs are a tensor or a sequence of tensors, not {outputs!r:.60}")
        self.outputs: Final = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        for output in self.outputs:
            if not isinstance(output, Tensor):
                raise SchedulerError(f"an output is a Tensor, not {type(output).__name__}")
        if not self.outputs:
            raise SchedulerError("a graph needs at least one output")
        order = _sort(self.outputs)
        # Sets of the few operations and dtypes are made in half the time that asking each tensor takes.
        if any(op is not None and op.writes for op in {t.op for t in order}):
            before = _anti_dependencies(order, self.outputs)
            if before:  # not in decoders that read only the new version of a cache
                order = _sort(self.outputs, before)
        self.nodes: Final = tuple([t for t in order if t.op is not None])
        self.leaves: Final = tuple([t for t in order if t.op is None])
        _check_names([t for t in self.leaves if t.leaf is not None and t.leaf.kind in ("input", "state")])
        if any(dtype.block > 1 for dtype in {t.dtype for t in order}):
            _check_blocks(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    # --- saving -----------------------------------------------------------------------------------------------------

    def to_bytes(self, *, constants: bool = True, weights: bool = False, states: bool = False) -> bytes:
        """The graph as bytes for `from_bytes`: its structure, names, scopes and sites, and the values of leaves.

        Args:
            constants: with the values of constants. Without, the loaded graph can only be planned.
            weights: with the values of weights. Without, they can be given by name when the graph is loaded.
            states: with the present values of states, which waits for work on their devices. Without, they begin with
                their ``fill``.

        Raises:
            SchedulerError: an operation has an attribute that cannot be saved, as the function of `opweave.custom`; two
                weights have one name, and their values are left out.
            ExecutionError: a state is half written.
        """
        from opweave.graph.saving import encode, values  # most programs never save a graph

        if not weights:
            _check_names([t for t in self.leaves if t.leaf is not None and t.leaf.kind == "weight"])
        wanted = {"constant": constants, "weight": weights, "state": states}
        return encode(
            self.outputs,
            (*self.leaves, *self.nodes),
            lambda tensor: values(tensor) if tensor.leaf and wanted.get(tensor.leaf.kind) else None,
        )

    @classmethod
    def from_bytes(cls, data: Any, *, weights: Mapping[str, Any] = MappingProxyType({})) -> Graph:
        """The graph that `to_bytes` saved. The bytes are checked, and nothing in them is executed.

        Inputs, and nodes that exist already, are the same tensors; other leaves are new ones, without a device. Values
        of constants and weights are not copied: those in a mapped file (``mmap``, ``numpy.memmap``) are read when they
        are used.

        Args:
            data: bytes, or something with contiguous bytes.
            weights: name -> tensor or array, for weights that were saved without values. Tensors of `opweave.weights`
                keep their device. If it is empty, such weights have no values, and the graph can only be planned.

        Raises:
            FormatError: the bytes are cut off, damaged, of another version, or contradict themselves.
            UnknownNameError: an operation that is not defined here, or a weight that is not among ``weights``.
            SchedulerError: one of ``weights`` has another shape or dtype than was saved.
        """
        from opweave.graph.loading import decode

        return cls(decode(data, weights))

    def to_dot(self) -> str:
        """The graph in DOT, the language of Graphviz: boxes for nodes, in clusters for scopes; ovals for leaves."""
        from opweave.graph.dot import dot

        return dot((*self.leaves, *self.nodes), self.outputs)

    def __copy__(self) -> Graph:
        return self

    def __deepcopy__(self, memo: Any) -> Graph:
        return self  # immutable, as its tensors are

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes, {len(self.leaves)} leaves, {len(self.outputs)} outputs>"


Readers = tuple[list[Tensor], list[Tensor]]
"""The nodes that read the version which a node overwrites: those behind it in an order by sources alone, then those
before it in that order, from which the written value may be computed."""


def _sort(outputs: Iterable[Tensor], before: dict[Tensor, Readers] | None = None) -> list[Tensor]:
    """The tensors that ``outputs`` need, depth first, sources first; ``before[t]`` must precede ``t`` as well."""
    order: list[Tensor] = []
    done: set[Tensor] = set()
    opened: set[Tensor] = set()
    stack = list(outputs)
    stack.reverse()
    while stack:
        tensor = stack[-1]
        if tensor in done:
            stack.pop()
            continue
        readers = None if before is None else before.get(tensor)
        # Readers that the written value does not depend on come first: what it depends on then takes memory for a
        # shorter time.
        pending = [] if readers is None else [s for s in readers[0] if s not in done]
        for s in tensor.srcs:
            if s not in done:
                if s.srcs:
                    pending.append(s)
                else:
                    # A leaf.
                    done.add(s)
                    order.append(s)
        if readers is not None:
            pending += [s for s in readers[1] if s not in done]
        if not pending:
            stack.pop()
            done.add(tensor)
            order.append(tensor)
            continue
        if before is not None:
            # Tensors in `opened` that are not in `done` lie on the path from an output to this one.
            opened.add(tensor)
            for s in pending:
                if s in opened:
                    _raise_cycle(s, tensor, before)
        pending.reverse()
        stack += pending
    return order


def _raise_cycle(a: Tensor, b: Tensor, before: dict[Tensor, Readers]) -> None:
    writer, reader = (a, b) if a in before else (b, a)
    raise HazardError(
        f"{writer.describe()} overwrites what {reader.describe()} reads, and neither can come first; "
        "read the new version, or take ow.copy(...) of the old one before it is written"
    )


def _check_blocks(nodes: Iterable[Tensor]) -> None:
    """Raise `LayoutError` for a transposed quantized matrix, which strides cannot express. Only matmul accepts one, and
    its node has the matrix itself as a source."""
    for tensor in nodes:
        if shows_columns_of_blocks(tensor):
            raise LayoutError(
                "the transpose of a quantized matrix only serves as the right operand of matmul "
                f"(x @ w.T, which is linear(x, w)), not as an output or for another node: {tensor.describe()}"
            )


def _check_names(leaves: Iterable[Tensor]) -> None:
    """Raise `SchedulerError` if two of the leaves have one name, by which they are to be given."""
    names: dict[str, Tensor] = {}
    for tensor in leaves:
        assert tensor.leaf is not None
        other = names.setdefault(tensor.leaf.name, tensor)
        if other is not tensor:
            raise SchedulerError(
                f"two different leaves are named {tensor.leaf.name!r}: {other.describe()} and {tensor.describe()}"
            )


def _anti_dependencies(order: list[Tensor], outputs: Iterable[Tensor]) -> dict[Tensor, Readers]:
    """Writing node -> the nodes that read the version which it overwrites."""
    same_memory = overlapping_leaves(order)
    writers: dict[Tensor, Tensor] = {}  # version -> the node that overwrites it
    for tensor in order:
        if tensor.op is not None and tensor.op.writes:
            for version in same_memory.get(tensor.srcs[0].root, (tensor.srcs[0].root,)):
                other = writers.setdefault(version, tensor)
                if other is not tensor:
                    raise HazardError(
                        f"two nodes write the same version of {tensor.memory.name!r}: {other.describe()} and "
                        f"{tensor.describe()}; let the second one write what the first one returned"
                    )
    before: dict[Tensor, Readers] = {}
    passed: set[Tensor] = set()
    for tensor in order:
        if tensor.op is None or tensor.op.is_view:
            continue
        passed.add(tensor)
        for source in tensor.srcs[1:] if tensor.op.writes else tensor.srcs:
            writer = writers.get(source.root)
            if writer is tensor:
                _check_self_overlap(tensor, source)
            elif writer is not None:
                before.setdefault(writer, ([], []))[writer not in passed].append(tensor)
    for output in outputs:
        writer = writers.get(output.root)
        if writer is not None:
            raise HazardError(
                f"the output {output.describe()} shows a version of {output.memory.name!r} that {writer.describe()} "
                "overwrites; ask for the new version, or for ow.copy(...) of the old one"
            )
    return before


def _check_self_overlap(tensor: Tensor, source: Tensor) -> None:
    """Raise `HazardError` if a node reads bytes of a state that it writes."""
    target = tensor.srcs[0]
    a, c = target.offset, source.offset
    if source.memory is not target.memory:
        # Two leaves over the same bytes: compare addresses.
        a, c = a + (location_of(target.memory) or (0, 0))[1], c + (location_of(source.memory) or (0, 0))[1]
    b = a + span(target.shape, target.strides, target.dtype)
    d = c + span(source.shape, source.strides, source.dtype)
    if a < d and c < b:
        raise HazardError(
            f"{tensor.describe()} reads the bytes that it overwrites; take ow.copy(...) of its source first"
        )


def location_of(tensor: Tensor) -> tuple[int, int] | None:
    """Memory and position of the first byte of a leaf (see `Buffer.location`), ``None`` while it has no bytes."""
    leaf = tensor.leaf
    if leaf is None:
        return None
    if leaf.placement is not None:
        where: tuple[int, int] = leaf.placement.buffer.location(leaf.placement.offset)
        return where
    if leaf.data is not None:
        return 0, leaf.data.__array_interface__["data"][0]
    return None


def overlapping_leaves(order: Iterable[Tensor]) -> dict[Tensor, tuple[Tensor, ...]]:
    """Leaf -> all leaves that overlap with it in memory, for those that overlap with another one."""
    ranges = []
    for tensor in order:
        location = None if tensor.leaf is None else location_of(tensor)
        if location is not None:
            ranges.append((*location, location[1] + tensor.nbytes, tensor))
    ranges.sort(key=lambda r: r[:3])
    result: dict[Tensor, tuple[Tensor, ...]] = {}
    group: list[Tensor] = []
    space = end = -1
    for where, start, stop, tensor in ranges:
        if group and where == space and start < end:
            group.append(tensor)
            end = max(end, stop)
        else:
            group, space, end = [tensor], where, stop
        if len(group) > 1:
            result.update(dict.fromkeys(group, tuple(group)))
    return result


def rebuilt(outputs: Sequence[Tensor], known: Mapping[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """``outputs`` with other tensors in place of those in ``known`` and what follows from them.

    Args:
        known: tensor -> what stands in for it; what only that tensor needs is left out.
    """
    new: dict[Tensor, Tensor] = dict(known)
    for tensor in _ancestors(outputs, known):
        new[tensor] = tensor if tensor.op is None else with_sources(tensor, tuple([new[s] for s in tensor.srcs]))
    return tuple([new[output] for output in outputs])


def _ancestors(outputs: Sequence[Tensor], known: Mapping[Tensor, Tensor]) -> Iterable[Tensor]:
    """Everything that ``outputs`` need, sources first, up to what is known."""
    order: dict[Tensor, None] = {}
    stack = [(output, False) for output in reversed(outputs)]
    while stack:
        tensor, done = stack.pop()
        if done:
            order[tensor] = None
        elif tensor not in order and tensor not in known:
            stack.append((tensor, True))
            stack += [(source, False) for source in reversed(tensor.srcs)]
    return order


# --- pickling -------------------------------------------------------------------------------------------------------


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor is rebuilt: a leaf from its values; a computed tensor from the bytes of its graph and its leaves.

    Leaves are objects of their own in the pickle. So a leaf of several tensors is pickled once, and they share it again
    when they are loaded.
    """
    from opweave.graph.saving import values

    leaf = tensor.leaf
    if leaf is None:
        return _restore_tensor, _structure(Graph(tensor))
    facts = {"fill": leaf.fill, "group": leaf.group, "borrowed": leaf.borrowed}
    label = (tensor.given_name, tensor.site)
    return _restore_leaf, (leaf.kind, leaf.name, values(tensor), facts, tensor.shape, tensor.dtype, label)


def _reduce_graph(graph: Graph) -> tuple[Any, ...]:
    return _restore_graph, _structure(graph)


def _structure(graph: Graph) -> tuple[bytes, tuple[Tensor, ...]]:
    from opweave.graph.saving import encode

    return encode(graph.outputs, (*graph.leaves, *graph.nodes), lambda leaf: None), graph.leaves


def _restore_leaf(
    kind: Any, key: str, data: Any, facts: dict[str, Any], shape: Shape, dtype: DType, label: tuple[str, str]
) -> Tensor:
    from opweave.graph.loading import leaf_tensor

    leaf = Leaf(kind, key, data, **facts)
    tensor = leaf_tensor(leaf, shape, dtype)
    if tensor.leaf is leaf:  # else it lived before
        tensor.given_name, tensor.built_at = label
    return tensor


def _restore_tensor(data: bytes, leaves: tuple[Tensor, ...]) -> Tensor:
    return _restore_graph(data, leaves).outputs[0]


def _restore_graph(data: bytes, leaves: tuple[Tensor, ...]) -> Graph:
    from opweave.graph.loading import decode

    return Graph(decode(data, {}, leaves))


copyreg.pickle(Tensor, _reduce_tensor)
copyreg.pickle(Graph, _reduce_graph)
