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
from opweave.contract import Arg, Call, Group
from opweave.contract.kernels import KernelTable
from opweave.graph.precision import Precision
from opweave.tracing import TRACE
from opweave_cost.cost_model import ANY, Curve, OpCost, Profile
from tests.core.scheduler.test_fusing import Fusing, FusingStream
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


class FusingAll(FusingStream):
    def _fuse(self, steps):
        return [Group(tuple(steps), workspace=64)]


class OneGroup(Separate):
    kernels = KernelTable("f16 f32 f64 i32 i64", "strided")

    def __init__(self) -> None:
        super().__init__("g")
        self.kernels = type(self).kernels

    def _open(self, **params):
        return FusingAll(self)


OneGroup.kernels("cast", "embedding", "expert_linear", "attention")(reference_kernel)


def measured_group(outputs, feeds):
    with ow.Scheduler(OneGroup()) as scheduler:
        (row,) = rows_of(opweave_cost.profile_run(scheduler.build(outputs), feeds, runs=1, limits=False))
    return row


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("casts", [0, 1, 2])
def test_of_experts_those_are_read_that_tokens_are_routed_to_at_most(tokens, casts):
    experts, used, out, n = 8, 2, 16, 32
    x, ids = ow.input("x", (tokens, n)), ow.input("ids", (tokens, used), "i32")
    values = np.ones((experts, out, n), F if not casts else np.float16)
    matrices = ow.constant(values)
    for dtype in ("f64", "f32")[2 - casts :]:
        matrices = matrices.astype(dtype)
    feeds = {
        "x": np.ones((tokens, n), F),
        "ids": np.arange(tokens * used, dtype=np.int32).reshape(tokens, -1) % experts,
    }
    row = measured_group(ow.expert_linear(x, matrices, ids), feeds)
    assert row.ops == ("cast",) * casts + ("expert_linear",)
    read = min(experts, tokens * used) * out * n * values.itemsize
    assert row.nbytes == read + 4 * tokens * n + 4 * tokens * used + 4 * tokens * used * out
    assert row.flops == 2 * tokens * used * out * n


def test_rows_that_are_taken_twice_count_until_they_are_the_whole_table():
    table, ids = ow.input("table", (10, 8)), [ow.input(f"ids{i}", (4,), "i32") for i in range(3)]
    for count, rows in ((1, 4), (2, 8), (3, 10)):
        feeds = {"table": np.ones((10, 8), F), **{i.name: np.arange(4, dtype=np.int32) for i in ids[:count]}}
        row = measured_group([ow.embedding(table, i) for i in ids[:count]], feeds)
        assert row.nbytes == rows * 8 * 4 + count * (4 * 4 + 4 * 8 * 4)


@pytest.mark.parametrize("dtype", ["f16", "f32", "bf16"])
@pytest.mark.parametrize("length", [1, 50, 120])
def test_attention_by_a_block_table_reads_the_keys_and_values_within_reach(dtype, length):
    pytest.importorskip("opweave_cpu")
    heads, groups, size, block = 4, 2, 16, 16
    cache = ow.KVCache(1, 2, 256, groups, size, dtype, block=block, blocks=40, name=f"profiled {dtype} {length}")
    one, other = cache.join(), cache.join()
    cache.feed({one: [1] * length, other: [1, 2]})
    batch = cache.feed({one: [1], other: [1]})

    @ow.compile(devices="cpu")
    def step(q, k, positions, slots, blocks):
        return cache.attend(0, q, k, k, positions, slots, blocks, batch.reach)

    q, k = np.ones((2, heads, 1, size), F), np.ones((2, groups, 1, size), F)
    profile = opweave_cost.profile_run(step, [q, k, batch.positions, batch.slots, batch.blocks], runs=1, limits=False)
    (row,) = [row for row in rows_of(profile) if row.ops[-1] == "attention"]
    assert row.ops == ("embedding", "embedding", "attention")
    elements = 2 * 2 * batch.reach * groups * size + 2 * 2 * heads * size + 2 * batch.reach  # cache, q and out, mask
    assert row.nbytes == elements * ow.as_dtype(dtype).itemsize + batch.blocks.nbytes


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


def test_limits_are_those_of_the_precision_and_beyond_them_is_said_and_not_a_share(monkeypatch):
    pytest.importorskip("opweave_cpu")
    adds, disturbed = Curve.line(1e-6, 1e3), Curve(((1e6, 1e-5), (1e9, 10.0)))
    rates = {"f32": disturbed, "f16": Curve.line(1e-6, 1e10), "q8_0": Curve.line(1e-6, 1e9)}
    products = {dtype: OpCost(adds, curve) for dtype, curve in rates.items()}
    products["q8_0 in int8"] = OpCost(adds, Curve.line(1e-6, 1e13))
    made = Profile("cpu", 1e-6, adds, adds, {"add": {ANY: OpCost(adds)}, "linear": products}, contention=0.9)
    assert made.peak_flops("f32") == pytest.approx(1e11), "that of the point which nothing disturbed"
    assert made.peak_flops("f16") == pytest.approx(1e11), "halves may be computed as f32"
    assert made.peak_flops("q8_0") == pytest.approx(1e11)
    assert made.peak_flops("q8_0", "int8") == pytest.approx(1e13)
    assert made.peak_bandwidth == pytest.approx((1e3, 1e3))
    monkeypatch.setattr("opweave_cost.run_parts.profile", lambda device: made)
    x, blocks = ow.input("x", (64, 64)), ow.weights({"w": ow.quantize(np.ones((64, 64), F), "q8_0")}, device="cpu")["w"]
    rates_of: dict[Precision, float] = {"exact": 1e11, "int8": 1e13}
    for precision, rate in rates_of.items():
        with ow.Scheduler("cpu", precision=precision) as scheduler:
            measured = opweave_cost.profile_run(scheduler.build(ow.linear(x, blocks)), x=np.ones((64, 64), F), runs=1)
        (linear,) = rows_of(measured)
        assert linear.least == pytest.approx(max(linear.nbytes / 1e3, 2 * 64**3 / rate))
        assert linear.of_limit > 1
        assert linear.limit_text == "above"
        assert "above: what is read lies in faster caches" in measured
        assert "cpu: 1e-06 GB/s of the memory or cache that holds additions of 0.977 KiB" in measured.text
        assert "doubtful" in measured.text
        assert "doubtful" in measured.html()


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
