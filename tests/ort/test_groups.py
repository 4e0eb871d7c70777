"""Splits as sessions: one for each structure, on the program's memory, with weights where they are."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.errors import chain_of
from opweave_ort.sessions import SESSIONS
from opweave_ort.stream import translated


@pytest.fixture
def scheduler(device):
    with ow.Scheduler(device) as made:
        yield made


def layers(w, n=3, name="x"):
    x = ow.input(name, (n, 8))
    y = ow.gelu(ow.linear(x, w["a"]))
    return ow.linear(ow.layer_norm(y + 1.0), w["b"]) + x


def weights(rng):
    return ow.weights({k: rng.standard_normal((8, 8)).astype(np.float32) for k in "ab"})


def reference(graph, **values):
    with ow.Scheduler(ow.device("host")) as host:
        return host.build(graph).run(**values)


def test_a_split_is_one_session_and_gives_the_references_result(scheduler):
    rng = np.random.default_rng(0)
    graph = layers(weights(rng))
    before = SESSIONS.made
    program = scheduler.build(graph)
    assert SESSIONS.made == before + 1
    x = rng.standard_normal((3, 8)).astype(np.float32)
    for factor in (1, 2):
        np.testing.assert_allclose(program.run(x=factor * x), reference(graph, x=factor * x), rtol=1e-4, atol=1e-5)


def test_the_same_structure_over_the_same_weights_makes_no_session(scheduler):
    rng = np.random.default_rng(1)
    w = weights(rng)
    program = scheduler.build(layers(w))
    before = SESSIONS.made
    again = scheduler.build(layers(w, name="y"))
    assert SESSIONS.made == before
    x = rng.standard_normal((3, 8)).astype(np.float32)
    assert np.array_equal(program.run(x=x), again.run(y=x))


def test_other_sizes_share_a_session_with_symbolic_lengths(scheduler):
    """The first size has a session for its shapes; the second opens it again for all, with one copy of the weights."""
    rng = np.random.default_rng(7)
    w = weights(rng)
    table = ow.weights({"places": rng.standard_normal((20, 8)).astype(np.float32)})
    before, programs = SESSIONS.made, {}

    def graph(n):
        y = layers(w, n) + table["places"][:n]
        q = ow.reshape(y, (1, n, 2, 4)).transpose(0, 2, 1, 3)
        return ow.attention(q, q, q, causal=True)

    count = SESSIONS.count()
    for n in (3, 5, 7, 12, 16):
        programs[n] = scheduler.build(graph(n))
        assert ("length" in str(programs[3].explain())) is (n > 3)
    assert SESSIONS.count() == count + 1
    assert SESSIONS.made == before + 2
    assert "for all values of 1 length" in str(programs[16].explain())
    for n, program in programs.items():
        x = rng.standard_normal((n, 8)).astype(np.float32)
        for _ in range(2):
            np.testing.assert_allclose(program.run(x=x), reference(graph(n), x=x), rtol=1e-3, atol=1e-4)


def test_constants_that_differ_in_value_become_inputs_of_a_shared_session(scheduler):
    x = ow.input("x", (2, 6))
    before = SESSIONS.made
    graphs = [ow.sum(x[:, n : n + 2] * 3.0, axis=1) for n in (0, 1, 2, 3, 4)]
    values = np.arange(12, dtype=np.float32).reshape(2, 6)
    programs = [scheduler.build(graph) for graph in graphs]
    assert SESSIONS.made <= before + 2
    for n, program in enumerate(programs):
        assert np.array_equal(program.run(x=values), 3 * values[:, n : n + 2].sum(1))


def test_a_constant_of_nan_finds_its_session_again(scheduler):
    before = SESSIONS.made
    for name in "ab":
        scheduler.build(ow.max_pool1d(ow.input(name, (1, 1, 6)), 2))
    assert SESSIONS.made == before + 1


def test_values_that_are_used_inside_and_handed_out(scheduler):
    x = ow.input("x", (4, 6))
    y = ow.exp(x)
    views = [y, y.T @ y, y[1:3, ::2] + 1.0, ow.sum(y, axis=0)]
    values = np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)
    got = scheduler.build(views).run(x=values)
    e = np.exp(values)
    for result, want in zip(got, (e, e.T @ e, e[1:3, ::2] + 1, e.sum(0)), strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-5)


def test_an_index_out_of_range_is_a_bounds_error(scheduler):
    program = scheduler.build(ow.embedding(ow.input("t", (5, 3)), ow.input("ids", (2,), "i64")))
    table = np.ones((5, 3), np.float32)
    for wrong in (5, -1):
        with pytest.raises(ow.ExecutionError) as caught:
            program.run(t=table, ids=np.array([0, wrong]))
        assert any(isinstance(error, ow.BoundsError) for error in chain_of(caught.value))
    assert np.array_equal(program.run(t=table, ids=np.array([0, 4])), table[:2])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("indices element out of data bounds, idx=7 must be within the inclusive range [-4,3]", ow.BoundsError),
        (
            "BFCArena::AllocateRawInternal Failed to allocate memory for a buffer of size 1024",
            ow.AllocationError,
        ),
        ("std::bad_alloc", ow.AllocationError),
        ("CUDA failure 700: an illegal memory access was encountered", ow.DeviceLostError),
    ],
)
def test_errors_of_onnx_runtime_become_ours(text, kind):
    error = translated(RuntimeError(text), "ort:cpu")
    assert isinstance(error, kind)
    if kind is ow.AllocationError and "1024" in text:
        assert error.requested == 1024
