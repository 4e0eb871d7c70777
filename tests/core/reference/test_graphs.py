"""Graphs and programs as ggml's functions for them behave, on the shipped devices: other sizes in the same memory,
views, copies and comparisons, shards, quantizing, gradients, ends of runs."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import threading

import numpy as np
import pytest

import opweave as ow
import opweave_combined
import opweave_cost
from opweave.runtime.host.device import HostDevice
from tests.support.real_devices import make, real_device

device = real_device
F = np.float32


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def net(n):
    x = ow.input(f"reference_x{n}", (n, 64))
    return ow.exp(ow.neg(ow.exp(x))) + x


def check(program, n):
    v = array(n, 64)
    got = program.run({f"reference_x{n}": v})
    np.testing.assert_allclose(got, np.exp(-np.exp(v)) + v, rtol=1e-4, atol=1e-5)


def test_other_sizes_are_planned_anew_in_the_same_memory(device):
    """`graph_plan_update`: equal graphs are found again; those of other sizes leave the former programs as they are."""
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        reserved = scheduler.reserve(net(256))[device.name]
        assert reserved == scheduler.buffer_size(device) > 0
        programs = {}
        for n in (8, 64, 255, 256, 8, 64):
            program = scheduler.build(net(n))
            assert programs.setdefault(n, program) is program
            check(program, n)
            assert scheduler.buffer_size(device) == reserved
        for n, program in programs.items():
            check(program, n)


def test_a_view_lies_where_its_root_lies(device):
    """`view_init`: no bytes of its own; what is written by the one is read by the other."""
    state = ow.state(f"viewed-{device.name}", (6, 8), device=device)
    rows, turned = state[2:4, 1:5], state.T
    for view in (rows, turned, ow.reshape(state, (3, 16)), rows[1]):
        assert view.is_view
        assert view.root is state
        assert view.placement.buffer is state.placement.buffer
    assert not state.is_view
    assert rows.placement.offset == state.placement.offset + (2 * 8 + 1) * 4
    held = array(6, 8)
    ow.write(state, held)
    assert np.array_equal(ow.read(turned), held.T)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build([ow.assign(rows, ow.neg(rows)), turned + 0.0])
        assert program.device_of(rows) is device
        program.run()
    held[2:4, 1:5] *= -1
    assert np.array_equal(ow.read(state), held)


def test_a_copy_of_a_graph_ends_by_itself(device):
    """`graph_copy`, `graph_copy_free`: the original and its states go on."""
    total = ow.state(f"counted-{device.name}", (4,), fill=1)
    output = ow.assign(total, total + 1.0)
    copied = opweave_cost.copy_graph(output).outputs
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program, other = scheduler.build(output), scheduler.build(copied)
        for n in (2, 3):
            assert (other.run() == n).all()
        assert (program.run() == 2).all()
        other.close()
        other.close()
        with pytest.raises(ow.LifetimeError, match="closed"):
            other.run()
        assert (program.run() == 3).all()
    with pytest.raises(ow.LifetimeError, match="closed"):
        program.run()


def test_runs_are_ended_from_another_thread(device):
    """`cpu_set_abort_callback`, `set_abort_callback`: the run raises; the next one is whole."""
    x = ow.input("cancelled_x", (8,))
    first = ow.exp(x).named("first")
    output = ow.relu(ow.neg(first)).named("last")
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program, seen = scheduler.build(output), []

        def end(node, value):
            seen.append(node)
            thread = threading.Thread(target=scheduler.cancel)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()

        with program.observe(end, [first, output], on_device=True), pytest.raises(ow.Cancelled):
            program.run(cancelled_x=array(8))
        assert seen == [first]
        np.testing.assert_allclose(program.run(cancelled_x=array(8)), np.zeros(8), atol=0)
        scheduler.cancel()  # of nothing
        np.testing.assert_allclose(program.run(cancelled_x=array(8)), np.zeros(8), atol=0)


def test_a_weight_is_split_over_devices(device):
    """`split_buffer_type`: rows by shares; each device multiplies its part; read back whole."""
    other = make("torch" if device is make("cpu") else "cpu")
    w = array(512, 64)
    weight = ow.weights({"w": w}, device=ow.Sharded({device: 3, other: 1}, multiple=64))["w"]
    x = ow.input("split_x", (4, 64))
    with ow.Scheduler([device, other, HostDevice()]) as scheduler:
        program = scheduler.build(ow.linear(x, weight))
        np.testing.assert_allclose(program.run(split_x=array(4, 64, seed=1)), array(4, 64, seed=1) @ w.T, rtol=1e-3,
                                   atol=1e-4)  # fmt: skip
        held = {name: memory.weights for name, memory in program.memory.items()}
        assert held[device.name] == 3 * held[other.name] == w.nbytes * 3 // 4
    assert np.array_equal(ow.read(weight), w)
    with pytest.raises(ow.SchedulerError, match="twice"):
        ow.Sharded([device, device])


def test_a_device_over_devices_is_used_like_one(device):
    """`meta_device`, `meta_split_state`, `meta_split_axis_name`: an MLP whose weights its members share, with one sum;
    memory is that of both, once where they have the host's in common; the axis and the parts are shown."""
    other = make("torch" if device is make("cpu") else "cpu")
    both = opweave_combined.combine([device, other])
    up, down = array(256, 64, seed=2), array(64, 256, seed=3)
    w = ow.weights({"meta_up": up, "meta_down": down}, device=both)
    x = ow.input("meta_x", (4, 64))
    hidden = np.maximum(array(4, 64) @ up.T, 0)
    with ow.Scheduler([both]) as scheduler:
        program = scheduler.build(ow.linear(ow.relu(ow.linear(x, w["meta_up"])), w["meta_down"]))
        np.testing.assert_allclose(program.run(meta_x=array(4, 64)), hidden @ down.T, rtol=1e-3, atol=2e-3)
    totals = [member.mem_info()[1] for member in both.members]
    assert both.mem_info()[1] in (sum(totals), max(totals))
    with ow.Scheduler([device, other]) as scheduler:
        split = ow.weights({"meta_up": up}, device=ow.Sharded([device, other]))["meta_up"]
        text = str(scheduler.build(ow.linear(x, split)).explain())
    assert "128" in text
    assert "axis 0" in text
    with pytest.raises(ow.SchedulerError):
        opweave_combined.combine([device, device])


