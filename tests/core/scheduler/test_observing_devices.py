"""Observers, comparisons and pins on the shipped backends."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.graph.opdef import find_op
from opweave.graph.tensor import node
from opweave.runtime.host.device import HostDevice
from opweave_conformance import compare
from tests.support.devices import Separate
from tests.support.real_devices import real_device

device = real_device
F = np.float32


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


@pytest.fixture
def chain():
    x = ow.input("x", (4, 6))
    first = ow.linear(x, ow.weights({"w": array(6, 6)})["w"]).named("first")
    second = ow.relu(first).named("second")
    return x, first, second, (second * 2.0).named("third")


# --- observers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True])
def test_an_observer_reads_on_the_device_and_only_what_it_wants(device, chain, parallel):
    """`read` is what copies to the host: values that it is not called for stay where they are."""
    _, first, second, third = chain
    with ow.Scheduler([device, HostDevice()], parallel=parallel) as scheduler:
        program = scheduler.build(third)
        want, seen, kept = program.run(x=array(4, 6)), {}, []

        def look(node, value):
            assert value.device is device
            assert (value.arg.shape, value.arg.dtype) == (node.shape, node.dtype)
            seen[node] = value.read() if node is second else None
            kept.append(value)

        with program.observe(look, [first, second], on_device=True):
            assert np.array_equal(program.run(x=array(4, 6)), want)
    assert list(seen) == [first, second]
    np.testing.assert_allclose(seen[second], want / 2, rtol=1e-6)
    for value in kept:
        with pytest.raises(ow.LifetimeError, match="until its observer returns"):
            value.read()


def test_an_observer_is_asked_in_every_run(device, chain):
    """ggml's ``ask``: other nodes in each run, of a block that began once."""
    _, first, second, third = chain
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(third)
        want, asked, seen, wanted = program.run(x=array(4, 6)), [], [], []

        def ask(node):
            asked.append(node)
            return node in wanted

        with program.observe(lambda node, value: seen.append((node, value)), [first, second], ask=ask):
            for wanted in ([], [second], [first, second]):
                asked.clear()
                seen.clear()
                assert np.array_equal(program.run(x=array(4, 6)), want)
                assert asked == [first, second]
                assert [node for node, _ in seen] == wanted
    np.testing.assert_allclose(seen[1][1], want / 2, rtol=1e-6)


def test_nothing_is_downloaded_for_an_observer_that_does_not_read(chain, monkeypatch):
    device = Separate("card")
    downloads = []
    download = device._download
    monkeypatch.setattr(device, "_download", lambda *a: (downloads.append(a), download(*a)))
    _, first, second, third = chain
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(third)
        program.run(x=array(4, 6))
        plain = len(downloads)
        with program.observe(lambda node, value: None, [first, second], on_device=True):
            program.run(x=array(4, 6))
        assert len(downloads) == 2 * plain


def test_libraries_read_the_value_where_it_lies(chain):
    torch = pytest.importorskip("torch")
    _, first, _, third = chain
    seen = []
    with ow.Scheduler(HostDevice()) as scheduler:
        program = scheduler.build(third)

        def look(node, value):
            shown = torch.from_dlpack(value)
            seen.append((shown.data_ptr() == value.arg.address, shown.sum().item(), value.read().sum()))

        with program.observe(look, [first], on_device=True):
            program.run(x=array(4, 6))
    ((same, there, here),) = seen
    assert same
    np.testing.assert_allclose(there, here, rtol=1e-5)


def test_an_observer_ends_the_run(device, chain):
    *_, third = chain
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(third)
        want, seen = program.run(x=array(4, 6)), []
        with (
            program.observe(lambda node, value: bool(seen.append(node)) or len(seen) < 2, on_device=True),
            pytest.raises(ow.Cancelled, match="observer of"),
        ):
            program.run(x=array(4, 6))
        assert len(seen) == 2
        assert np.array_equal(program.run(x=array(4, 6)), want)


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_a_callback_gets_both_values_of_the_nodes_that_were_asked_for(device, chain):
    _, first, second, third = chain
    x, seen = array(4, 6), []
    found = compare(
        third, {"x": x}, second=device, nodes=[first, third], callback=lambda *given: seen.append(given)
    )  # fmt: skip
    assert found
    assert [row.node for row in found.nodes] == [first, third] == [node for node, *_ in seen]
    assert not found.ended
    assert len(found.outputs) == 1
    for _, one, two in seen:
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen[0][1], x @ array(6, 6).T, rtol=1e-4, atol=1e-5)
    assert [r.node for r in compare(third, {"x": x}, second=device, nodes=lambda node: node is second).nodes] == [
        second
    ]


