"""`draw`: random examples. A seed and a number give one, always the same.

Nodes are made from the cases of conformance, which have every operation with its attributes, dtypes and values, and
from the samples of third parties' operations: with axes of other lengths, on views of all kinds, and on values of
earlier nodes wherever these fit. The references compute each node when it is drawn; one that raises, is undefined for
its operands, or loses its digits is dropped.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave import ops, registry
from opweave.contract import Device
from opweave.contract.kernels import KernelTable
from opweave.errors import OpweaveError
from opweave.graph.dtypes import as_dtype
from opweave.graph.graph import Graph
from opweave.graph.layout import Shape
from opweave.graph.opdef import OPS
from opweave.graph.tensor import Tensor
from opweave_conformance.case import LAYOUTS, Case, Operand
from opweave_conformance.cases import CASES_OF, cases_for
from opweave_conformance.fuzz import functions
from opweave_conformance.fuzz.check import apply
from opweave_conformance.fuzz.example import Drawn, Entry, Example, LeafEntry, NodeEntry, lines_of, with_lengths
from opweave_conformance.fuzz.leaves import Leaves, leaf_array
from opweave_conformance.fuzz.samples import Samples, evaluate

__all__ = ["affordable", "computable", "draw", "operations", "resized", "tensors_of"]

Array = np.ndarray[Any, Any]

LENGTHS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 256, 257, 509,
                  1000, 1021, 1024, 2048, 4096, 4099, 8191, 16385, 26001, 32767, 32769, 65537, 131071, 131073, 262144,
                  500009, 1000003)  # fmt: skip
"""Lengths of axes that are drawn: small ones, powers of two and beside them, primes."""

BUDGETS: Final = ((1 << 11, 0.55), (1 << 14, 0.23), (1 << 17, 0.16), (1_000_003, 0.06))
"""Elements of the largest operand, and how often."""

SLOW: Final = frozenset(
    {"state_space", "linear_attention", "sparse_attention", "linalg", "convolution", "pooling", "interpolation",
     "attention", "attention_gradient", "experts"}
)  # fmt: skip
"""Families whose references take long on large operands."""

MOST_FLOPS: Final = 50_000_000
LARGEST: Final = 1 << 21
"""What one node may compute: floating-point operations, and elements."""

HOW: Final = ("run", "submit", "observe", "warm", "reserve", "on_device")
"""How graphs run, see `opweave_conformance.fuzz.check`."""

WRITES: Final = 0.1
"""How often a node that writes a state is drawn; others are equally frequent."""

REACHED: Final = 0.8
"""How often a node is of an operation for which a device has a kernel."""


@cache
def operations() -> Mapping[str, Sequence[Case]]:
    """Operation -> its cases, third parties' operations too."""
    third = [name for name, op in OPS.items() if op.family == "third-party" and not op.is_view]
    found = CASES_OF | {name: cases for name in third if (cases := cases_for(name))}
    found["custom"] = functions.cases()  # whose functions a script can name
    return dict(sorted(found.items()))


def draw(seed: int, number: int, devices: Sequence[Device], largest: int = LENGTHS[-1]) -> Example:
    """The example of this number in the sequence of a seed, for these devices; operands have at most about ``largest``
    elements."""
    rng = np.random.default_rng([seed, number])
    names = _some_devices(rng, [device.name for device in devices])
    kernels = _with_kernels(devices)
    graph = _Drawing(rng, largest, kernels).drawn(names)
    graphs = [graph]
    chance = rng.random()
    if chance < 0.15:
        graphs += _other_sizes(rng, graph)
    elif chance < 0.2:
        graphs.append(_Drawing(rng, largest, kernels).drawn(names))
    elif chance < 0.25:
        graphs.append(graph)
    elif chance < 0.35:
        graphs = [_compiled(rng, graph)]
    return Example(tuple(graphs), names, tuple(_options(rng)), tuple(_limits(rng, devices, names)))


