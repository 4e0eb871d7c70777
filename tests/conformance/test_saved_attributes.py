"""Attributes of saved graphs are checked as builders check them: nodes of all operations load as they were saved, and
with other attributes they are refused, or the references compute them."""

# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.graph.attribute_rules import check_attributes
from opweave.graph.container import pack, unpack
from opweave.graph.graph import Graph
from opweave.graph.opdef import OPS
from opweave_conformance.cases import CASES
from opweave_conformance.fuzz.samples import evaluate
from opweave_conformance.values import leaf_values

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, -7, 1 << 40, 0.5, 1e308, {"float": "nan"}, {"float": "inf"}, "", "f64", "edge",
    "nearest", [], [0], [-1], [1, 2], [0, 0], [[0, 1], [0, 1]], [1 << 40], {"dtype": "q8_0"}, {"dtype": "i32"},
]  # fmt: skip

SLOW = "iterations"
"""An attribute of which builders take any number; a large one takes long."""


def nodes_of(case):
    return [t for t in Graph(case.build(*case.tensors())).nodes if not t.is_view and t.op.name == case.op]


BY_OPERATION: dict[str, list[Any]] = {}
for _case in CASES:
    BY_OPERATION.setdefault(_case.op, []).append(_case)


def mutations(attrs):
    """Attributes of which one is missing, unknown, or has another value at one place."""
    yield {**attrs, "unknown": 1}
    for name, old in attrs.items():
        yield {k: v for k, v in attrs.items() if k != name}
        for new in VALUES:
            if name == SLOW and new == 1 << 40:
                continue
            yield {**attrs, name: new}
            if isinstance(old, list):
                yield from ({**attrs, name: [*old[:i], new, *old[i + 1 :]]} for i in range(len(old)))


@pytest.mark.parametrize("op", sorted(BY_OPERATION))
def test_what_builders_make_is_taken(op):
    for case in BY_OPERATION[op]:
        for tensor in Graph(case.build(*case.tensors())).nodes:
            check_attributes(tensor.op, tensor.attrs, tensor.srcs)


@pytest.mark.parametrize("op", sorted(BY_OPERATION.keys() - {"custom"}))
def test_what_builders_do_not_make_is_refused(op):
    rng, kinds = np.random.default_rng(0), set()
    for case in BY_OPERATION[op]:
        found = nodes_of(case)
        kind = tuple((name, type(value)) for t in found for name, value in t.attrs.items())
        if kind in kinds or not found or found[-1].size > 5000 or len(kinds) >= 3:
            continue
        kinds.add(kind)
        xs = case.tensors()
        header, _ = unpack(Graph(case.build(*xs)).to_bytes())
        row = next(r for r in header["tensors"] if r.get("op") == op)
        known = {t.name: v for t, v in leaf_values(rng, case.operands, xs).items()}
        for attrs in mutations(dict(row["attrs"])):
            row_attrs, row["attrs"] = row["attrs"], attrs
            try:
                graph = Graph.from_bytes(pack(header, []))
            except (ow.FormatError, ow.ShapeError, ow.DTypeError, ow.BoundsError, ow.LayoutError):
                continue
            finally:
                row["attrs"] = row_attrs
            if all(t.size < 1 << 18 for t in graph.nodes):
                values = {t: [known.get(t.name, t.leaf.data)] for t in graph.leaves}
                evaluate(graph.nodes, values, rng, {}, 1)  # raises what references raise


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("conv2d", {"dilation": [0, 1]}), ("argsort", {"axis": 7}), ("flip", {"axes": [0, 0]}),
        ("softmax", {"scale": True}), ("max_pool1d", {"ceil_mode": 1}), ("elu", {"beta": 1.0}),
        ("geglu", {"approximate": "erf"}), ("roll", {"shifts": [1]}), ("pad", {"mode": "nearest"}),
    ],
)  # fmt: skip
def test_what_kernels_rely_on_is_named_by_the_error(op, change):
    case = BY_OPERATION[op][0]
    header, _ = unpack(Graph(case.build(*case.tensors())).to_bytes())
    row = next(r for r in header["tensors"] if r.get("op") == op)
    row["attrs"] |= change
    with pytest.raises(ow.FormatError, match=rf"{op} (cannot have|has no) (the )?attribute '?{next(iter(change))}"):
        Graph.from_bytes(pack(header, []))


def test_attributes_of_third_parties_are_checked_by_their_types():
    name = "tests.attributes_of_third_parties"
    op = OPS.get(name) or ow.define_op(
        ow.OpDef(name, infer=lambda x, *, axis: (x.shape, x.dtype), reference=lambda x, *, axis: x)
    )
    x = ow.input("x", (3,))
    check_attributes(op, {"axis": "a name of its own"}, (x,))
    for attrs in ({}, {"axis": 0, "other": 1}):
        with pytest.raises(ow.FormatError, match="attribute"):
            check_attributes(op, attrs, (x,))