@pytest.mark.parametrize("dtype", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k"])
def test_values_are_quantized_in_blocks(device, dtype):
    """`quantize_chunk`, `quantize_init`, `quantize_free`, `quantize_requires_imatrix`: bytes as the gguf package's;
    nothing to set up; importances are never required, and refused where they count for nothing."""
    import gguf

    v = array(8, 256)
    blocks = ow.quantize(v, dtype)
    importance = np.random.default_rng(9).random(256).astype(F) ** 4
    if dtype != "q4_k":
        want = gguf.quantize(v, gguf.GGMLQuantizationType[dtype.upper()])
        assert np.array_equal(np.asarray(blocks.data).ravel(), want.ravel())
    if dtype == "q8_0":
        with pytest.raises(ow.DTypeError, match="importance"):
            ow.quantize(v, dtype, importance=importance)
    else:
        plain, weighed = (ow.quantize(v, dtype, importance=i) for i in (None, importance))
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        error = [((gguf.dequantize(np.asarray(b.data), kind).reshape(v.shape) - v) ** 2
                  * importance).sum() for b in (plain, weighed)]  # fmt: skip
        assert error[1] < 0.9 * error[0]
    with pytest.raises(ow.LayoutError, match="multiple of its block"):
        ow.quantize(v[:, :33], dtype)
    with pytest.raises(ow.DTypeError):
        ow.quantize(v, "f16")
    x = ow.input("quantized_x", (8, 256))
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        got = scheduler.build(ow.quantize(x, dtype)).run(quantized_x=v)
    assert np.array_equal(np.asarray(got.data if isinstance(got, ow.Blocks) else got).ravel(),
                          np.asarray(blocks.data).ravel())  # fmt: skip


def test_a_graph_is_expanded_forwards_and_backwards(device):
    """`build_forward_expand`, `build_backward_expand`: each node once, sources first; gradients by their definition."""
    x, w = ow.input("expanded_x", (4, 6)), ow.input("expanded_w", (5, 6))
    loss = ow.sum(ow.square(ow.linear(x, w)))
    (by_w,) = ow.gradients(loss, [w])
    graph = ow.Graph([loss, by_w, loss])
    order = {node: i for i, node in enumerate(graph.nodes)}
    assert len(order) == len(graph.nodes)
    for node in graph.nodes:
        assert all(order[source] < order[node] for source in node.srcs if source in order)
    a, b = array(4, 6), array(5, 6, seed=1)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        value, gradient = scheduler.build([loss, by_w]).run(expanded_x=a, expanded_w=b)
    np.testing.assert_allclose(value, ((a @ b.T) ** 2).sum(), rtol=1e-4)
    np.testing.assert_allclose(gradient, 2 * (a @ b.T).T @ a, rtol=1e-3, atol=1e-3)


def test_a_scheduler_shows_the_nodes_of_a_graph_as_dot(device):
    """`graph_dump_dot`: of the graph that a program runs."""
    y = ow.relu(ow.neg(ow.input("drawn_x", (2, 3)))).named("drawn")
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        graph = scheduler.build(y).partition.graph
    text = graph.to_dot()
    assert text.startswith("digraph")
    assert "drawn_x" in text
    assert text.count("->") == 3, "two edges, and one to the output"
