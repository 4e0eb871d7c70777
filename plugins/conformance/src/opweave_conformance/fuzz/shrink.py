"""`shrink`: makes an example that fails as small as it can be while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from opweave.errors import OpweaveError
from opweave_conformance.fuzz.draw import resized, tensors_of
from opweave_conformance.fuzz.example import (
    Drawn,
    Entry,
    Example,
    LeafEntry,
    NodeEntry,
    renumbered,
    script,
)

__all__ = ["shrink"]


def shrink(example: Example, fails: Callable[[Example], bool], seconds: float) -> Example:
    """The smallest example that was found to fail too within ``seconds``. Nothing is tried twice."""
    end, tried, smaller = perf_counter() + seconds, {script(example)}, True
    while smaller:
        smaller = False
        for candidate in _smaller(example):
            text = script(candidate)
            if text in tried:
                continue
            if perf_counter() > end:
                return example
            tried.add(text)
            if fails(candidate):
                example, smaller = candidate, True
                break
    return example


def _smaller(example: Example) -> Iterator[Example]:
    """Smaller examples, first those with which most is gone."""
    plain = tuple([_plain(graph) for graph in example.graphs])
    for graphs in (plain, example.graphs):
        for graph in graphs:
            yield Example((graph,), example.devices)
    yield Example(plain, example.devices)
    for i in range(len(example.graphs) if len(example.graphs) > 1 else 0):
        yield example._replace(graphs=example.graphs[:i] + example.graphs[i + 1 :])
    for device in example.devices:
        yield _on(example, (device,))
    for i, graph in enumerate(example.graphs):
        for made in _smaller_graphs(graph):
            yield example._replace(graphs=(*example.graphs[:i], made, *example.graphs[i + 1 :]))
    for i in range(len(example.options)):
        yield example._replace(options=example.options[:i] + example.options[i + 1 :])
    yield example._replace(limits=())
    for i in range(len(example.limits)):
        yield example._replace(limits=example.limits[:i] + example.limits[i + 1 :])
    for i in range(len(example.devices) if len(example.devices) > 1 else 0):
        yield _on(example, example.devices[:i] + example.devices[i + 1 :])


def _plain(graph: Drawn) -> Drawn:
    """The graph run once in the ordinary way, with unplaced inputs for its leaves."""
    entries = [
        e._replace(kind="input" if e.kind in ("weight", "constant") else e.kind, device="", seed=0)
        if isinstance(e, LeafEntry)
        else e
        for e in graph.entries
    ]
    return Drawn(tuple(entries), graph.outputs)


def _on(example: Example, devices: tuple[str, ...]) -> Example:
    """The example on fewer devices."""
    graphs = []
    for graph in example.graphs:
        entries = [
            e._replace(device="") if isinstance(e, LeafEntry) and e.device not in devices else e for e in graph.entries
        ]
        pins = tuple([pin for pin in graph.pins if pin[1] in devices])
        graphs.append(graph._replace(entries=tuple(entries), pins=pins))
    return example._replace(
        devices=devices, graphs=tuple(graphs), limits=tuple([t for t in example.limits if t[0] in devices])
    )


def _smaller_graphs(graph: Drawn) -> Iterator[Drawn]:
    yield from _fewer_outputs(graph)
    yield graph._replace(pins=())
    yield graph._replace(how="run")
    yield graph._replace(largest=())
    yield graph._replace(runs=1)
    yield graph._replace(runs=min(graph.runs, 2))
    yield graph._replace(precision="exact")
    yield from _fewer_nodes(graph)
    yield from _plainer_leaves(graph)
    for n in sorted({n for e in graph.entries if isinstance(e, LeafEntry) for n in e.shape if n > 1}, reverse=True):
        for less in dict.fromkeys((1, 2, n // 4, n // 2, n - 1)):
            made = resized(graph, {n: less}) if 0 < less < n else None
            if made is not None:
                yield made


def _with(graph: Drawn, entries: list[Entry], outputs: tuple[int, ...]) -> Drawn:
    kept, numbers, new = renumbered(entries, outputs)
    return graph._replace(entries=kept, outputs=numbers, pins=tuple([(new[i], d) for i, d in graph.pins if i in new]))


def _fewer_outputs(graph: Drawn) -> Iterator[Drawn]:
    entries = list(graph.entries)
    if len(graph.outputs) > 1:
        for output in graph.outputs:
            yield _with(graph, entries, (output,))
        for i in range(len(graph.outputs)):
            yield _with(graph, entries, graph.outputs[:i] + graph.outputs[i + 1 :])
    for i, output in enumerate(graph.outputs):
        entry = entries[output]
        for source in entry.srcs if isinstance(entry, NodeEntry) else ():
            yield _with(graph, entries, (*graph.outputs[:i], source, *graph.outputs[i + 1 :]))
    for i, entry in enumerate(entries[:-1]):
        if isinstance(entry, NodeEntry) and (i,) != graph.outputs:
            yield _with(graph, entries, (i,))


def _fewer_nodes(graph: Drawn) -> Iterator[Drawn]:
    """With an input in place of a node, or a source of the same shape and dtype; the last nodes first."""
    try:
        tensors = tensors_of(graph)
    except OpweaveError:
        return  # the failure is that it cannot be built
    entries = list(graph.entries)
    for i in range(len(entries) - 1, -1, -1):
        entry, tensor = entries[i], tensors[i]
        if not isinstance(entry, NodeEntry):
            continue
        if i not in graph.outputs:
            for values in ("normal", "positive"):
                leaf = LeafEntry("input", tensor.shape, tensor.dtype.name, values, 0, 0)
                yield _with(graph, [*entries[:i], leaf, *entries[i + 1 :]], graph.outputs)
        for s in entry.srcs:
            source = tensors[s]
            if source.shape == tensor.shape and source.dtype is tensor.dtype:
                changed = [_redirected(e, i, s) for e in entries]
                yield _with(graph, changed, tuple([s if o == i else o for o in graph.outputs]))


def _redirected(entry: Entry, old: int, new: int) -> Entry:
    if isinstance(entry, NodeEntry) and old in entry.srcs:
        return entry._replace(srcs=tuple([new if s == old else s for s in entry.srcs]))
    return entry


def _plainer_leaves(graph: Drawn) -> Iterator[Drawn]:
    for i, leaf in enumerate(graph.entries):
        if not isinstance(leaf, LeafEntry) or leaf.kind == "number":
            continue
        plain = leaf._replace(kind="state" if leaf.kind == "state" else "input", device="", seed=0)
        for made in (plain, leaf._replace(device=""), leaf._replace(seed=0)):
            yield graph._replace(entries=(*graph.entries[:i], made, *graph.entries[i + 1 :]))
        if leaf.values != "ids":
            yield graph._replace(entries=(*graph.entries[:i], plain._replace(values="normal"), *graph.entries[i + 1 :]))
