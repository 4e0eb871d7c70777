"""`Example`: random graphs with the devices and options they run with, as plain data that is written as a script."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from opweave.errors import SchedulerError
from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape

__all__ = ["Drawn", "Entry", "Example", "LeafEntry", "NodeEntry", "lines_of", "renumbered", "script", "with_lengths"]


class LeafEntry(NamedTuple):
    """A leaf: ``kind`` is ``"input"``, ``"weight"``, ``"constant"`` or ``"state"``; ``values``, ``high`` and ``seed``
    say what it is filled with, ``device`` where it lies. Or a ``"number"``, with ``values`` as Python writes it."""

    kind: str
    shape: Shape
    dtype: str
    values: str
    high: int
    seed: int
    device: str = ""


class NodeEntry(NamedTuple):
    """A node or a view: ``srcs`` are numbers of earlier entries."""

    op: str
    srcs: tuple[int, ...]
    attrs: Mapping[str, Any]


Entry = LeafEntry | NodeEntry
"""What a graph consists of."""


class Drawn(NamedTuple):
    """One graph, and how it runs: see `opweave_conformance.fuzz.check`. ``largest``: pairs of lengths; with the second
    ones in place of the first, the graph is the largest one of a compiled function."""

    entries: tuple[Entry, ...]
    outputs: tuple[int, ...]
    pins: tuple[tuple[int, str], ...] = ()
    precision: str = "exact"
    runs: int = 1
    how: str = "run"
    largest: tuple[tuple[int, int], ...] = ()


class Example(NamedTuple):
    """Graphs that are built and run one after the other on one scheduler.

    Attributes:
        options: arguments of the scheduler.
        limits: (device, name, value).
    """

    graphs: tuple[Drawn, ...]
    devices: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    limits: tuple[tuple[str, str, int], ...] = ()

    @property
    def nodes(self) -> int:
        """How many nodes it computes."""
        return sum(isinstance(e, NodeEntry) and e.op not in _VIEWS for g in self.graphs for e in g.entries)


_VIEWS: Final = frozenset({"reshape", "transpose", "slice", "broadcast_to", "diagonal"})


def script(example: Example, what: str = "") -> str:
    """The example as a script, which ends with an exception where a device is wrong.

    Raises:
        SchedulerError: a node has an attribute that cannot be written down.
    """
    combined = [d.removeprefix("combined:").split("+") for d in example.devices if d.startswith("combined:")]
    body = [f"opweave_combined.combine({members!r})" for members in combined]
    body += [f"tune({device!r}, {name}={value})" for device, name, value in example.limits]
    options = "".join(f", {name}={literal(value)}" for name, value in example.options)
    devices = ", ".join(map(repr, example.devices))
    body.append(f"with ow.Scheduler([{devices}]{options}) as scheduler:")
    for graph in example.graphs:
        body += [f"    {line}" for line in lines_of(graph)]
    used = ["Leaves", "check"]
    text = "\n".join(body)
    used += [name for name in ("apply", "functions", "tune") if re.search(rf"\b{name}[(.]", text)]
    head = ['"""' + what.replace("\\", "\\\\").replace('"""', "'''") + '"""', ""] if what else []
    environ = {k: v for k, v in sorted(os.environ.items()) if k in _ENVIRONMENT}
    if environ:
        head += ["import os", "", *[f"os.environ.setdefault({k!r}, {v!r})" for k, v in environ.items()], ""]
    head += [
        "import opweave as ow",
        *(["import opweave_combined"] if combined else []),
        f"from opweave_conformance.fuzz import {', '.join(sorted(used))}",
        "",
    ]
    return "\n".join([*head, text, ""])


_ENVIRONMENT: Final = ("OPWEAVE_CPU_DEVICES", "OPWEAVE_OPENCL_DEVICES", "OPWEAVE_TORCH_SEPARATE", "OPWEAVE_BACKENDS",
                       "OPWEAVE_BACKEND_PATH", "OPWEAVE_COMBINE")  # fmt: skip
"""Variables that say which devices there are."""


def lines_of(graph: Drawn) -> list[str]:
    """The statements that make a graph and check it."""
    lines = []
    if graph.largest:
        lines += [*_made(with_lengths(graph, dict(graph.largest))), f"largest = {_outputs(graph)}"]
    lines += _made(graph)
    extra = ""
    if graph.pins:
        extra += ", pins={" + ", ".join(f"t{i}: {device!r}" for i, device in graph.pins) + "}"
    for name, default in (("precision", "exact"), ("runs", 1), ("how", "run")):
        value = getattr(graph, name)
        if value != default:
            extra += f", {name}={value!r}"
    extra += ", largest=largest" if graph.largest else ""
    lines.append(f"check(scheduler, leaves, {_outputs(graph)}{extra})")
    return lines


