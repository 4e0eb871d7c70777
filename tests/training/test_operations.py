"""The gradient of every operation against finite differences in f64, over the cases of conformance: their layouts,
broadcasts and options."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from zlib import crc32

import numpy as np
import pytest

import opweave as ow
from opweave.graph.graph import Graph
from opweave.graph.opdef import OPS
from opweave_conformance.case import Case
from opweave_conformance.cases import CASES
from opweave_conformance.values import make_values
from tests.support.evaluate import evaluate

PLAIN = ("normal", "positive", "negative", "fraction", "ids", "mask")
LARGEST = 700
"""Elements of all operands of a case that is tried."""


def in_f64(case: Case) -> Case:
    return case._replace(operands=tuple([o._replace(dtype="f64") if o.dtype == "f32" else o for o in case.operands]))


def tried() -> Iterator[Case]:
    for case in CASES:
        types = {o.dtype for o in case.operands}
        # acosh is a number from 1 on only.
        values = (*PLAIN, "large") if case.op == "acosh" else PLAIN
        plain = all(o.values in values for o in case.operands) and "mixed" not in case.id
        small = sum(prod(o.shape) for o in case.operands) <= LARGEST
        if (
            "f32" in types
            and not types & {"f16", "bf16", "f64"}
            and plain
            and small
            and case.op not in ("custom", "quantize")
        ):
            yield in_f64(case)


BY_OP: dict[str, list[Case]] = {}
for _case in tried():
    BY_OP.setdefault(_case.op, []).append(_case)


def values_of(case: Case, tensors, rng):
    """Random values of the leaves, and a direction for each of those that are floats."""
    values, directions = {}, {}
    for tensor, operand in zip(tensors, case.operands, strict=True):
        leaf = tensor.root
        values[leaf] = make_values(rng, operand, leaf.shape, leaf.dtype)
        if leaf.dtype.is_float:
            directions[leaf] = rng.standard_normal(leaf.shape)
    return values, directions


def check(case: Case) -> None:
    rng = np.random.default_rng(crc32(case.id.encode()))
    tensors = case.tensors()
    out = case.build(*tensors)
    if not out.dtype.is_float or out.dtype.name != "f64":
        return
    values, directions = values_of(case, tensors, rng)
    params = [leaf for leaf in directions if leaf in Graph(out).leaves]
    weights = rng.standard_normal(out.shape)
    finite = np.isfinite(evaluate(out, values))  # a frame of infinities is no part of the loss
    weights[~finite] = 0
    if not finite.any():
        return
    made = ow.gradients(out, params, ow.constant(weights, "f64"))
    known: dict = {}
    along = sum(float((evaluate(g, values, known) * directions[p]).sum()) for p, g in zip(params, made, strict=True))

    def loss(step: float) -> float:
        moved = {leaf: value + step * directions[leaf] if leaf in directions else value
                 for leaf, value in values.items()}  # fmt: skip
        return float((evaluate(out, moved)[finite] * weights[finite]).sum())

    # Factors divide angles of hundreds of turns; the others bend ever more towards 1.
    step = 1e-9 if "-factors" in case.id else 1e-7 if case.op in ("asin", "acos", "atanh") else 1e-6
    expected = (loss(step) - loss(-step)) / (2 * step)
    size = max(1.0, abs(expected), abs(loss(0.0)))
    assert along == pytest.approx(expected, abs=2e-7 * size * max(1, prod(out.shape) ** 0.5)), case.id


@pytest.mark.parametrize("op", sorted(BY_OP))
def test_agrees_with_finite_differences(op):
    assert BY_OP[op]
    for case in BY_OP[op]:
        check(case)


def test_every_operation_but_custom_has_one():
    assert [name for name, op in OPS.items() if op.gradient is None and op.family != "third-party"] == ["custom"]


VIEWS = {"reshape", "transpose", "slice", "broadcast_to", "diagonal", "after", "recompute"}


def test_every_operation_of_floats_is_tried():
    discrete = {"argmax", "argsort", "top_k", "count_equal", "arange", "full", "custom", "uniform", "normal"}
    discrete |= {"equal", "not_equal", "less", "less_equal", "quantize", "dequantize"}
    assert {n for n, op in OPS.items() if op.family != "third-party"} - set(BY_OP) <= discrete | VIEWS


@pytest.mark.parametrize("op", sorted(BY_OP))
def test_tensors_without_elements_have_gradients_without_elements(op):
    """Each case again with its first axis, then its last one, of length 0, as far as it can be built."""
    for case in BY_OP[op][:12]:
        if any(o.state for o in case.operands):
            continue
        for axis in (0, -1):
            operands = tuple([o._replace(shape=_emptied(o.shape, axis)) for o in case.operands])
            try:
                tensors = case._replace(operands=operands).tensors()
                out = case.build(*tensors)
                values = {t.root: np.zeros(t.root.shape, t.root.dtype.numpy) for t in tensors}
                evaluate(out, values)
            except (ow.OpweaveError, ValueError, ZeroDivisionError):
                continue  # its options belong to the case's own size
            if not out.dtype.is_float:
                continue
            leaves = [t.root for t in tensors if t.root.dtype.is_float and t.root in Graph(out).leaves]
            for leaf, grad in zip(leaves, ow.gradients(out, leaves, 1.0), strict=True):
                assert grad.shape == leaf.shape
                assert not np.any(np.nan_to_num(evaluate(grad, values))) or out.size


def _emptied(shape, axis):
    lengths = list(shape)
    if lengths:
        lengths[axis] = 0
    return tuple(lengths)
