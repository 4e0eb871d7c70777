"""The facts in the definition of a third party's operation decide how it is predicted, measured, tested and computed in
half types."""

# mypy: disable-error-code="union-attr, attr-defined"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.graph.opdef import OPS, Example, Limits, OpDef, Sample
from opweave.graph.tensor import input as leaf
from opweave.graph.tensor import node
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.place.precision import precisions_of
from opweave_conformance import cases_for, limits, run_case
from opweave_conformance.case import LAYOUTS
from opweave_conformance.levels.operations import third_party_checks
from opweave_cost.cost_model import Curve, OpCost, Profile
from opweave_cost.measure import measure
from tests.support.devices import Plain


@pytest.fixture
def define(monkeypatch):
    def enter(**facts) -> OpDef:
        op = OpDef("acme_gram", infer=_infer, reference=_reference, flops=_flops, **facts)
        monkeypatch.setitem(OPS, op.name, op)
        return op

    return enter


def _flops(out):
    return 2 * out.size * out.srcs[0].shape[1]


def _infer(x):
    return (x.shape[0], x.shape[0]), x.dtype


def _reference(x):
    x = np.asarray(x, np.float64)
    return x @ x.T


def gram(x):
    return node(OPS["acme_gram"], (x,), {})


def samples():
    def nodes(dtype):
        return [gram(leaf(f"gram{n}", (n, n), dtype)) for n in (4, 32, 128)]

    yield Sample("f32", lambda: nodes("f32"), lambda: nodes("f32"))
    yield Sample("f16", lambda: nodes("f16"))


class Acme(Plain):
    """Its kernel for the operation is off by a given factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__("acme")

        @self.kernels("acme_gram", dtypes="f32 f16")
        def kernel(stream, op, out, x):
            def run():
                with np.errstate(all="ignore"):
                    np.copyto(out.view, OPS[op].reference(x.view) * factor, casting="unsafe")

            return run


def test_it_is_measured_by_its_samples(define):
    define(samples=samples, product=True)
    measured = measure(Acme())
    assert set(measured.costs["acme_gram"]) == {"f32", "f16"}
    cost = measured.costs["acme_gram"]["f32"]
    assert cost.by_flops is not None
    assert len(cost.by_bytes.points) > 1


def test_without_a_measurement_it_costs_what_it_runs_like(define):
    def line(seconds):
        return {"f32": OpCost(Curve.line(seconds, float("inf")))}

    costs = {"add": line(1.0), "linear": line(7.0), "exp": line(3.0)}
    profile = Profile("d", 0.0, Curve.line(0, 1), Curve.line(0, 1), costs)
    define(runs_like="matmul")
    assert profile.step("acme_gram", "f32", 100, 100) == 7.0, "matmul was not measured, and runs like linear"
    define()
    assert profile.step("acme_gram", "f32", 100, 100) == 1.0
    define(runs_like="acme_gram")
    assert profile.step("acme_gram", "f32", 100, 100) == 1.0, "a circle ends"


def test_its_cost_decides_where_it_runs(define):
    op = define(runs_like="exp")
    fast, slow = Acme(), Acme()
    fast.name, slow.name = "fast", "slow"
    for device, seconds in ((fast, 1e-6), (slow, 1.0)):
        costs = {"add": {"f32": OpCost(Curve.line(1e-3, 1e12))}, "exp": {"f32": OpCost(Curve.line(seconds, 1e12))}}
        profile = Profile(device.name, 0.0, Curve.line(0, 1e9), Curve.line(0, 1e9), costs)
        device.declared = lambda profile=profile: profile
    y = node(op, (leaf("costed", (8, 8)),), {})
    with ow.Scheduler([slow, fast], placement="cost") as scheduler:
        assert scheduler.partition(y).device_of(y) is fast


def test_conformance_judges_it_by_its_own_limits(define):
    define(samples=samples)
    cases = cases_for("acme_gram")
    assert {c.operands[0].dtype for c in cases} == {"f32", "f16"}
    assert any(o.values == "special" for c in cases for o in c.operands)
    device = Acme()
    assert [r.reason for r in (run_case(device, c) for c in cases) if r.status != "passed"] == []
    off = Acme(1.001)
    assert {run_case(off, c).status for c in cases if c.operands[0].dtype == "f32"} == {"failed"}
    define(samples=samples, limits={"f32": Limits(1e-4, 1e-2)})
    assert {run_case(off, c).status for c in cases_for("acme_gram") if c.operands[0].dtype == "f32"} == {"passed"}


def test_examples_are_cases_in_all_shapes_and_layouts(monkeypatch):
    def cube(x):
        return np.asarray(x, np.float64) ** 3

    examples = (Example("f32 f16"), Example("i32", values="ties", tag="whole"))
    facts: dict[str, Any] = {"infer": lambda x: (x.shape, x.dtype), "reference": cube, "pointwise": True, "sources": 1}
    monkeypatch.setitem(OPS, "acme_cube", OpDef("acme_cube", examples=examples, **facts))
    assert OPS["acme_cube"].dtypes.split() == ["f32", "f16", "i32"]
    cases = cases_for("acme_cube")
    assert {c.operands[0].dtype for c in cases} == {"f32", "f16", "i32"}
    assert {c.operands[0].layout for c in cases} == {"contiguous", *LAYOUTS}
    assert {c.id.endswith("ties-whole") for c in cases if c.operands[0].dtype == "i32"} == {True}
    assert {run_case(HostDevice(), c).status for c in cases} == {"passed"}
    monkeypatch.setitem(OPS, "acme_cube", OpDef("acme_cube", examples=(Example("f32", values="odd"),), **facts))
    with pytest.raises(ow.UnknownNameError, match="acme_cube"):
        cases_for("acme_cube")


def test_limits_come_from_the_definition(define):
    x, half = leaf("limited", (4, 4)), leaf("limited half", (4, 4), "f16")
    define()
    plain, plain_half = limits(gram(x)), limits(gram(half))
    define(slack=3.0)
    assert limits(gram(x)) == pytest.approx((9 * plain.nmse, 3 * plain.error))
    assert limits(gram(half)) == plain_half, "half types are rounded once at the end"
    define(exact=True)
    assert limits(gram(x)) == (0, 0)
    define(limits={"f16": Limits(1.0, 2.0)})
    assert limits(gram(half)) == (1.0, 2.0)
    assert limits(gram(x)) == plain


def test_without_a_word_on_nan_none_are_tried(define):
    define(samples=samples, nan=False)
    assert not any(o.values == "special" for c in cases_for("acme_gram") for o in c.operands)


def test_the_suite_asks_devices_that_list_it(define):
    define(samples=samples)
    ids = [check.id for check in third_party_checks([Acme()])]
    assert ids[0] == "listed-acme_gram"
    assert len(ids) == 1 + len(cases_for("acme_gram"))
    assert list(third_party_checks([Plain()])) == []


@pytest.mark.parametrize("product", [True, False])
def test_only_products_may_be_computed_less_than_exactly(define, product: bool):
    define(product=product)
    made = gram(leaf("narrowed", (4, 4)))
    assert precisions_of([made], (("*", "bf16"),)) == ({made: "bf16"} if product else {})
    own = define(rough={"int8": Limits(1e-3, 0.5)}, product=product)
    assert own.rough == {"int8": (1e-3, 0.5)}
