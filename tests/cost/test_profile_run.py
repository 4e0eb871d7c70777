"""`opweave_cost.profile_run`: how long each part of a run takes, on devices that work at once and
on those that work later."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.contract import Arg, Call
from opweave.contract.kernels import KernelTable
from opweave.tracing import TRACE
from opweave_cost.cost_model import ANY, Curve, OpCost, Profile
from tests.core.scheduler.test_fusing import Fusing
from tests.core.scheduler.test_report import Page
from tests.support.async_device import AsyncDevice, ThreadStream
from tests.support.devices import BASIC, Plain, Separate, reference_kernel

F = np.float32
SLOW, QUICK = 0.02, 0.001


class Sleeping(Plain):
    """Its negations take 20 ms."""

    kernels = KernelTable("f32", "strided")

    def __init__(self) -> None:
        super().__init__("sleeping")
        self.kernels = type(self).kernels


@Sleeping.kernels("neg", "exp", "add")
def takes_long(stream: ow.Stream, op: str, out: Arg, *srcs: Arg, **attrs: object) -> Call:
    compute = reference_kernel(stream, op, out, *srcs, **attrs)

    def call() -> None:
        time.sleep(SLOW if op == "neg" else 0)
        compute()

    return call


def rows_of(profile, kind="step"):
    return [row for row in profile.rows if row.kind == kind]


def test_a_compiled_function_is_measured_with_its_arguments():
    @ow.compile(devices="host")
    def f(x, y):
        return ow.exp(x) + y

    x, y = np.zeros((2, 3), F), np.ones(3, F)
    for feeds, named in (((x, y), {}), ({"x": x}, {"y": y}), (None, {"x": x, "y": y})):
        profile = opweave_cost.profile_run(f, feeds, **named, runs=1, limits=False)
        assert [row.ops for row in rows_of(profile)] == [("exp",), ("add",)]
    v = ow.input("v", (4,))
    assert rows_of(opweave_cost.profile_run(ow.compile(ow.neg(v), devices="host"), v=np.ones(4, F), limits=False))[
        0
    ].ops == ("neg",)


def test_every_part_of_a_run_is_a_row_in_order():
    x, w = ow.input("x", (8, 16)), ow.constant(np.ones((4, 16), F))
    with ow.scope("first"):
        y = ow.linear(x, w)
    with ow.scope("second"):
        z = ow.exp(y)
    with ow.Scheduler([Separate("a"), Separate("b")]) as scheduler:
        program = scheduler.build(z, pins={y: "a", z: "b"})
        profile = opweave_cost.profile_run(program, {"x": np.ones((8, 16), F)}, runs=3, limits=False)
    assert [(row.kind, row.name, row.device, row.ops, row.split) for row in profile.rows] == [
        ("input", "x", "a", (), None),
        ("step", "first/linear", "a", ("linear",), 0),
        ("copy", "first/linear", "b", (), 1),
        ("step", "second/exp", "b", ("exp",), 1),
        ("output", "second/exp", "b", (), None),
    ]
    assert [row.nbytes for row in profile.rows] == [512, 4 * (8 * 16 + 4 * 16 + 8 * 4), 128, 256, 128]
    assert profile.rows[1].flops == 2 * 8 * 16 * 4
    assert profile.rows[2].note == "a -> b (transfer)"
    assert all(row.seconds > 0 and row.least is None for row in profile.rows)
    assert sum(row.share for row in profile.rows) == pytest.approx(1)
    assert len(profile.runs) == 3


def test_times_are_those_of_the_steps_and_tables_their_sums():
    x = ow.input("of scopes", (4,))  # a name of its own: equal nodes keep the scope of the first
    y = x
    for layer in ("one", "two"):
        with ow.scope(layer):
            y = ow.exp(ow.neg(y))
    with ow.Scheduler(Sleeping()) as scheduler:
        profile = opweave_cost.profile_run(scheduler.build(y), {x: np.ones(4, F)}, runs=2, limits=False)
    slow, quick = [r for r in rows_of(profile) if r.ops == ("neg",)], [r for r in rows_of(profile) if r.ops == ("exp",)]
    assert all(row.seconds > SLOW for row in slow)
    assert all(row.seconds < SLOW / 2 for row in quick)
    first = profile.operations[0]
    assert (first.name, first.count) == ("neg", 2)
    assert first.seconds == pytest.approx(sum(row.seconds for row in slow))
    scopes = {total.name: total for total in profile.scopes()}
    assert set(scopes) == {"one", "two", "-"}
    assert scopes["one"].seconds == pytest.approx(slow[0].seconds + quick[0].seconds)
    assert profile.seconds > 2 * SLOW
    assert "neg" in profile
    assert "one" in profile


def test_work_that_is_queued_counts_until_it_is_done():
    x = ow.input("x", (4,))
    with ow.Scheduler(AsyncDevice("later")) as scheduler:
        program = scheduler.build(ow.neg(x) * x + x)
        profile = opweave_cost.profile_run(program, x=np.ones(4, F), runs=2, limits=False)
    delay = ThreadStream(AsyncDevice("other")).delay
    assert len(profile.rows) == 5
    assert all(delay <= row.seconds < 5 * delay for row in profile.rows if row.kind != "output")


class Timing(AsyncDevice):
    """A device that reports the times of its kernels, by a clock after which each takes a second."""

    def _open(self, **params):
        stream: Any = super()._open(**params)
        stream.done = []
        if TRACE.listening:
            stream.later = lambda work: partial(self._later, stream, work)
            stream._synchronize = partial(self._finish, stream)
        return stream

    def _later(self, stream, work):
        stream.enqueue(work)
        stream.done.append(work)

    def _finish(self, stream):
        type(stream)._synchronize(stream)
        while stream.done:
            stream.done.pop()
            TRACE.emit("kernel", "work", 0, 1_000_000_000, device=self.name)


def test_times_of_the_devices_clock_are_believed_however_the_program_was_made():
    x = ow.input("x", (4,))
    device = Timing("timing")
    with ow.Scheduler([device.open()]) as scheduler:
        profile = opweave_cost.profile_run(scheduler.build(ow.neg(x) * x), x=np.ones(4, F), runs=2, limits=False)
    assert [row.seconds for row in rows_of(profile)] == [1, 1]


def test_a_fused_group_is_one_row_without_the_bytes_that_stay_inside():
    x = ow.input("x", (64, 64))
    with ow.Scheduler(Fusing("g")) as scheduler:
        program = scheduler.build(ow.relu(ow.exp(x) * 2.0) @ x)
        profile = opweave_cost.profile_run(program, x=np.ones((64, 64), F), runs=1, limits=False)
    group, product = rows_of(profile)
    assert (group.ops, product.ops) == (("exp", "scale", "relu"), ("matmul",))
    assert (group.nbytes, product.nbytes) == (2 * 64 * 64 * 4, 3 * 64 * 64 * 4)
    assert [total.name for total in profile.operations if "+" in total.name] == ["exp+scale+relu"]


def test_weights_that_are_fetched_are_rows_with_the_bytes_that_moved():
    table = ow.weights({"table": np.ones((16, 8), F)}, device="host")["table"]
    ids = ow.input("ids", (3,), "i32")
    fast = Separate("fast", [*BASIC, "embedding"], offload=["embedding"])
    fast.kernels = KernelTable("f32 i32", "strided")
    fast.kernels("embedding")(reference_kernel)
    with ow.Scheduler([fast, "host"]) as scheduler:
        program = scheduler.build(ow.embedding(table, ids))
        profile = opweave_cost.profile_run(program, ids=np.array([1, 2, 9], np.int32), runs=1, limits=False)
    (fetch,) = rows_of(profile, "copy")
    assert fetch.note == "host -> fast (weight-fetch)"
    assert fetch.nbytes == 3 * 8 * 4


def test_states_of_blocks_keep_their_values():
    cache, row = ow.state("profiled_blocks", (2, 32), "q8_0"), ow.input("row", (1, 32))
    program = ow.Scheduler("host").build(ow.index_copy(cache, np.array([1]), row))
    program.run(row=np.full((1, 32), 3, F))
    before = program.read(cache)
    opweave_cost.profile_run(program, {"row": np.full((1, 32), 5, F)}, runs=1, limits=False)
    np.testing.assert_array_equal(program.read(cache), before)


def test_states_keep_their_values():
    total, x = ow.state("total", (4,)), ow.input("x", (4,))
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.assign(total, total + x))
        program.run(x=np.ones(4, F))
        opweave_cost.profile_run(program, x=np.ones(4, F), runs=2, limits=False)
        np.testing.assert_array_equal(program.read("total"), np.ones(4, F))


def test_limits_are_the_roofline_of_the_devices_profile(monkeypatch):
    adds, products = Curve.line(1e-6, 1e9), Curve.line(1e-6, 1e12)
    made = Profile("host", 1e-6, adds, adds, {"add": {ANY: OpCost(adds)}, "linear": {ANY: OpCost(adds, products)}})
    monkeypatch.setattr("opweave_cost.run_parts.profile", lambda device: made)
    x = ow.input("x", (64, 64))
    with ow.Scheduler("host") as scheduler:
        values = np.ones((64, 64), F)
        program = scheduler.build(ow.linear(ow.neg(x), ow.constant(values)))
        profile = opweave_cost.profile_run(program, {x: values}, runs=1)
    neg, linear = rows_of(profile)
    assert neg.least == pytest.approx(2 * 64 * 64 * 4 / 1e9)
    assert linear.least == pytest.approx(max(3 * 64 * 64 * 4 / 1e9, 2 * 64**3 / 1e12))
    assert neg.of_limit == pytest.approx(neg.least / neg.seconds)


def test_overlapping_schedulers_and_other_traces_are_measured_alike():
    x = ow.input("x", (4,))
    with ow.Scheduler([Sleeping(), "host"], parallel=True) as scheduler, opweave_cost.trace(steps=True):
        profile = opweave_cost.profile_run(scheduler.build(ow.neg(x)), x=np.ones(4, F), runs=1, limits=False)
    (row,) = rows_of(profile)
    assert row.seconds > SLOW


def test_the_page_shows_every_row_and_needs_nothing_else(tmp_path):
    x = ow.input("x", (4,))
    with ow.Scheduler("host") as scheduler, ow.scope("<part>"):
        profile = opweave_cost.profile_run(scheduler.build(ow.exp(ow.neg(x))), x=np.ones(4, F), runs=1, limits=False)
    profile.save(tmp_path / "profile.html")
    page = Page()
    page.feed((tmp_path / "profile.html").read_text())
    assert not page.open
    assert len(page.rows["node"]) == 2
    assert len(page.rows["copy"]) == 2
    assert set(page.links) <= page.ids
    assert "<iframe" in profile._repr_html_()
    assert json.loads(json.dumps(profile.dicts()))[1]["bytes_per_second"] == profile.rows[1].bytes_per_second


def test_what_is_no_program_or_no_number_of_runs():
    x = ow.input("x", (4,))
    with pytest.raises(ow.SchedulerError, match="or a compiled function, not function"):
        opweave_cost.profile_run(lambda x: x, x=np.ones(4, F))  # type: ignore[arg-type]
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.neg(x))
        for runs in (0, 2.5):
            with pytest.raises(ow.SchedulerError, match="at least 1"):
                opweave_cost.profile_run(program, x=np.ones(4, F), runs=runs)  # type: ignore[arg-type]
        with pytest.raises(ow.UnknownNameError):
            opweave_cost.profile_run(program, y=np.ones(4, F), x=np.ones(4, F))


def test_a_step_that_fails_is_named_and_leaves_the_program_usable():
    x = ow.input("x", (4,))
    failing = [False]

    def sometimes(values):
        if failing[0]:
            raise RuntimeError("out of paper")
        return values

    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.neg(ow.custom(sometimes, x, like=x).named("printer")))
        failing[0] = True
        with pytest.raises(ow.ExecutionError, match=r"printer.*out of paper"):
            opweave_cost.profile_run(program, x=np.ones(4, F), limits=False)
        failing[0] = False
        np.testing.assert_array_equal(program.run(x=np.ones(4, F)), -np.ones(4, F))
