"""Graphs: order, hazards, and leaves over the same bytes."""

import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import f32
from opweave.graph.graph import Graph
from opweave.graph.opdef import OpDef
from opweave.graph.tensor import node
from opweave.leaf_memory import place, upload
from opweave.runtime.host.device import HostDevice
from tests.support.async_device import AsyncDevice


def position(graph, tensor):
    return graph.nodes.index(tensor)


def test_sources_come_before_their_readers():
    x = ow.input("x", (3, 3))
    a = ow.exp(x)
    b = (a @ x.T).reshape(9)
    c = b + ow.flatten(a)
    graph = Graph(c)
    assert graph.outputs == (c,)
    assert graph.leaves == (x,)
    assert graph.nodes[-1] is c
    for t in graph.nodes:
        for s in t.srcs:
            assert s.op is None or position(graph, s) < position(graph, t)
    assert len(graph) == len(set(graph.nodes)) == len(graph.nodes)


def test_depth_is_no_problem():
    t = ow.input("x", (1,))
    for _ in range(20_000):
        t = ow.neg(t)
    assert len(Graph(t)) == 20_000


def test_shared_sources_appear_once():
    x = ow.input("x", (3,))
    a = ow.exp(x)
    graph = Graph([a + a, a * a, a])
    assert [t.name for t in graph.nodes] == ["exp", "add", "mul"]


@pytest.mark.parametrize("outputs", [[], "x", [3], None])
def test_outputs_are_tensors(outputs):
    with pytest.raises((ow.SchedulerError, TypeError)):
        Graph(outputs)


def test_two_inputs_of_one_name_are_refused():
    with pytest.raises(ow.SchedulerError, match="two different leaves are named 'x'"):
        Graph(ow.input("x", (3,)) + ow.input("x", (3,), "f16"))
    Graph(ow.constant([1.0]) + ow.constant([2.0]))  # constants need no names


# --- writers --------------------------------------------------------------------------------------------------------


def test_readers_of_the_old_version_come_before_the_writer():
    state = ow.state("s", (4, 3))
    for reader in (ow.exp(state), ow.exp(state[1:3]), ow.exp(state.T)):
        written = ow.assign(state[:2], 1.0)
        for outputs in ([written, reader], [reader, written]):
            graph = Graph(outputs)
            assert position(graph, reader) < position(graph, written)


def test_readers_of_the_new_version_come_after_the_writer():
    state = ow.state("s", (4, 3))
    written = ow.assign(state, 1.0)
    before, after = ow.exp(state), ow.exp(written[2])
    graph = Graph([after, before])
    assert position(graph, before) < position(graph, written) < position(graph, after)


def test_chains_of_writers_order_the_readers_of_each_version():
    state = ow.state("s", (4,))
    versions, readers = [state], []
    for i in range(4):
        readers.append(ow.scale(versions[-1], float(i)))
        versions.append(ow.assign(versions[-1][i : i + 1], float(i)))
    graph = Graph([versions[-1], *readers])
    for i, reader in enumerate(readers):
        assert position(graph, reader) < position(graph, versions[i + 1])
        if i:
            assert position(graph, versions[i]) < position(graph, reader)


def test_a_writer_may_depend_on_a_reader_of_the_old_version():
    state = ow.state("s", (4,))
    graph = Graph(ow.assign(state, ow.exp(state)))
    assert [t.name for t in graph.nodes] == ["exp", "assign"]


def test_what_the_next_version_is_made_of_comes_after_the_other_readers():
    state, x = ow.state("s", (4, 4)), ow.input("x", (4, 4))
    made, other = ow.exp(x) * 0.5 + state, x @ state
    graph = Graph([ow.accumulate(state, ow.copy(made)), other])
    assert [t.name for t in graph.nodes] == ["matmul", "exp", "scale", "add", "copy", "accumulate"]


def test_two_writers_of_one_version_are_refused():
    state = ow.state("cache", (4, 3))
    with pytest.raises(ow.HazardError, match="two nodes write the same version of 'cache'") as caught:
        Graph([ow.assign(state[0], 1.0), ow.assign(state[1], 2.0)])
    assert str(caught.value).count("test_graph.py:") == 2
    assert "let the second one write what the first one returned" in str(caught.value)


def test_a_reader_that_cannot_come_first_is_refused():
    state = ow.state("s", (4,))
    written = ow.assign(state, 1.0)
    reader = state * written
    with pytest.raises(ow.HazardError, match=r"overwrites what mul .* reads, and neither can come first.*ow\.copy"):
        Graph(reader)
    Graph(ow.copy(state) * written)