def _made(graph: Drawn) -> list[str]:
    lines = ["leaves = Leaves()"]
    for i, entry in enumerate(graph.entries):
        lines.append(f"t{i} = {_leaf(i, entry) if isinstance(entry, LeafEntry) else _node(entry)}")
    return lines


def _outputs(graph: Drawn) -> str:
    return "(" + "".join(f"t{i}, " for i in graph.outputs) + ")"


def with_lengths(graph: Drawn, lengths: Mapping[int, int]) -> Drawn:
    """The graph with axes of other lengths, old -> new, in leaves, views and what nodes are given. Nothing says that it
    can be built."""
    entries: list[Entry] = []
    for entry in graph.entries:
        if isinstance(entry, LeafEntry):
            shape = tuple([lengths.get(n, n) for n in entry.shape])
            high = min(entry.high, lengths.get(entry.high, entry.high))  # ids of other runs have to fit too
            entries.append(entry._replace(shape=shape, high=high))
        else:
            named = {name: _replaced(value, lengths) if name in SIZES else value for name, value in entry.attrs.items()}
            entries.append(entry._replace(attrs=named))
    return graph._replace(entries=tuple(entries))


SIZES: Final = frozenset({"shape", "key", "size", "n"})
"""Attributes that are lengths of axes."""


def _replaced(value: Any, lengths: Mapping[int, int]) -> Any:
    if isinstance(value, tuple):
        return tuple([_replaced(v, lengths) for v in value])
    return lengths.get(value, value) if type(value) is int else value


def _leaf(i: int, leaf: LeafEntry) -> str:
    if leaf.kind == "number":
        return f"leaves.number({leaf.values}, {leaf.dtype!r})"
    code = f"leaves.{leaf.kind}('x{i}', {literal(leaf.shape)}, {leaf.dtype!r}"
    for name, default in (("values", "normal"), ("high", 0), ("seed", 0), ("device", "")):
        value = getattr(leaf, name)
        if value != default:
            code += f", {name}={value!r}"
    return code + ")"


def _node(entry: NodeEntry) -> str:
    srcs = [f"t{s}" for s in entry.srcs]
    attrs = entry.attrs
    match entry.op:
        case "reshape" | "broadcast_to":
            return f"{srcs[0]}.{entry.op}({literal(attrs['shape'])})"
        case "transpose":
            return f"{srcs[0]}.transpose({literal(attrs['axes'])})"
        case "slice":
            return f"{srcs[0]}[{', '.join(map(_key, attrs['key']))}]"
        case "diagonal":
            return f"ow.diagonal({srcs[0]}, {literal(attrs['offset'])})"
        case "custom":
            like = literal((attrs["shape"], attrs["dtype"]))
            return f"ow.custom(functions.{', '.join([attrs['fn'].__name__, *srcs])}, like={like})"
    named = [f"{name}={literal(value)}" for name, value in attrs.items()]
    return f"apply({', '.join([repr(entry.op), *srcs, *named])})"


def _key(part: Any) -> str:
    """One axis of a slice, as in NumPy."""
    if isinstance(part, int):
        return str(part)
    if part is None:
        return "None"
    start, stop, step = part
    return f"{start}:{stop}" + (f":{step}" if step != 1 else "")


def renumbered(
    entries: Sequence[Entry], outputs: Sequence[int]
) -> tuple[tuple[Entry, ...], tuple[int, ...], dict[int, int]]:
    """The entries that ``outputs`` need, numbered anew: with the outputs' numbers, and old -> new ones."""
    needed: set[int] = set()
    stack = list(outputs)
    while stack:
        i = stack.pop()
        if i not in needed:
            needed.add(i)
            entry = entries[i]
            stack += entry.srcs if isinstance(entry, NodeEntry) else ()
    new = {old: number for number, old in enumerate(sorted(needed))}
    kept: list[Entry] = []
    for old in sorted(needed):
        entry = entries[old]
        if isinstance(entry, NodeEntry):
            entry = entry._replace(srcs=tuple([new[s] for s in entry.srcs]))
        kept.append(entry)
    return tuple(kept), tuple([new[o] for o in outputs]), new


def literal(value: Any) -> str:
    """The value of an attribute as a Python expression, in which opweave is ``ow``; raises `SchedulerError` for one
    that has none, as a function."""
    if isinstance(value, DType):
        return f"ow.as_dtype({value.name!r})"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, slice):
        return f"slice({value.start!r}, {value.stop!r}, {value.step!r})"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return f"float({str(value)!r})"
    raise SchedulerError(f"the attribute {value!r}, which cannot be written into a script")