def _with_kernels(devices: Sequence[Device]) -> Sequence[str]:
    """The operations for which one of the devices but host has a kernel; none where one of them has no table."""
    tables = [getattr(device, "kernels", None) for device in devices if device.name != "host"]
    known = [table.ops() for table in tables if isinstance(table, KernelTable)]
    if len(known) < len(tables) or not all(known):
        return ()
    return [name for name in operations() if any(name in ops for ops in known)]


def _some_devices(rng: np.random.Generator, names: list[str]) -> tuple[str, ...]:
    count = min(int(rng.choice((1, 2, 3, 4), p=(0.45, 0.35, 0.12, 0.08))), len(names))
    chosen = [names[i] for i in rng.permutation(len(names))[:count]]
    return (*chosen, "host") if rng.random() < 0.9 and "host" not in chosen else tuple(chosen)


def _options(rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
    if rng.random() < 0.35:
        yield "parallel", [True, 2, 3][rng.integers(3)]
    if rng.random() < 0.4:
        yield "threads", int(rng.integers(1, 5))
    if rng.random() < 0.1:
        limit = int(rng.choice((1 << 12, 1 << 16, 1 << 20)))
        if "memory_limit" in registry.REGISTRY.rewrites():
            yield "memory_limit", limit
    if rng.random() < 0.15:
        yield "repack", [False, 0, 1 << 16][rng.integers(3)]
    if rng.random() < 0.1:
        yield "op_offload", False


def _limits(
    rng: np.random.Generator, devices: Sequence[Device], names: Sequence[str]
) -> Iterator[tuple[str, str, int]]:
    """Other values of some numbers by which kernels choose their paths."""
    for device in devices:
        if device.name not in names or not device.limits or rng.random() < 0.6:
            continue
        for i in rng.permutation(len(device.limits))[: int(rng.integers(1, 5))]:
            limit = device.limits[i]
            values = list(limit.values().values())
            value = int(values[rng.integers(len(values))])
            if rng.random() < 0.4:  # somewhere between what makes sense
                value = int(np.exp(rng.uniform(np.log(limit.smallest), np.log(limit.largest))))
            yield device.name, limit.name, min(max(value, limit.bounds[0]), limit.bounds[1])


# --- a graph --------------------------------------------------------------------------------------------------------


class _Drawing:
    """A graph that grows node by node, with the samples of all its values."""

    def __init__(self, rng: np.random.Generator, largest: int, kernels: Sequence[str] = ()) -> None:
        self.rng: Final = rng
        self.kernels: Final = kernels
        self.known: Final[dict[Tensor, Samples]] = {}
        self.leaves: Final[dict[Tensor, LeafEntry]] = {}
        self.numbers: Final[dict[Tensor, LeafEntry]] = {}
        self.pool: Final[list[Tensor]] = []
        self.states: Final[dict[Tensor, Tensor]] = {}  # leaf -> its latest version
        sizes, chances = zip(*BUDGETS, strict=True)
        self.budget: Final = min(int(rng.choice(sizes, p=chances)), largest)
        self.reuse: Final = rng.uniform(0.5, 0.95)

    def drawn(self, devices: Sequence[str]) -> Drawn:
        rng = self.rng
        wanted = int(rng.integers(1, 6)) if self.budget > 1 << 14 else int(rng.geometric(0.18))
        made = 0
        for _ in range(6 * wanted + 6):
            made += self._add_node()
            if made >= wanted:
                break
        outputs = self._outputs()
        entries, numbers = self._entries(outputs, devices)
        pins = [(numbers[t], str(rng.choice(devices))) for t in numbers if t.op is not None and not t.is_view]
        pins = [pin for pin in pins if rng.random() < 0.15] if rng.random() < 0.4 else []
        return Drawn(
            tuple(entries), tuple([numbers[t] for t in outputs]), tuple(pins),
            str(rng.choice(("exact", "bf16", "int8"), p=(0.9, 0.05, 0.05))),
            int(rng.choice((1, 2, 3), p=(0.5, 0.4, 0.1))),
            str(rng.choice(HOW, p=(0.45, 0.25, 0.1, 0.05, 0.05, 0.1))),
        )  # fmt: skip

    def _outputs(self) -> list[Tensor]:
        """The latest versions of written states, and some other computed values, as far as they have an order."""
        latest = [t for t in self.states.values() if t.op is not None]
        computed = [t for t in self.pool if t.op is not None]
        # The last ones first: they need the most.
        ranked = computed[::-1][:3] + [computed[i] for i in self.rng.permutation(len(computed))]
        count = int(self.rng.integers(1, 4))
        chosen: list[Tensor] = []
        for tensor in [*latest, *ranked]:
            if tensor in chosen or len(chosen) >= count + len(latest):
                continue
            try:
                Graph([*chosen, tensor])
            except OpweaveError:
                continue
            chosen.append(tensor)
        return chosen or [ops.copy(self._leaf(Operand((3, 5))))]

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _add_node(self) -> bool:
        rng = self.rng
        table = operations()
        names = [name for name in table if OPS[name].writes] if rng.random() < WRITES else list(table)
        if self.kernels and rng.random() < REACHED:
            names = [name for name in names if name in self.kernels] or list(self.kernels)
        op = names[rng.integers(len(names))]
        case = table[op][int(rng.integers(len(table[op])))]
        operands = self._sized(case)
        for make in (lambda o: self._operand(o, case.op), self._leaf):
            try:
                return self._accept(case.build(*map(make, operands)))
            except (OpweaveError, ValueError):
                return False  # its options belong to other lengths
            except AssertionError:  # some cases take leaves only
                continue
        return False

    def _sized(self, case: Case) -> list[Operand]:
        """The operands of a case, at times with other lengths: equal ones stay equal."""
        rng, operands = self.rng, list(case.operands)
        if rng.random() < 0.35 or "-with-" in case.id:  # whose attributes were not checked for other lengths
            return operands
        budget = min(self.budget, 1 << 13) if OPS[case.op].family in SLOW else self.budget
        lengths = sorted({n for o in operands for n in o.shape})
        new = {n: self._length(budget) for n in lengths if rng.random() < 0.6}
        if budget > 1 << 14 and lengths:
            # Long and thin: one long axis beside short ones.
            last = [o.shape[-1] for o in operands if o.shape]
            long = last[0] if last and rng.random() < 0.5 else lengths[rng.integers(len(lengths))]
            new = {n: int(rng.choice((1, 1, 1, 2, 3, n))) for n in lengths}
            new[long] = int(rng.choice([m for m in LENGTHS if budget // 32 <= m <= budget]))
        block = max(as_dtype(o.dtype).block for o in operands) if operands else 1
        if block > 1:
            new = {n: -(-m // block) * block if n % block == 0 else m for n, m in new.items()}
        made = [
            o._replace(shape=tuple([new.get(n, n) for n in o.shape]), high=new.get(o.high, o.high)) for o in operands
        ]
        # Layouts make leaves with elements for operands without: a first axis of 0 repeats one of 1.
        return made if all(prod([n or 1 for n in o.shape]) <= budget for o in made) else operands

    def _length(self, budget: int) -> int:
        """A length of an axis, at times 0."""
        fitting = [m for m in LENGTHS if m <= budget]
        return fitting[self.rng.integers(len(fitting))] if self.rng.random() > 0.04 else 0

    def _accept(self, result: Tensor) -> bool:
        """Compute what is new, and keep it if its values are defined and well conditioned."""
        try:
            fresh = [t for t in Graph([result]).nodes if t not in self.known]
            if not fresh or not self._compute([result]):
                return False
        except Exception:  # whatever a reference raises for operands that it does not take
            return False
        for tensor in fresh:
            if tensor.op is not None and tensor.op.writes:
                self.states[tensor.memory] = tensor
                self.pool[:] = [t for t in self.pool if t.memory is not tensor.memory or self.rng.random() < 0.2]
        self.pool.append(result)
        return True

    def _compute(self, tensors: Sequence[Tensor]) -> bool:
        """Add the samples of what is new; or nothing, where that would be undefined, ill-conditioned or slow."""
        graph = Graph(tensors)
        fresh = [t for t in graph.nodes if t not in self.known]
        added: dict[Tensor, Samples] = {}
        for leaf in graph.leaves:
            if leaf not in self.known:
                data = leaf.leaf.data if leaf.leaf is not None else None
                if data is None or leaf.shape:
                    return False  # values of an operation's own, which no script can repeat
                self.numbers[leaf] = LeafEntry("number", (), leaf.dtype.name, repr(data.item()), 0, 0)
                self.known[leaf] = [data]
        seen: Any = ChainMap(added, self.known)
        for tensor in fresh:
            if not affordable(tensor) or not _ordered(tensor, self.known):
                return False
            evaluate([tensor], seen, np.random.default_rng(0), {})
            if not _sound(added[tensor]):
                return False
        self.known.update(added)
        return True

    # --- operands ---------------------------------------------------------------------------------------------------

    def _operand(self, operand: Operand, op: str) -> Tensor:
        """A tensor as the operand asks for: of what is there, or a new leaf."""
        rng = self.rng
        if operand.state:
            latest = [t for t in self.states.values() if t.shape == operand.shape and t.dtype.name == operand.dtype]
            return latest[rng.integers(len(latest))] if latest and rng.random() < 0.7 else self._leaf(operand)
        if self.pool and rng.random() < self.reuse:
            for _ in range(3):
                found = self._adapted(self.pool[rng.integers(len(self.pool))], operand, op)
                if found is not None:
                    return found
        return self._leaf(operand)

    def _leaf(self, operand: Operand) -> Tensor:
        rng = self.rng
        if operand.layout == "contiguous" and operand.shape and not operand.state and rng.random() < 0.3:
            operand = operand._replace(layout=LAYOUTS[rng.integers(len(LAYOUTS))])
        name = f"fuzz{len(self.leaves)}"
        try:
            tensor = operand.tensor(name)
        except OpweaveError:  # blocks allow few layouts
            tensor = operand._replace(layout="contiguous").tensor(name)
        if tensor.memory.size > 4 * max(self.budget, tensor.size):  # windows of long and thin operands, along all axes
            tensor = operand._replace(layout="contiguous").tensor(name)
        memory, seed = tensor.memory, int(rng.integers(1 << 16))
        values = leaf_array(operand, memory.shape, seed)
        kind = "state" if operand.state else str(rng.choice(("input", "weight", "constant"), p=(0.6, 0.3, 0.1)))
        if memory.dtype.is_quantized and kind == "constant":
            kind = "weight"
        self.leaves[memory] = LeafEntry(kind, memory.shape, memory.dtype.name, operand.values, operand.high, seed)
        self.known[memory] = [values]
        if operand.state:
            self.states[memory] = memory
        if tensor.op is not None:
            evaluate([t for t in Graph([tensor]).nodes if t not in self.known], self.known, rng, {})
        if operand.values in ("normal", "positive", "fraction") and not memory.dtype.is_quantized:
            self.pool.append(tensor)
        return tensor

    def _adapted(self, t: Tensor, operand: Operand, op: str) -> Tensor | None:
        """``t`` with the shape, dtype and values that an operand asks for, through views and small operations."""
        dtype = as_dtype(operand.dtype)
        if t.dtype.is_quantized or dtype.is_quantized:
            return t if t.dtype is dtype and t.shape == operand.shape else None
        if operand.values not in ("normal", "positive", "fraction", "negative", "ids"):
            return None
        if t.dtype is not dtype and not (dtype.is_float and t.dtype.kind in "fiu"):
            return None
        if not t.size or t.root not in self.known:
            return None
        if operand.values == "ids":
            known = self.known.get(t, self.known[t.root])[0]
            fits = t.shape == operand.shape and t.dtype is dtype and known.min() >= 0 and known.max() < operand.high
            unique = np.unique(known).size == known.size or op in ("embedding", "take_along_axis")
            return t if fits and unique else None
        shaped = self._shaped(t, operand.shape)
        if shaped is None:
            return None
        if shaped.dtype is not dtype:
            shaped = ops.cast(shaped, dtype)
        if dtype.is_float:
            shaped = self._bounded(shaped, t, operand)
        return shaped if self._compute([shaped]) else None

    def _bounded(self, shaped: Tensor, t: Tensor, operand: Operand) -> Tensor:
        if operand.values == "positive":
            return ops.abs(shaped) + 0.125
        if operand.values == "negative":
            return -ops.abs(shaped) - 0.125
        if operand.values == "fraction":
            return ops.sigmoid(shaped)
        values = self.known[t.root][0].astype(np.float64)
        with np.errstate(all="ignore"):
            large = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
        return ops.tanh(shaped) if large > 64 else shaped

    def _shaped(self, t: Tensor, shape: Shape) -> Tensor | None:
        rng, size = self.rng, prod(shape)
        if t.shape == shape:
            return t
        if t.ndim == 2 and t.shape[::-1] == shape:
            return t.T
        if not size:
            return None
        if t.size >= size:
            flat = ops.reshape(t, (t.size,))
            step = 2 if t.size >= 2 * size and rng.random() < 0.3 else 1
            start = int(rng.integers(t.size - step * (size - 1)))
            return ops.reshape(flat[start : start + step * (size - 1) + 1 : step], shape)
        try:
            return t.broadcast_to(shape)
        except OpweaveError:
            return None

    # --- as data ----------------------------------------------------------------------------------------------------

    def _entries(self, outputs: Sequence[Tensor], devices: Sequence[str]) -> tuple[list[Entry], dict[Tensor, int]]:
        rng = self.rng
        graph = Graph(outputs)
        numbers: dict[Tensor, int] = {}
        entries: list[Entry] = []
        for tensor in (*graph.leaves, *graph.nodes):
            numbers[tensor] = len(entries)
            if tensor.op is None:
                leaf = self.leaves.get(tensor) or self.numbers[tensor]
                if leaf.kind in ("weight", "state") and rng.random() < 0.3:
                    leaf = leaf._replace(device=str(rng.choice(devices)))
                entries.append(leaf)
            else:
                entries.append(NodeEntry(tensor.op.name, tuple([numbers[s] for s in tensor.srcs]), dict(tensor.attrs)))
        return entries, numbers


def affordable(tensor: Tensor) -> bool:
    """Whether the reference of a node is fast enough, and its samples fit: those of a view are copies."""
    assert tensor.op is not None
    return tensor.size <= LARGEST and (tensor.is_view or tensor.op.flops(tensor) <= MOST_FLOPS)


def _ordered(tensor: Tensor, known: Mapping[Tensor, Samples]) -> bool:
    """Whether no two rows are written to one place, of which the last one is not the same everywhere."""
    assert tensor.op is not None
    if tensor.op.name not in ("index_copy", "set_rows"):
        return True
    for i in tensor.op.indices:
        ids = known[tensor.srcs[i] if tensor.srcs[i] in known else tensor.srcs[i].root]
        if ids and np.unique(ids[0]).size < tensor.srcs[i].size:
            return False
    return True


def _sound(samples: Samples) -> bool:
    """Whether there are values with some correct digits, mostly finite and not too large."""
    if not samples:
        return False
    if samples[0].dtype.kind in "iub" or not samples[0].size:
        return True
    with np.errstate(all="ignore"):
        first, *others = [sample.astype(np.float64) for sample in samples]
        finite = np.isfinite(first)
        if np.count_nonzero(finite) < 0.5 * first.size:
            return False
        large = float(np.max(np.abs(first), where=finite, initial=0.0))
        power = float(np.sqrt(np.mean(np.square(first, where=finite, out=np.zeros_like(first)))))
        spread = max([float(np.median(np.abs(np.where(finite, other - first, 0)))) for other in others], default=0.0)
    return large < 30_000 and spread <= 0.05 * power + 1e-30


# --- other sizes ----------------------------------------------------------------------------------------------------


def _other_sizes(rng: np.random.Generator, graph: Drawn) -> list[Drawn]:
    """The same graph with one or two other lengths of an axis of its leaves, where that gives a graph."""
    found = [resized(graph, _other_length(rng, graph)) for _ in range(int(rng.integers(1, 4)))]
    return [made for made in found if made is not None]


def _compiled(rng: np.random.Generator, graph: Drawn) -> Drawn:
    """The graph as a compiled function that was told other lengths of an axis as the largest; or the graph itself."""
    lengths = _other_length(rng, graph)
    made = graph._replace(largest=tuple(lengths.items()), pins=(), how="run")
    inputs = [e for e in graph.entries if isinstance(e, LeafEntry) and e.kind == "input"]
    plain = not any(as_dtype(e.dtype).is_quantized for e in inputs)
    changed = any(n in lengths for e in inputs for n in e.shape)
    return made if plain and changed and resized(graph, lengths) is not None else graph


def _other_length(rng: np.random.Generator, graph: Drawn) -> dict[int, int]:
    """A length of an axis of the leaves and another one; none if all are 1."""
    lengths = sorted({n for e in graph.entries if isinstance(e, LeafEntry) for n in e.shape if n > 1})
    if not lengths:
        return {}
    old = int(rng.choice(lengths))
    return {old: int(rng.choice((1, 2, old + 1, old - 1, 2 * old, max(old // 2, 1))))}


def resized(graph: Drawn, lengths: Mapping[int, int]) -> Drawn | None:
    """The graph with axes of other lengths, old -> new, in leaves, views and what nodes are given; ``None`` where there
    is no such graph, or the references do not compute it."""
    if not lengths or any(isinstance(e, NodeEntry) and e.op in BOUNDED for e in graph.entries):
        return None
    made = with_lengths(graph, lengths)
    return made if computable(made) else None


BOUNDED: Final = frozenset({"roll"})
"""Operations whose builders bring attributes into the range that the lengths of axes give."""


def computable(graph: Drawn) -> bool:
    """Whether the graph can be made, and the references compute some of its outputs."""
    known: dict[Tensor, Samples] = {}
    outputs: list[Tensor] = []

    def compute(scheduler: None, leaves: Leaves, targets: Sequence[Tensor], **how: Any) -> None:
        outputs.extend(targets)
        known.update({t: [v] for t, v in leaves.values.items()})
        nodes = Graph(targets).nodes
        if not all(affordable(t) and _ordered(t, known) for t in nodes):
            raise MemoryError
        evaluate(nodes, known, np.random.default_rng(0), {}, 2)

    try:
        tensors_of(graph, compute)
    except Exception:  # whatever builders and references raise for sizes that do not go together
        return False
    return any(known[t] for t in outputs)


def tensors_of(graph: Drawn, check: Callable[..., None] = lambda *args, **how: None) -> dict[int, Tensor]:
    """The tensors of a graph by the numbers of its entries, made without devices; raises what builders raise.

    Args:
        check: called as `opweave_conformance.fuzz.check` would be.
    """
    unplaced = [e._replace(device="") if isinstance(e, LeafEntry) else e for e in graph.entries]
    names: dict[str, Any] = {
        "Leaves": Leaves,
        "apply": apply,
        "functions": functions,
        "check": check,
        "scheduler": None,
        "ow": ow,
    }
    exec("\n".join(lines_of(graph._replace(entries=tuple(unplaced), pins=()))), names)
    return {i: names[f"t{i}"] for i in range(len(unplaced))}
