"""Indices out of range: recorded on the device, raised by the next wait, with the name of the step."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step, StepError
from opweave.graph.dtypes import as_dtype
from opweave_opencl.indices import VARIABLE
from opweave_opencl.kernels import sorting

GOOD, WRONG = np.array([0, 4, 1]), np.array([0, 7, 1])


def operand(device, values):
    buffer = device.alloc(values.nbytes)
    buffer.upload(0, values)
    return Arg(buffer, 0, as_dtype(values.dtype), values.shape, values.strides)


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Picking:
    """A plan of an addition and then an embedding of three of five rows."""

    def __init__(self, stream):
        device = stream.device
        self.stream = stream
        self.table, self.ids = operand(device, floats(5, 4)), operand(device, GOOD)
        self.out, self.sum = operand(device, floats(3, 4)), operand(device, floats(5, 4))
        steps = [
            Step("add", self.sum, (self.table, self.table), {}),
            Step("embedding", self.out, (self.table, self.ids), {}),
        ]
        self.plan = stream.compile(steps)

    def run(self, ids):
        self.stream.upload(self.ids.buffer, 0, ids)
        self.plan.run()

    def picked(self):
        return self.out.buffer.read().view(np.float32).reshape(3, 4)


@pytest.fixture
def picking(stream):
    return Picking(stream)


def expect_wrong(error, picking):
    failed = error if isinstance(error, StepError) else error.__cause__
    while not isinstance(failed, StepError):
        failed = failed.__cause__
    assert (failed.step, failed.plan) == (1, picking.plan)
    assert isinstance(failed.error, ow.BoundsError)
    assert str(failed.error) == "embedding: index 7 is outside of 0 .. 4"


def test_waiting_for_the_stream_raises_it(picking):
    picking.run(WRONG)
    with pytest.raises(ow.ExecutionError, match=r"embedding: index 7 is outside of 0 \.\. 4") as caught:
        picking.stream.synchronize()
    expect_wrong(caught.value, picking)


def test_a_thread_that_waits_while_it_is_being_raised_is_told_too(picking, monkeypatch):
    stream, told, threads = picking.stream, [], []
    noted = stream.fail

    def wait(event):
        try:
            event.synchronize()
        except ow.ExecutionError as error:
            told.append(str(error))

    def fail(error):
        noted(error)
        threads.append(threading.Thread(target=wait, args=(second,)))
        threads[-1].start()
        threads[-1].join(0.1)  # before the record is cleared

    monkeypatch.setattr(stream, "fail", fail)
    picking.run(WRONG)
    first, second = stream.record(), stream.record()
    wait(first)
    assert len(threads) == 1
    threads[0].join(10)
    assert len(told) == 2
    assert all("index 7 is outside" in text for text in told)
    stream.recover()
    stream.record().synchronize()


def test_waiting_for_an_event_raises_it_and_earlier_events_are_reached(picking):
    picking.run(GOOD)
    before = picking.stream.record()
    before.synchronize()
    picking.run(WRONG)
    after = picking.stream.record()
    with pytest.raises(ow.ExecutionError, match="index 7") as caught:
        after.synchronize()
    expect_wrong(caught.value, picking)
    assert after.failure is not None
    assert before.failure is None
    before.synchronize()


def test_an_event_that_is_only_queried_has_failed_too(picking):
    picking.run(WRONG)
    event = picking.stream.record()
    picking.stream.queue.finish()
    while not event.done:
        pass
    with pytest.raises(ow.ExecutionError, match="index 7"):
        event.synchronize()


def test_it_is_raised_once_and_the_stream_goes_on(picking):
    for ids in (WRONG, GOOD, WRONG, WRONG, GOOD):
        picking.run(ids)
        if ids is WRONG:
            with pytest.raises(ow.ExecutionError, match="index 7"):
                picking.stream.synchronize()
            picking.stream.recover()
            assert picking.stream.failure is None
        else:
            picking.stream.synchronize()
            np.testing.assert_array_equal(picking.picked(), floats(5, 4)[GOOD])


def test_the_step_is_known_when_its_plan_is_gone(stream, picking):
    ids = operand(stream.device, WRONG)
    stream.run([Step("embedding", picking.out, (picking.table, ids), {})])
    gc.collect()
    for _ in range(3):
        picking.run(GOOD)
    with pytest.raises(ow.ExecutionError, match=r"embedding: index 7 is outside of 0 \.\. 4"):
        stream.synchronize()


def test_closing_the_stream_raises_what_was_not_raised_yet(device):
    stream = device.open()
    picking = Picking(stream)
    picking.run(WRONG)
    with pytest.raises(ow.ExecutionError, match="index 7"):
        stream.close()


def test_plans_that_pick_nothing_have_nothing_copied(stream, picking):
    vector = operand(stream.device, floats(5))
    plan = stream.compile([Step("add", vector, (vector, vector), {})])
    picking.run(GOOD)
    stream.synchronize()
    before = list(stream.indices._copies)
    plan.run()
    assert list(stream.indices._copies) == before


def test_memory_of_the_check_is_given_back(device):
    held = len(device.live_buffers)
    with device.open() as stream:
        picking = Picking(stream)
        picking.run(GOOD)
        stream.synchronize()
    for arg in (picking.table, picking.ids, picking.out, picking.sum):
        arg.buffer.free()
    assert sum(not b.freed for b in device.live_buffers) <= held


@pytest.mark.parametrize("way", ["option", "variable"])
def test_it_can_be_switched_off(device, monkeypatch, way):
    monkeypatch.setenv(VARIABLE, "0")
    with device.open(**({"check_indices": False} if way == "option" else {})) as stream:
        picking = Picking(stream)
        picking.run(WRONG)
        stream.synchronize()
        want = floats(5, 4)[[0, 0, 1]]
        want[1] = 0
        np.testing.assert_array_equal(picking.picked(), want)
    with device.open(check_indices=True) as stream:
        picking = Picking(stream)
        picking.run(WRONG)
        with pytest.raises(ow.ExecutionError, match="index 7"):
            stream.synchronize()
        stream.recover()


def graphs():
    ids = ow.input("ids", (3,), "i64")
    table, rows = ow.input("table", (5, 4)), ow.input("rows", (3, 4))
    values = {"table": floats(5, 4), "rows": floats(3, 4)}
    blocks = ow.input("blocks", (5, 32), "q8_0")
    experts = ow.input("experts", (5, 6, 4))
    yield "embedding", ow.embedding(table, ids), values
    yield "embedding", ow.embedding(blocks, ids), {"blocks": np.zeros((5, 34), np.uint8)}
    yield "take_along_axis", ow.take_along_axis(ow.input("line", (5,)), ids, 0), {"line": floats(5)}
    yield "index_add", ow.index_add(ids, rows, 5), values
    yield "index_add", ow.index_add(ids, rows.astype("f16"), 5), values
    yield "expert_linear", ow.expert_linear(rows, experts, ids.reshape(3, 1)), values | {"experts": floats(5, 6, 4)}
    yield "add_expert", ow.add_expert(rows, table, ids), values


@pytest.mark.parametrize("wrong", [7, 5, -1])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("number", range(7))
def test_programs_name_the_node(number, parallel, wrong):
    op, y, values = list(graphs())[number]
    y = y.named("picked")
    values = {name: value for name, value in values.items() if name in {x.name for x in ow.Graph(y).leaves}}
    with ow.Scheduler(["opencl:0", "host"], parallel=parallel) as scheduler:
        program = scheduler.build(y)
        want = program.run(ids=GOOD, **values)
        spoiled = GOOD.copy()
        spoiled[2] = wrong
        with pytest.raises(ow.ExecutionError, match=f"{op}: index {wrong} is outside of 0 .. 4") as caught:
            program.run(ids=spoiled, **values)
        assert caught.value.device == "opencl:0"
        assert isinstance(caught.value.__cause__, ow.BoundsError)
        assert op in caught.value.node
        np.testing.assert_array_equal(program.run(ids=GOOD, **values), want)


def test_submitted_runs_raise_it_and_the_others_are_right():
    ids, table = ow.input("ids", (3,), "i64"), ow.input("table", (5, 4))
    with ow.Scheduler(["opencl:0", "host"], parallel=3) as scheduler:
        program = scheduler.build(ow.embedding(table, ids) + 1.0)
        values = floats(5, 4)
        futures = [program.submit(ids=WRONG if i == 3 else GOOD, table=values) for i in range(6)]
        failed = 0
        for i, future in enumerate(futures):
            try:
                np.testing.assert_array_equal(future.result(), values[GOOD] + 1)
            except ow.ExecutionError:
                failed += 1
            else:
                assert i != 3
        assert failed
        np.testing.assert_array_equal(program.run(ids=GOOD, table=values), values[GOOD] + 1)


def test_a_state_that_a_wrong_index_was_to_write_is_half_written():
    state = ow.state("cache", (5, 4), device="opencl:0")
    y = ow.index_copy(state, ow.input("ids", (3,), "i64"), ow.input("rows", (3, 4)))
    with ow.Scheduler(["opencl:0", "host"]) as scheduler:
        program = scheduler.build(y)
        with pytest.raises(ow.ExecutionError, match="index_copy: index 7") as caught:
            program.run(ids=WRONG, rows=floats(3, 4))
        assert caught.value.states == ("cache",)
        program.write(state, np.zeros((5, 4), np.float32))
        program.run(ids=GOOD, rows=floats(3, 4))


@pytest.mark.parametrize("chunk", [1, 7, 26, 100, 512])
def test_lines_are_merged_in_pieces_of_any_length(device, chunk):
    """Also of lengths that do not divide what is merged."""
    if device.kind is not ow.Kind.CPU:
        pytest.skip("pieces have one length on graphics cards")
    values = np.random.default_rng(0).integers(-9, 9, (2, 257)).astype(np.float32)
    with sorting.CHUNK.at(chunk), sorting.KEPT.at(1), ow.Scheduler(device) as scheduler:
        x = ow.input("x", values.shape)
        program = scheduler.build((ow.argsort(x), ow.argsort(x, descending=True), *ow.top_k(x, 100)))
        up, down, most, places = program.run(x=values)
    assert np.array_equal(up, np.argsort(values, kind="stable"))
    assert np.array_equal(down, np.argsort(-values, kind="stable"))
    assert np.array_equal(places, down[:, :100])
    assert np.array_equal(most, np.take_along_axis(values, places, 1))
