"""Computing values again instead of keeping them: `ow.recompute`, and `Scheduler(memory_limit=...)`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave import registry
from opweave.graph.graph import Graph
from opweave_training import AdamW, Trainer

RNG = np.random.default_rng(8)
WIDTH, LAYERS = 32, 6


def layer(x, w):
    return ow.gelu(ow.linear(ow.rms_norm(x), w))


def network(again):
    """The gradients of a deep network, whose layers are computed again or kept; inputs and their values."""
    x = ow.input("x", (64, WIDTH))
    w = [ow.input(f"w{i}", (WIDTH, WIDTH)) for i in range(LAYERS)]
    h = x
    for each in w:
        h = ow.recompute(lambda y, each=each: layer(y, each), h) if again else layer(h, each)
    return x, ow.gradients(ow.mean(ow.square(h)), [x, *w])


def values(outputs):
    rng = np.random.default_rng(1)
    leaves = [t for t in Graph(outputs).leaves if t.leaf is not None and t.leaf.kind == "input"]
    leaves.sort(key=lambda t: t.name)  # their order is that of first use, which computing again may change
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype.numpy) for t in leaves}


def count(outputs, op):
    return [node.op.name for node in Graph(outputs).nodes if node.op is not None].count(op)


def run(outputs, device="cpu", **options):
    """What a program returns, and bytes of its temporaries."""
    with ow.Scheduler([device, "host"], **options) as scheduler:
        program = scheduler.build(outputs)
        return program.run(values(outputs)), sum(scheduler.buffer_size(d) for d in scheduler.devices)


@pytest.mark.parametrize("device", ["cpu", "opencl", "torch:cpu", "ort:cpu"])
def test_gradients_of_recomputed_parts_are_the_same_and_take_less_memory(device):
    (_, kept), (_, again) = network(False), network(True)
    assert count(again, "linear") == 2 * count(kept, "linear")
    want, all_of_it = run(kept, device)
    got, less = run(again, device)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)
    if device in ("cpu", "torch:cpu"):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        assert less < 0.75 * all_of_it


def test_parts_within_parts_and_tensors_from_outside():
    x, w = ow.input("x", (4, 8)), ow.input("w", (8, 8))

    def both(recompute):
        outside = ow.exp(w)

        def inner(y):
            return ow.tanh(y @ outside) * x

        def outer(y, z):
            return recompute(inner, ow.sin(y)) + ow.cos(z) * y

        return ow.gradients(ow.sum(recompute(outer, x * 2.0, x)), [x, w])

    (want, _), (got, _) = run(both(lambda f, *args: f(*args))), run(both(ow.recompute))
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert count(both(ow.recompute), "sin") == 2
    assert count(both(ow.recompute), "exp") == 1  # what does not depend on the arguments is kept


def test_a_part_that_reads_a_state_which_is_overwritten_reads_a_copy():
    s, x = ow.state("s", (3, 2), fill=2), ow.input("x", (3,))

    def loss(recompute):
        first = recompute(lambda y: ow.square(s[:, 1] * y) * s.T[0], x)
        later = ow.assign(s, ow.broadcast_to(ow.expand_dims(first, 1), (3, 2)))
        return ow.gradients(ow.sum(first * later[:, 0]), x)

    results = []
    for recompute in (lambda f, y: f(y), ow.recompute):
        ow.write(s, [[1, 2], [3, 4], [5, 6]])
        grad = loss(recompute)
        with ow.Scheduler("cpu") as scheduler:
            program = scheduler.build(grad)
            assert "before it is overwritten" in str(program.explain())
            results.append(program.run(x=np.array([1, -2, 3], np.float32)))
    assert np.array_equal(*results)
    # (s1² x² s0)², of which the derivative is 4 s1⁴ s0² x³.
    assert results[0].tolist() == [4 * 16 * 1, 4 * 256 * 9 * -8, 4 * 1296 * 25 * 27]


@pytest.mark.parametrize("wrong", [3, lambda x: 3], ids=["no function", "no tensor"])
def test_what_is_no_part_is_refused(wrong):
    with pytest.raises(ow.DTypeError, match="recompute"):
        ow.recompute(wrong, ow.input("x", (2,)))


# --- a limit of memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_a_limit_of_memory_is_kept_with_the_same_results(share):
    _, outputs = network(False)
    want, whole = run(outputs)
    got, less = run(outputs, memory_limit=int(share * whole))
    assert less <= share * whole
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_deep_stacks_keep_the_last_value_of_each_segment():
    """64 layers of which only some are kept, with each layer computed at most twice. In such a chain no value can be
    computed again unless the one before it is, too."""
    h = ow.input("stack", (64, WIDTH))
    w = [ow.input(f"stack{i}", (WIDTH, WIDTH)) for i in range(64)]
    for each in w:
        h = ow.tanh(ow.linear(h, each) * 0.1)
    outputs = ow.gradients(ow.mean(ow.square(h)), w[::-1])
    want, whole = run(outputs)
    results = sum(output.nbytes for output in outputs)
    limit = results + (whole - results) * 2 // 5
    with ow.Scheduler("cpu", memory_limit=limit) as scheduler:
        program = scheduler.build(outputs)
        got = program.run(values(outputs))
        assert scheduler.buffer_size("cpu") <= limit
        names = [node.op.name for node in program.partition.graph.nodes if node.op is not None]
    assert 64 < names.count("linear") <= 2 * 64
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_plan_within_the_limit_computes_nothing_again():
    _, outputs = network(False)
    with ow.Scheduler("cpu", memory_limit=1 << 30) as scheduler:
        assert scheduler.build(outputs).partition.graph.nodes == Graph(outputs).nodes


def test_cheap_values_are_computed_again_before_products():
    _, outputs = network(False)
    _, whole = run(outputs)
    with ow.Scheduler("cpu", memory_limit=int(0.9 * whole)) as scheduler:
        program = scheduler.build(outputs)
        names = [node.op.name for node in program.partition.graph.nodes if node.op is not None]
        assert names.count("linear") == LAYERS
        assert len(names) > len(Graph(outputs).nodes)
        # Nodes that now read what is computed again are still known by those of the graph as it was built.
        assert {program.device_of(node).name for node in Graph(outputs).nodes if not node.is_view} == {"cpu"}
        assert "gelu again" in str(program.explain()) or "rms_norm again" in str(program.explain())


def test_a_training_within_a_limit_learns_the_same():
    x = RNG.standard_normal((256, WIDTH)).astype(np.float32)
    data = {"x": x, "labels": x[:, :4].argmax(1).astype(np.int32)}
    first = [RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for _ in range(LAYERS)]
    ends: list[Any] = []
    sizes: list[int] = []
    for share in (1.0, 0.85):
        params = {f"w{i}": ow.state(f"w{i}", w.shape) for i, w in enumerate(first)}
        for param, value in zip(params.values(), first, strict=True):
            ow.write(param, value)

        def model(x):
            for w in params.values():  # noqa: B023
                x = layer(x, w)
            return x

        limit = None if share == 1 else int(share * sizes[0])
        with ow.Scheduler("cpu", memory_limit=limit) as scheduler:
            with Trainer(model, AdamW(params), 0.01, batch=128, devices=scheduler, clip_norm=1.0) as trainer:
                trainer.fit(data, 3)
            sizes.append(scheduler.buffer_size("cpu"))
        ends.append([ow.read(p) for p in params.values()])
    assert sizes[1] <= 0.85 * sizes[0]
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_graphs_keep_their_results(data):
    """Graphs with views, several readers and a state that is overwritten."""
    s = ow.state("s", (40, 30))
    made = [ow.input("x", (40, 30)), s * 2.0]
    for _ in range(data.draw(st.integers(4, 24))):
        a, b = (made[data.draw(st.integers(0, len(made) - 1))] for _ in range(2))
        kind = data.draw(st.sampled_from(["add", "mul", "tanh", "norm", "view", "matmul"]))
        if kind == "matmul":
            made.append(ow.tanh(a @ b.T @ a))
        elif kind == "view":
            made.append(ow.concat([a[20:], b[:20]]))
        else:
            made.append({"add": a + b, "mul": a * b, "tanh": ow.tanh(a), "norm": ow.rms_norm(a)}[kind])
    outputs = [made[-1], ow.assign(s, ow.tanh(made[len(made) // 2])), ow.sum(made[len(made) // 2] * made[2])]
    results = []
    for limit in (None, 0):
        ow.write(s, np.linspace(-1, 1, 1200).reshape(40, 30))
        with ow.Scheduler("cpu", memory_limit=limit) as scheduler:
            if limit == 0:
                limit = least_limit(scheduler, outputs)
        with ow.Scheduler("cpu", memory_limit=limit) as scheduler:
            results.append([*scheduler.build(outputs).run(values(outputs)), ow.read(s)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_value_that_is_only_read_late_is_computed_then_and_known_by_its_node():
    w, x = ow.weights({"w": np.ones((128, 128), "f4")})["w"], ow.input("x", (256, 256))
    early = ow.exp(w)
    y = early[::2] + ow.sum(ow.rms_norm(x) @ ow.rms_norm(x, eps=1e-3))
    with ow.Scheduler("cpu", memory_limit=0) as none:
        limit = least_limit(none, [y])
    with ow.Scheduler("cpu", memory_limit=limit) as scheduler:
        program = scheduler.build(y)
        assert "exp again" in str(program.explain())
        assert {program.device_of(node).name for node in (early, early[::2])} == {"cpu"}
        with program.observe(lambda tensor, value: None, [early]):
            program.run(x=np.ones((256, 256), "f4"))


def least_limit(scheduler, outputs):
    try:
        scheduler.build(outputs)
    except ow.AllocationError as error:
        return error.requested
    return 0


def test_a_limit_that_cannot_be_kept_is_an_error(monkeypatch):
    _, outputs = network(False)
    with ow.Scheduler("cpu", memory_limit=1000) as scheduler, pytest.raises(ow.AllocationError, match="memory_limit"):
        scheduler.build(outputs)
    with pytest.raises(ow.SchedulerError, match="memory_limit"):
        ow.Scheduler("cpu", memory_limit=-1)
    monkeypatch.setattr(registry.REGISTRY, "rewrites", dict)
    with pytest.raises(ow.SchedulerError, match="comes with opweave-training"):
        ow.Scheduler("cpu", memory_limit=1 << 20)
    monkeypatch.undo()
    with pytest.raises(ow.SchedulerError, match="memory_limit"):
        ow.Scheduler("cpu", memory_limit="1G")  # type: ignore[arg-type]
