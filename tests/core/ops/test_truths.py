"""Every reference in every type that its operation takes, against a truth worked out apart from it.

References compute in f64 and round once: from operands as they are given, the result is the nearest number of the
type, up to what f64 loses. Integers are exact and wrap around.
"""

# mypy: disable-error-code="arg-type, union-attr"

from __future__ import annotations

import zlib

import numpy as np
import pytest

from opweave.errors import DTypeError
from opweave.graph.dtypes import as_dtype
from opweave.graph.graph import Graph
from opweave.graph.leaf import Leaf
from opweave.graph.opdef import OPS
from opweave.graph.tensor import new_leaf
from opweave_conformance.cases import CASES
from tests.support.evaluate import evaluate
from tests.support.truths import PLAIN, TABLE, Truth, cases, exact, values_of

ULP = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Half a unit in the last place of numbers between 1 and 2."""
SMALLEST = {"f64": 0.0, "f32": 2.0**-150, "f16": 2.0**-25, "bf16": 2.0**-134}
"""Half a unit of subnormal numbers."""


def built(truth: Truth, dtype: str, rng: np.random.Generator):
    """The result tensor, the values of its leaves, and the operands without loss."""
    leaves, tensors, operands = {}, [], []
    for i, operand in enumerate(truth.operands):
        name, values = values_of(rng, operand, dtype)
        kind = "state" if operand.state else "weight" if as_dtype(name).is_quantized else "input"
        leaf = new_leaf(Leaf(kind, f"x{i}"), operand.shape, as_dtype(name))
        leaves[leaf] = values
        tensors.append(leaf)
        operands.append(exact(values, name))
    return truth.build(*tensors), leaves, operands


def evaluated(result, leaves):
    (step, *casts) = [t for t in reversed(Graph(result).nodes) if not t.is_view]
    if not any(source.dtype.is_quantized for source in step.srcs):
        return evaluate(result, leaves)
    # Blocks are no arrays of elements: the windows of them are every row, or every other one.
    assert not casts
    arrays = []
    for source in step.srcs:
        raw = leaves.get(source.root)
        if source.dtype.is_quantized:
            arrays.append(raw if source.shape[0] == len(raw) else raw[::2])
        else:
            arrays.append(evaluate(source, leaves))
    return np.asarray(step.op.reference(*arrays, **step.attrs)).astype(result.dtype.numpy)


@pytest.mark.parametrize(("op", "dtype"), list(cases()), ids=lambda v: v)
def test_a_reference_is_the_truth_rounded_once(op: str, dtype: str):
    rng = np.random.default_rng(zlib.crc32(f"{op}{dtype}".encode()))
    for truth in TABLE:
        if truth.op != op or dtype not in truth.dtypes:
            continue
        result, leaves, operands = built(truth, dtype, rng)
        steps = [t for t in Graph(result).nodes if not t.is_view]
        assert [t.op.name for t in steps if t.op.name != "cast"] == [op] or op == "cast"
        with np.errstate(all="ignore"):
            want = np.asarray(truth.truth(*operands))
        got = evaluated(result, leaves)
        assert got.shape == want.shape
        compare(got, want, result.dtype, truth.scale)


def compare(got, want, dtype, scale):
    if not dtype.is_float:
        if dtype.is_integer:
            bits = 8 * dtype.itemsize
            want = np.array([int(v) % (1 << bits) for v in want.ravel()], object).reshape(want.shape)
            got = got.astype(object) % (1 << bits)
        np.testing.assert_array_equal(got, want)
        return
    name = dtype.name
    got, want = got.astype(np.float64).astype(np.longdouble), want.astype(np.longdouble)
    largest = float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0))
    with np.errstate(all="ignore"):
        unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-300)))) * ULP[name]
    # The last factor: from f64 to bf16 NumPy goes by way of f32, which moves a tie now and then.
    bound = np.maximum(unit, SMALLEST[name]) * (1 + 2.0**-12) + 1e-14 * scale * largest
    wrong = ~((np.abs(got - want) <= bound) | (got == want) | (np.isnan(got) & np.isnan(want)))
    assert not wrong.any(), (
        f"{got[wrong][:4]} is not {want[wrong][:4]}, within {np.broadcast_to(bound, want.shape)[wrong][:4]}"
    )


def test_every_operation_has_a_truth():
    named = {op.name for op in OPS.values() if not op.is_view and op.family != "third-party"}
    assert named == {truth.op for truth in TABLE}


@pytest.mark.parametrize("op", sorted({truth.op for truth in TABLE}))
def test_every_type_that_an_operation_takes_has_a_truth(op: str):
    taken = set()
    for truth in TABLE:
        # Where the operands' types are all given, the result's is what is tried.
        if truth.op != op or all(operand.dtype for operand in truth.operands):
            continue
        for dtype in PLAIN:
            try:
                result, _, _ = built(truth, dtype, np.random.default_rng(0))
            except DTypeError:
                continue
            # An operand that is cast first is taken in the other type.
            if {t.op.name for t in Graph(result).nodes if not t.is_view} == {op}:
                taken.add(dtype)
    covered = {dtype for t in TABLE if t.op == op for dtype in t.dtypes}
    assert taken <= covered


def test_devices_are_judged_in_every_type_too():
    cases: dict[str, set[str]] = {}
    for case in CASES:
        (step,) = [t for t in Graph(case.build(*case.tensors())).nodes if not t.is_view]
        cases.setdefault(case.op, set()).update(t.dtype.name for t in (step, *step.srcs))
    for truth in TABLE:
        assert set(truth.dtypes) <= cases[truth.op], truth.op