def test_a_comparison_ends_early(device, chain):
    _, first, _, third = chain
    x = {"x": array(4, 6)}
    found = compare(third, x, second=device, callback=lambda node, one, two: False)
    assert [row.node for row in found.nodes] == [first]
    assert found.ended
    assert not found.outputs
    assert "ended early" in str(found)
    strict = compare(third, x, second=device, allowed=-1, stop_at_first=True)
    assert len(strict.nodes) == 1
    assert strict.first_divergence.node is first
    assert strict.ended


def test_states_keep_their_values_when_a_comparison_ends_early(device):
    total = ow.state("total", (4, 6), fill=1)
    output = ow.neg(ow.assign(total, total + ow.input("x", (4, 6))))
    compare(output, {"x": array(4, 6)}, second=device, callback=lambda *given: False)
    assert (ow.read(total) == 1).all()


def test_what_was_not_computed_has_no_second_value(chain):
    _, first, _, third = chain
    seen = {}
    found = compare(third, {"x": array(4, 6)}, second=Separate("few", ["mul", "scale", "relu"]),
                       callback=lambda node, one, two: seen.update({node: two}))  # fmt: skip
    assert seen[first] is None
    assert seen[third] is not None
    assert not found.ended
    with pytest.raises(ow.SchedulerError, match="not computed by this graph"):
        compare(third, {"x": array(4, 6)}, second=HostDevice(), nodes=[ow.exp(first)])


# --- pins of leaves ---------------------------------------------------------------------------------------------------


def test_an_input_is_fed_where_it_is_pinned_and_a_state_lies_there(device):
    check_pins(device, "priority")


def test_pins_of_leaves_hold_where_nodes_are_placed_by_cost():
    check_pins(Separate("card"), "cost")


def check_pins(device, placement):
    x, total = ow.input("x", (4, 6)), ow.state("total", (4, 6))
    updated = ow.assign(total, total + x)
    host = HostDevice()
    with ow.Scheduler([device, host], placement=placement) as scheduler:
        for tensor, where in ((x, device), (total, host)):
            scheduler.pin(tensor, where)
        program = scheduler.build([updated, ow.neg(x)], pins={ow.neg(x): host})
        assert program.device_of(x) is device
        assert program.partition.assignment.causes[x] == program.partition.assignment.causes[total] == "pinned"
        assert program.device_of(updated) is host
        assert total.placement.buffer.device is host
        for n in (1, 2):
            got, negative = program.run(x=array(4, 6))
            np.testing.assert_allclose(got, n * array(4, 6), rtol=1e-6)
            assert np.array_equal(negative, -array(4, 6))
        scheduler.pin(x, None)
        with pytest.raises(ow.SchedulerError, match="cannot be pinned to"):
            scheduler.pin(total, device)
        w = ow.weights({"w": array(4, 6)})["w"]
        with pytest.raises(ow.SchedulerError, match="place weights when making them"):
            scheduler.pin(w, device)


def test_most_bytes_are_where_a_pinned_input_is_fed():
    x = ow.input("x", (4, 6))
    devices = [Separate("a"), Separate("b")]
    with ow.Scheduler(devices) as scheduler:
        assert scheduler.partition(ow.neg(x)).device_of(ow.neg(x)) is devices[0]
        plan = scheduler.partition(ow.neg(x), pins={x: "b"})
        assert plan.device_of(ow.neg(x)) is devices[1]
        assert plan.cause_of(ow.neg(x)) == "most-inputs"
        assert plan.n_copies == 0


def test_a_concat_whose_pieces_come_from_another_device_is_shown():
    one, two = Separate("pieces"), Separate("gathers")
    x = ow.input("x_concat_shown", (2, 3))
    pieces = [ow.neg(x), ow.relu(x)]
    out = ow.concat(pieces, 0)
    value = np.arange(6, dtype=np.float32).reshape(2, 3) - 3
    with ow.Scheduler([one, two]) as scheduler:
        program = scheduler.build(out, pins={pieces[0]: one, pieces[1]: one, out: two})
        assert not any(step.node is out for split in program.splits for step in split.steps)
        seen: dict[ow.Tensor, np.ndarray] = {}
        with program.observe(seen.__setitem__):
            got = program.run(x_concat_shown=value)
    assert set(seen) == {*pieces, out}
    np.testing.assert_array_equal(seen[out], got)


def test_pieces_of_another_type_are_not_copied_to_their_places_in_a_concat():
    """As in a saved graph; builders convert them. A copy moves bytes and converts nothing."""
    one, host = Separate("typed_pieces"), HostDevice()
    x, y = ow.input("x_concat_typed", (2, 3)), ow.input("y_concat_typed", (2, 3), "f16")
    out = node(find_op("concat"), (ow.neg(x), y), {"axis": 0})
    value = np.arange(6, dtype=np.float32).reshape(2, 3) - 3
    with ow.Scheduler([one, host]) as scheduler:
        program = scheduler.build(out, pins={ow.neg(x): one, y: one, out: host})
        got = program.run({x: value, y: value.astype(np.float16)})
    np.testing.assert_array_equal(got, np.concatenate([-value, value]))
