"""Programs: results, copies, states, write-back, packing, failures, memory that is reused and never moves."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import opweave as ow
from opweave.contract import MemorySpace
from opweave.runtime.host.device import HostDevice
from opweave.tracing import TRACE, TraceEvent
from tests.support.devices import BASIC, Plain, Separate

F = np.float32


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


@pytest.fixture
def x() -> ow.Tensor:
    return ow.input("x", (4, 4))


# --- feeding and fetching ---------------------------------------------------------------------------------------------


def test_results_have_the_form_of_the_outputs(x):
    s = ow.Scheduler(Plain())
    a, b = ow.neg(x), ow.exp(x)
    v = array(4, 4)
    np.testing.assert_array_equal(s.build(a).run(x=v), -v)
    one, two = s.build([a, b]).run({x: v})
    np.testing.assert_array_equal(one, -v)
    named = s.build({"first": a, "second": b}).run({"x": v})
    assert list(named) == ["first", "second"]
    np.testing.assert_array_equal(named["second"], two)


def test_fed_arrays_are_snapshots_and_results_are_new(x):
    program = ow.Scheduler(Plain()).build(ow.neg(x))
    v = array(4, 4)
    first = program.run(x=v)
    kept = first.copy()
    program.run(x=v * 2)
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("feeds", "error", "says"),
    [
        ({}, ow.SchedulerError, "no value for input 'x'"),
        ({"x": np.zeros((4, 3), F)}, ow.ShapeError, r"takes shape \(4, 4\), not \(4, 3\)"),
        ({"x": np.zeros((4, 4))}, ow.DTypeError, "takes float32, not float64"),
        ({"x": np.zeros((4, 4), F), "xs": 1}, ow.UnknownNameError, "did you mean 'x'"),
        ({"x": "abc"}, ow.DTypeError, "float32"),
        ({"x": [[1, 2], [3]]}, ow.DTypeError, "cannot feed"),
    ],
)
def test_feeds_that_do_not_fit_are_refused_before_anything_runs(feeds, error, says):
    ran: list[int] = []
    x = ow.input("x", (4, 4))

    def note(a):
        ran.append(1)
        return a

    y = ow.custom(note, x, like=x)
    program = ow.Scheduler(HostDevice()).build(y)
    with pytest.raises(error, match=says):
        program.run(feeds)
    assert not ran
    assert program.run(x=np.ones((4, 4), F)).sum() == 16


def test_an_input_with_another_name_for_messages_is_fed_as_itself_and_by_its_key():
    a, b = ow.input("fed a", (2,)).named("left"), ow.input("fed b", (2,))
    program = ow.Scheduler(HostDevice()).build(ow.sub(a, b))
    one, two = np.full(2, 1, F), np.full(2, 2, F)
    for feeds in ({a: two, b: one}, {b: one, a: two}, {a: two, "fed b": one}, {"fed a": two, "fed b": one}):
        assert program.run(feeds).tolist() == [1, 1]
    assert program.run({a: two}, **{"fed b": one}).tolist() == [1, 1]
    with pytest.raises(ow.SchedulerError, match="no value for input 'left'"):
        program.run({ow.neg(a): two, b: one})


def test_numbers_and_sequences_are_converted():
    x = ow.input("x", (3,))
    n = ow.input("n", (2,), "i32")
    program = ow.Scheduler(HostDevice()).build([ow.neg(x), ow.neg(n)])
    a, b = program.run(x=[1, 2.5, 3], n=[1, 2])
    assert (a.tolist(), b.tolist(), b.dtype) == ([-1, -2.5, -3], [-1, -2], np.int32)
    with pytest.raises(ow.DTypeError, match="not floating-point numbers"):
        program.run(x=[1, 2, 3], n=[1.5, 2])


def test_a_written_input_serves_all_runs_that_do_not_feed_it(x):
    program = ow.Scheduler(Plain()).build(ow.neg(x))
    v = array(4, 4)
    program.write("x", v)
    np.testing.assert_array_equal(program.run(), -v)
    np.testing.assert_array_equal(program.run(x=v * 2), -v * 2)
    np.testing.assert_array_equal(program.run(), -v)


def test_two_inputs_of_one_name_that_differ_are_an_error():
    a, b = ow.input("x", (4,)), ow.input("x", (1, 4))
    with pytest.raises(ow.SchedulerError, match="two different leaves are named 'x'"):
        ow.Scheduler(Plain()).build(a + b)


def test_leaves_and_views_can_be_outputs(x):
    w = ow.weights({"w": array(4, 4, seed=1)})
    program = ow.Scheduler([Separate("g"), HostDevice()]).build([x, x.T, w["w"], ow.neg(x)[1:, ::2]])
    v = array(4, 4)
    same, turned, weight, window = program.run(x=v)
    np.testing.assert_array_equal(same, v)
    np.testing.assert_array_equal(turned, v.T)
    np.testing.assert_array_equal(weight, array(4, 4, seed=1))
    np.testing.assert_array_equal(window, -v[1:, ::2])
    assert window.flags.c_contiguous


def test_tensors_without_elements_run_nowhere_and_are_right():
    x = ow.input("x", (0, 3))
    empty = ow.exp(x)
    total = ow.sum(x, axis=0)
    a, b, c = ow.Scheduler([Separate("g"), HostDevice()]).build([empty, total, total + 1.0]).run(x=np.zeros((0, 3), F))
    assert a.shape == (0, 3)
    assert b.tolist() == [0, 0, 0]
    assert c.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("devices", "options", "says"),
    [
        ([], {}, "at least one device"),
        ([None], {}, "devices, streams, or names of devices, not on None"),
        (["host"], {"parallel": -1}, "number of slots, not -1"),
        (["host"], {"parallel": 0.5}, r"number of slots, not 0\.5"),
        (["host"], {"placement": "costs"}, "'priority' or 'cost'"),
    ],
)
def test_schedulers_that_make_no_sense_are_refused(devices, options, says):
    with pytest.raises(ow.SchedulerError, match=says):
        ow.Scheduler(devices, **options)


@pytest.mark.parametrize("outputs", [3, None])
def test_outputs_that_are_no_tensors_are_refused(outputs):
    with pytest.raises(ow.SchedulerError, match="outputs are a tensor, a sequence or a mapping"):
        ow.Scheduler("host").build(outputs)


def test_what_has_no_elements_needs_no_device_that_runs_it(x):
    y = ow.exp(ow.input("none", (0, 3))) * 2
    assert ow.Scheduler(Separate("g", ("add",))).build(y).run(none=np.zeros((0, 3), F)).shape == (0, 3)


def test_programs_that_are_no_longer_remembered_are_closed_too(x):
    scheduler = ow.Scheduler(HostDevice())
    program = scheduler.build(x + 1)
    program.run(x=array(4, 4))
    others = [scheduler.build(x * i) for i in range(70)]
    assert scheduler.build(x + 1) is not program
    assert len(others) == 70
    program.run(x=array(4, 4))
    scheduler.reset()
    for _ in range(2):
        with pytest.raises(ow.LifetimeError, match="was closed"):
            program.run(x=array(4, 4))


# --- several devices --------------------------------------------------------------------------------------------------


def test_one_graph_over_three_memories(x):
    devices = [Separate("a"), Separate("b"), HostDevice()]
    t, pins = x, {}
    for i in range(6):
        t = t + x
        pins[t] = devices[i % 3]
    program = ow.Scheduler(devices).build(t, pins)
    assert len(program.splits) == 6
    # Each split but the first takes the value before it; x itself crosses once to each of the two other memories.
    assert program.n_copies == 5 + 2
    v = array(4, 4)
    np.testing.assert_allclose(program.run(x=v), v * 7, rtol=1e-6)


def test_a_value_crosses_once_for_each_memory_and_range(x):
    a, b = Separate("a"), Separate("b")
    y = ow.exp(x)
    readers = [ow.neg(y), ow.relu(y), ow.neg(y[0:2]), ow.relu(y[0:2])]
    plan = ow.Scheduler([a, b]).partition(readers, {y: a} | dict.fromkeys(readers, b))
    assert sorted(c.nbytes for c in plan.copies) == [32, 64]


def test_broadcast_operands_cross_as_one_row(x):
    a, b = Separate("a"), Separate("b")
    row = ow.exp(ow.input("row", (4,)))
    y = x + row
    program = ow.Scheduler([a, b]).build(y, {row: a, y: b})
    assert [c.nbytes for c in program.partition.copies] == [16]
    v, r = array(4, 4), array(4, seed=1)
    np.testing.assert_allclose(program.run(x=v, row=r), v + np.exp(r), rtol=1e-6)


@pytest.mark.parametrize("pack", [True, False], ids=["own-kernel", "through-host"])
def test_operands_are_packed_for_a_device_that_needs_them_dense(x, pack):
    device = Separate("dense", layout="dense", pack=pack)
    y = (ow.neg(x).T + x) + ow.input("row", (4,))
    program = ow.Scheduler([device, HostDevice()]).build(y)
    assert {program.device_of(n).name for s in program.splits for n in s.nodes} == {"dense"}
    v, r = array(4, 4), array(4, seed=1)
    np.testing.assert_allclose(program.run(x=v, row=r), -v.T + v + r, rtol=1e-6)


def test_the_scheduler_changes_no_graph_it_was_given(x):
    a, b = Separate("a"), Separate("b")
    y = ow.exp(x).T + x
    before = [(n, n.srcs, n.shape, n.strides, n.offset, dict(n.attrs)) for n in ow.Graph(y).nodes]
    one = ow.Scheduler([a, HostDevice()]).build(y)
    two = ow.Scheduler([b, HostDevice()]).build(y)
    assert before == [(n, n.srcs, n.shape, n.strides, n.offset, dict(n.attrs)) for n in ow.Graph(y).nodes]
    v = array(4, 4)
    np.testing.assert_array_equal(one.run(x=v), two.run(x=v))


def test_the_same_outputs_give_the_same_program(x):
    s = ow.Scheduler(Plain())
    program = s.build(ow.exp(ow.neg(x)))
    assert s.build(ow.exp(ow.neg(ow.input("x", (4, 4))))) is program
    program.close()
    assert s.build(ow.exp(ow.neg(x))) is not program


# --- states -----------------------------------------------------------------------------------------------------------


def test_a_state_keeps_its_contents_between_runs_and_programs(x):
    device = Separate("g")
    cache = ow.state("cache", (8, 4), fill=1)
    s = ow.Scheduler([device, HostDevice()])
    top = s.build(ow.assign(cache[0:4], x))
    bottom = s.build(ow.index_copy(cache, ow.input("ids", (2,), "i64"), ow.input("rows", (2, 4))))
    v, rows = array(4, 4), array(2, 4, seed=1)
    top.run(x=v)
    expected = np.ones((8, 4), F)
    expected[0:4] = v
    np.testing.assert_array_equal(ow.read(cache), expected)
    bottom.run(ids=np.array([7, 1]), rows=rows)
    expected[[7, 1]] = rows
    np.testing.assert_array_equal(bottom.read(cache), expected)
    np.testing.assert_array_equal(ow.read(cache[2:4, 1:]), expected[2:4, 1:])


def test_readers_of_the_old_version_come_before_the_writer(x):
    cache = ow.state("cache", (4, 4), fill=2)
    new = ow.assign(cache, x)
    old_sum = ow.add(cache, cache)
    s = ow.Scheduler(Plain())
    got_new, got_old = s.build([ow.neg(new), old_sum]).run(x=array(4, 4))
    np.testing.assert_array_equal(got_old, np.full((4, 4), 4, F))
    np.testing.assert_array_equal(got_new, -array(4, 4))


def test_a_result_that_must_land_where_its_op_cannot_run_is_written_back(x):
    far = Separate("far", set(BASIC) - {"assign", "index_copy"})
    cache = ow.state("cache", (8, 4), device=far, fill=5)
    one = ow.assign(cache[2:4], x[0:2])
    two = ow.index_copy(one, ow.constant(np.array([0, 7])), x[2:4])
    y = ow.neg(two)
    program = ow.Scheduler([far, HostDevice()]).build([y, two])
    assert {c.cause for c in program.partition.copies} >= {"region", "write-back"}
    v = array(4, 4)
    negated, kept = program.run(x=v)
    expected = np.full((8, 4), 5, F)
    expected[2:4], expected[0], expected[7] = v[0:2], v[2], v[3]
    np.testing.assert_array_equal(kept, expected)
    np.testing.assert_array_equal(negated, -expected)
    np.testing.assert_array_equal(ow.read(cache), expected)


def test_an_unplaced_state_can_be_written_before_any_program(x):
    cache = ow.state("cache", (4, 4))
    ow.write(cache, np.full((4, 4), 3, F))
    assert (ow.read(cache) == 3).all()
    program = ow.Scheduler([Separate("g"), HostDevice()]).build(cache + x)
    np.testing.assert_array_equal(program.run(x=np.ones((4, 4), F)), np.full((4, 4), 4, F))
    program.write(cache, np.zeros((4, 4), F))
    assert program.run(x=np.ones((4, 4), F)).sum() == 16


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(when: list[bool]):
    def fn(a):
        if when[0]:
            raise ValueError("boom")
        return a

    return fn


def test_a_failed_run_names_node_device_and_cause_and_can_be_repeated(x):
    when = [True]
    y = ow.custom(failing(when), ow.neg(x), like=x).named("fragile")
    program = ow.Scheduler([Separate("g"), HostDevice()]).build(ow.neg(y))
    with pytest.raises(ow.ExecutionError, match=r"custom 'fragile'.*test_run.*ValueError: boom") as caught:
        program.run(x=array(4, 4))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.device == "hostdevice"
    when[0] = False
    np.testing.assert_array_equal(program.run(x=array(4, 4)), array(4, 4))


def test_a_state_that_may_be_half_written_refuses_reads_until_rewritten(x):
    cache = ow.state("cache", (4, 4), fill=1)
    ids = ow.input("ids", (2,), "i64")
    program = ow.Scheduler(HostDevice()).build(ow.index_copy(cache, ids, x[0:2]))
    with pytest.raises(ow.ExecutionError, match="half written: cache") as caught:
        program.run(x=array(4, 4), ids=np.array([0, 9]))
    assert caught.value.states == ("cache",)
    again = {"x": array(4, 4), "ids": [0, 1]}
    for refused in (lambda: ow.read(cache), lambda: program.read(cache), lambda: program.run(again)):
        with pytest.raises(ow.ExecutionError, match="write it anew"):
            refused()
    program.write(cache, np.zeros((4, 4), F))
    assert program.run(x=np.ones((4, 4), F), ids=[0, 1]).sum() == 8


def test_a_state_whose_writer_had_not_begun_stays_readable(x):
    cache = ow.state("cache", (4, 4), fill=1)
    bad = ow.custom(failing([True]), x, like=x)
    program = ow.Scheduler(HostDevice()).build(ow.assign(cache, bad))
    with pytest.raises(ow.ExecutionError) as caught:
        program.run(x=array(4, 4))
    assert caught.value.states == ()
    assert (ow.read(cache) == 1).all()


def test_a_program_is_not_run_from_within_itself(x):
    holder: list[ow.Program] = []
    y = ow.custom(lambda a: holder[0].run(x=a), x, like=x)
    holder.append(ow.Scheduler(HostDevice()).build(y))
    with pytest.raises(ow.ExecutionError, match="from within a run"):
        holder[0].run(x=array(4, 4))


def test_threads_run_one_after_the_other(x):
    s = ow.Scheduler(Plain())
    programs = [s.build(ow.scale(ow.scale(x, float(k)), 2.0)) for k in range(1, 5)]
    wrong: list[int] = []

    def work(k: int) -> None:
        v = np.full((4, 4), k + 1, F)
        wrong.extend(k for _ in range(200) if not (programs[k].run(x=v) == v * (k + 1) * 2).all())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_closed_things_say_so(x):
    s = ow.Scheduler(Plain())
    program = s.build(ow.neg(x))
    program.close()
    with pytest.raises(ow.LifetimeError, match="closed"):
        program.run(x=array(4, 4))
    s.close()
    with pytest.raises(ow.LifetimeError, match="closed"):
        s.build(ow.neg(x))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_programs_share_memory_and_reserve_makes_later_ones_free():
    device = Separate("g")
    s = ow.Scheduler([device, HostDevice()])

    def net(n: int) -> ow.Tensor:
        x = ow.input(f"x{n}", (n, 64))
        return ow.exp(ow.neg(ow.exp(x))) + x

    reserved = s.reserve(net(256))
    assert reserved["g"] >= 2 * 256 * 64 * 4
    for n in (8, 64, 255, 256):
        v = array(n, 64)
        np.testing.assert_allclose(s.build(net(n)).run({f"x{n}": v}), np.exp(-np.exp(v)) + v, rtol=1e-5, atol=1e-6)
    assert s.buffer_size(device) == reserved["g"]


def test_memory_of_a_program_never_moves_when_a_larger_one_comes():
    s = ow.Scheduler([Separate("g"), HostDevice()])
    small, large = ow.input("small", (8,)), ow.input("large", (100_000,))
    first = s.build(ow.neg(ow.exp(small)))
    v = array(8)
    expected = first.run(small=v)
    s.build(ow.neg(ow.exp(large))).run(large=array(100_000))
    np.testing.assert_array_equal(first.run(small=v), expected)


def test_chunks_keep_to_the_largest_buffer_of_a_device(x):
    device = Separate("g", max_buffer_size=256)
    parts = [ow.exp(ow.scale(x, float(k))) for k in range(2, 12)]
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    program = ow.Scheduler([device, HostDevice()]).build([total, *parts])
    v = array(4, 4)
    np.testing.assert_allclose(program.run(x=v)[0], np.sum([np.exp(v * k) for k in range(2, 12)], axis=0), rtol=1e-5)
    big = ow.input("big", (1000,))
    with pytest.raises(ow.AllocationError, match="at most 256 bytes"):
        ow.Scheduler([device, HostDevice()]).build(ow.exp(big))


def test_in_place_never_touches_inputs_outputs_or_values_still_needed(x):
    s = ow.Scheduler(Plain())
    a = ow.exp(x)
    b = ow.neg(a)
    c = ow.add(a, b)  # a is read again after b
    d = ow.relu(c)
    v = array(4, 4)
    ra, rd, rx = s.build([a, d, x]).run(x=v)
    np.testing.assert_allclose(ra, np.exp(v), rtol=1e-6)
    np.testing.assert_array_equal(rd, np.zeros((4, 4), F))
    np.testing.assert_array_equal(rx, v)


def test_a_chain_needs_one_buffer_beside_its_input(x):
    t = x
    for _ in range(10):
        t = ow.neg(ow.exp(t))
    program = ow.Scheduler(Plain()).build(t)
    assert program.memory["plain"].temporaries == 2 * 64


def test_tensors_placed_by_hand(x):
    device = Separate("g")
    buffer = device.alloc(256)
    y = ow.exp(x)
    place = ow.place(y, buffer, 64)
    s = ow.Scheduler([device, HostDevice()])
    program = s.build(ow.neg(y), placements=[place])
    v = array(4, 4)
    program.run(x=v)
    np.testing.assert_allclose(buffer.read(64, 64).view(F).reshape(4, 4), np.exp(v), rtol=1e-6)
    far = Separate("far", ["neg"])
    elsewhere = ow.place(y, far.alloc(64))
    program = ow.Scheduler([far, HostDevice()]).build(ow.neg(y), placements=[elsewhere])
    np.testing.assert_allclose(program.run(x=v), -np.exp(v), rtol=1e-6)
    np.testing.assert_allclose(elsewhere.buffer.read().view(F).reshape(4, 4), np.exp(v), rtol=1e-6)
    with pytest.raises(ow.HazardError, match="placed over"):
        s.build([y, ow.neg(x)], placements=[place, ow.place(ow.neg(x), buffer, 64)])
    with pytest.raises(ow.BoundsError):
        ow.place(y, buffer, 224)


def test_states_placed_over_the_same_bytes_are_recognised():
    device = Separate("g")
    buffer = device.alloc(128)
    buffer.clear()
    one, two = ow.state("one", (16,)), ow.state("two", (16,))
    ow.place(one, buffer, 0)
    ow.place(two, buffer, 0)
    v = ow.input("v", (16,))
    new = ow.assign(one, v)
    old = ow.neg(two)
    s = ow.Scheduler([device, HostDevice()])
    negated, _ = s.build([old, ow.neg(new)]).run(v=np.ones(16, F))
    assert not negated.any(), "the reader of the same bytes comes before the writer"
    with pytest.raises(ow.HazardError, match="two nodes write"):
        s.build([ow.neg(new), ow.neg(ow.assign(two, v * 2.0))])


def test_weights_are_uploaded_once_for_all_programs_and_freed_with_them(x):
    device = Separate("g")
    w = ow.weights({"a": array(4, 4), "b": array(4, 4, seed=1)})
    s = ow.Scheduler([device, HostDevice()])
    one = s.build(ow.linear(x, w["a"]) + w["b"])
    before = len(device.live_buffers)
    two = s.build(ow.linear(ow.neg(x), w["a"]) + w["b"])
    assert len(device.live_buffers) == before
    assert one.memory["g"].weights == two.memory["g"].weights == 128
    first, second = (w[name].leaf for name in "ab")
    assert first is not None
    assert second is not None
    assert first.copies[device.space].buffer is second.copies[device.space].buffer
    del one, two, w, first, second
    s.close()
    gc.collect()
    assert not list(device.live_buffers)


def test_host_weights_are_used_where_they_lie(x):
    a = array(4, 4)
    w = ow.weights({"a": a})
    program = ow.Scheduler(Plain()).build(ow.linear(x, w["a"]))
    program.run(x=array(4, 4))
    leaf = w["a"].leaf
    assert leaf is not None
    (copy,) = leaf.copies.values()
    assert copy.buffer.address == a.__array_interface__["data"][0]


def test_weights_without_bytes_plan_but_do_not_run(x):
    w = ow.weights({"w": ow.Spec((4, 4))})
    y = ow.linear(x, w["w"])
    s = ow.Scheduler([Separate("g"), HostDevice()])
    assert len(s.partition(y).splits) == 1
    with pytest.raises(ow.SchedulerError, match="has no bytes"):
        s.build(y)


def test_buffer_types_must_be_reachable():
    device = Separate("g")
    other = Separate("h")
    with pytest.raises(ow.SchedulerError, match="cannot reach"):
        ow.Scheduler(device, buffer_types={device: other.default_buffer_type})
    with pytest.raises(ow.SchedulerError, match="not here"):
        ow.Scheduler(device, buffer_types={"nowhere": other.default_buffer_type})
    assert isinstance(device.space, MemorySpace)


# --- saying why -------------------------------------------------------------------------------------------------------


def test_explain_lists_splits_copies_causes_refusals_and_memory(x):
    far = Separate("far", ["exp"])
    y = ow.neg(ow.exp(x).named("hidden")).named("result")
    text = ow.Scheduler([far, HostDevice()]).build(y).explain()
    for part in (
        "2 steps in 2 splits over far, hostdevice",
        "split 0 on far: 1 step",
        "hidden",
        "copy hidden f32[4, 4]: far -> hostdevice, 64 B (transfer)",
        "not on far: no kernel for neg",
        "memory on far: ",
        "[priority] the first device in the order that supports it",
    ):
        assert part in text


def test_listeners_hear_builds_plans_and_copies(x):
    heard: list[TraceEvent] = []
    s = ow.Scheduler([Separate("far", ["exp"]), HostDevice()])
    y = ow.neg(ow.exp(x).named("hidden"))
    with TRACE.listen(heard.append):
        program = s.build(y)
        program.run(x=array(4, 4))
    program.run(x=array(4, 4))
    kinds = [h.kind for h in heard]
    assert kinds.count("build") == 1
    assert [(h.kind, h.name, h.data["device"]) for h in heard if h.kind in ("plan", "copy")] == [
        ("plan", "split 0", "far"),
        ("copy", "hidden", "hostdevice"),
        ("plan", "split 1", "hostdevice"),
    ]
    assert all(h.end >= h.start for h in heard)


def test_a_program_whose_weights_were_freed_says_so(x):
    device = Separate("g")
    w = ow.weights({"w": array(4, 4)}, device=device)
    program = ow.Scheduler([device, HostDevice()]).build(ow.linear(x, w["w"]))
    program.run(x=array(4, 4))
    w.buffers[0].free()
    with pytest.raises(ow.LifetimeError, match="freed"):
        program.run(x=array(4, 4))