def test_an_output_of_an_old_version_is_refused():
    state = ow.state("s", (4,))
    written = ow.assign(state, 1.0)
    for old in (state, state[1:]):
        with pytest.raises(ow.HazardError, match="shows a version of 's' that assign"):
            Graph([old, written])
    Graph([ow.copy(state), written])
    Graph([written, written[1:]])


def test_a_writer_may_read_its_own_version_only_beside_what_it_writes():
    state = ow.state("s", (4, 3))
    Graph(ow.assign(state[:2], state[2:]))
    with pytest.raises(ow.HazardError, match="reads the bytes that it overwrites"):
        Graph(ow.assign(state[:3], state[1:]))
    Graph(ow.assign(state[:3], ow.copy(state[1:])))


# --- leaves over the same bytes -------------------------------------------------------------------------------------


def placed_over(buffer, offset, name, shape):
    """A state whose memory is a part of ``buffer``."""
    tensor = ow.state(name, shape)
    place(tensor, buffer, offset)
    return tensor


def test_states_over_one_buffer_are_recognised_by_their_bytes():
    buffer = HostDevice().alloc(256)
    whole = placed_over(buffer, 0, "whole", (32,))
    inside = placed_over(buffer, 64, "inside", (16,))
    beside = placed_over(buffer, 128, "beside", (4,))
    reader, other = ow.exp(inside), ow.exp(beside)
    written = ow.assign(whole, 1.0)
    graph = Graph([written, reader, other])
    assert position(graph, reader) < position(graph, written)
    with pytest.raises(ow.HazardError, match="two nodes write the same version"):
        Graph([written, ow.assign(inside, 2.0)])
    Graph([written, ow.assign(beside, 2.0)])
    with pytest.raises(ow.HazardError, match="shows a version"):
        Graph([written, inside[:2]])


def test_a_writer_may_read_its_memory_under_another_name_only_beside_what_it_writes():
    buffer = HostDevice().alloc(256)
    whole = placed_over(buffer, 0, "whole", (32,))
    inside = placed_over(buffer, 64, "inside", (16,))
    Graph(ow.assign(whole[:8], inside[:8]))
    with pytest.raises(ow.HazardError, match="reads the bytes that it overwrites"):
        Graph(ow.assign(whole[17:], inside[:-1]))


def test_weights_over_the_array_of_a_state_are_recognised():
    array = np.zeros(16, np.float32)
    buffer = HostDevice().import_host(array)
    state = placed_over(buffer, 0, "state", (16,))
    weight = ow.weights({"w": array[4:8]})["w"]
    reader = ow.exp(weight)
    written = ow.assign(state, 1.0)
    for outputs in ([written, reader], [reader, written]):
        graph = Graph(outputs)
        assert position(graph, reader) < position(graph, written)


def test_two_placed_weights_over_one_array_share_it_with_a_state():
    array = np.zeros((2, 8), np.float32)
    device = HostDevice()
    weights = ow.weights({"a": array, "b": array[1]})
    upload(list(weights.values()), device)
    state = placed_over(device.import_host(array), 0, "state", (16,))
    written = ow.assign(state, 1.0)
    readers = [ow.exp(w) for w in weights.values()]
    graph = Graph([written, *readers])
    assert all(position(graph, r) < position(graph, written) for r in readers)


def test_graphs_without_writers_do_not_care():
    array = np.zeros(8, np.float32)
    array.flags.writeable = False
    a, b = ow.constant(array), ow.constant(array)
    assert len(Graph(a + b)) == 1


# --- quantized ------------------------------------------------------------------------------------------------------


def test_the_transpose_of_a_quantized_matrix_is_no_output_and_no_source():
    w = ow.input("w", (4, 64), "q8_0")
    with pytest.raises(ow.LayoutError, match=r"right operand of matmul .* not as an output .*transpose q8_0\[64, 4\]"):
        Graph(w.T)
    # Builders refuse it themselves; a node that is made by hand is caught here.
    by_hand = node(OpDef("by_hand", infer=lambda x: ((1,), f32), reference=lambda x: x[:1]), (w.T,), {})
    with pytest.raises(ow.LayoutError, match="or for another node"):
        Graph(ow.exp(by_hand))
    x = ow.input("x", (2, 64))
    assert [t.name for t in Graph([x @ w.T, w]).nodes] == ["linear"]
    Graph(ow.input("w3", (2, 4, 64), "q8_0").swapaxes(0, 1))


def test_leaves_in_memory_without_addresses_never_lie_over_each_other():
    # Their buffers are Python objects, many of which lie side by side; the bytes are somewhere else.
    device = AsyncDevice()
    states = [ow.state(f"s{i}", (64, 64), device=device) for i in range(20)]
    written = [ow.assign(s, ow.input("x", (64, 64))) for s in states]
    assert len(ow.Graph(written).nodes) == 20
