"""Graphs with weights in shards: equal to the same graphs on one device, in every operation that can be cut."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.graph import Graph
from opweave.ops.matmul import LINEAR
from opweave.sharding.sharded_graph import shard_graph
from opweave.sharding.values import NO_LINKS

COUNT = 4  # devices of the fixture `cpus`


def integers(rng: np.random.Generator, *shape: int, dtype: str = "f4") -> np.ndarray[Any, Any]:
    """Small integers, of which sums are exact in every float type that the tests use."""
    return rng.integers(-2, 3, shape).astype(dtype)


def both(devices, build, arrays, sharded, feeds):
    """The outputs with weights in shards and whole, and the program with shards."""
    with ow.Scheduler(devices) as several, ow.Scheduler(devices[0]) as one:
        program = several.build(build(ow.weights(arrays, device=sharded)))
        whole = one.build(build(ow.weights(arrays)))
        return program.run(feeds), whole.run(feeds), program.explain()


# --- blocks of a transformer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("rows", [3, 300])
def test_an_mlp_needs_one_collective(cpus, count, rows):
    devices, rng = cpus[:count], np.random.default_rng(count)
    arrays = {"up": integers(rng, 96, 48), "bias": integers(rng, 96), "down": integers(rng, 48, 96),
              "shift": integers(rng, 48)}  # fmt: skip
    x = ow.input("x_mlp", (rows, 48))

    def mlp(w):
        return x + ow.linear(ow.relu(ow.linear(x, w["up"], w["bias"])), w["down"], w["shift"])

    by = {"up": ow.Sharded(devices), "bias": ow.Sharded(devices), "down": ow.Sharded(devices, axis=1)}
    got, want, why = both(devices, mlp, arrays, by, {"x_mlp": integers(rng, rows, 48)})
    assert np.array_equal(got, want)
    # Only the input and the partial sums cross: one all-reduce.
    crossing = sum(copy.nbytes for copy in why.copies if copy.source != copy.target)
    assert crossing <= 2 * count * rows * 48 * 4
    products = [node for node in why.nodes if node.op == "linear"]
    for tensor, axis in (("up", 0), ("down", 1)):
        assert f"shards {tensor} f32" in str(why)
        assert f"axis {axis}: {devices[0].name} {96 // count}, {devices[1].name} {96 // count}" in str(why)
    assert sorted(node.device for node in products) == sorted(2 * [device.name for device in devices])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_partial_sums_in_half_types_are_rounded_once(cpus, dtype, bias):
    """Also where a partial sum is beyond the type's largest number, as one device's sum is not in between."""
    rng, made = np.random.default_rng(0), as_dtype(dtype).numpy
    w = rng.standard_normal((5, 96)).astype(made)
    w[0, :48], w[0, 48:] = 3000, -3000
    x = np.ones((2, 96), made)
    arrays = {"w": w} | ({"b": rng.standard_normal(5).astype(made)} if bias else {})
    want = x.astype(np.float64) @ w.astype(np.float64).T + (arrays["b"].astype(np.float64) if bias else 0)

    def build(weights):
        return ow.linear(ow.input("x_half", (2, 96), dtype), *weights.values())

    for count in (2, 3):
        by = {"w": ow.Sharded(cpus[:count], axis=1)}
        got, _, why = both(cpus[:count], build, arrays, by, {"x_half": x})
        assert got.dtype == made
        np.testing.assert_allclose(got.astype(np.float64), want.astype(made).astype(np.float64), rtol=1e-2, atol=1e-2)
        assert [node.dtype for node in why.nodes if node.op == "linear"] == ["f32"] * count


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_partial_sums_of_matrix_products_in_half_types_are_rounded_once(cpus, dtype, lead):
    """Also where a partial sum is beyond the type's largest number."""
    rng, made = np.random.default_rng(0), as_dtype(dtype).numpy
    w = rng.standard_normal((*lead, 96, 5)).astype(made)
    w[..., :48, 0], w[..., 48:, 0] = 3000, -3000
    x = np.ones((*lead, 2, 96), made)
    want = (x.astype(np.float64) @ w.astype(np.float64)).astype(made)

    def build(weights):
        return ow.matmul(ow.input("x_half_matrix", x.shape, dtype), weights["w"])

    by = {"w": ow.Sharded(cpus[:2], axis=len(lead))}
    got, _, why = both(cpus[:2], build, {"w": w}, by, {"x_half_matrix": x})
    assert got.dtype == made
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-2, atol=1e-2)
    assert [node.dtype for node in why.nodes if node.op == "matmul"] == ["f32"] * 2


def test_devices_without_products_of_mixed_types_round_partial_sums(cpus):
    devices = cpus[:2]
    w = ow.weights({"w": np.ones((4, 8), np.float16)}, device=ow.Sharded(devices, axis=1))["w"]
    graph = Graph([ow.linear(ow.input("x_narrow", (2, 8), "f16"), w)])
    for links, dtype in ((NO_LINKS, "f32"), (NO_LINKS._replace(runs=lambda *_: False), "f16")):
        new = shard_graph(graph, {}, links).graph
        assert [node.dtype.name for node in new.nodes if node.op is LINEAR] == [dtype] * 2
        assert [output.dtype.name for output in new.outputs] == ["f16"]


def attention_block(w, x, heads, groups, size):
    tokens = x.shape[0]

    def of_heads(rows, number):
        return ow.transpose(ow.reshape(rows, (1, tokens, number, size)), (0, 2, 1, 3))

    q, k, v = (of_heads(ow.linear(x, w[name]), n) for name, n in (("q", heads), ("k", groups), ("v", groups)))
    seen = ow.attention(q, k, v, causal=True)
    return ow.linear(ow.reshape(ow.transpose(seen, (0, 2, 1, 3)), (tokens, heads * size)), w["o"])


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 3), (8, 2)])
def test_attention_stays_split_by_heads_with_groups_together(cpus, heads, groups):
    size, width, rng = 8, 40, np.random.default_rng(heads)
    devices = cpus[: min(groups, 3)]
    arrays = {
        "q": rng.standard_normal((heads * size, width), "f4"), "k": rng.standard_normal((groups * size, width), "f4"),
        "v": rng.standard_normal((groups * size, width), "f4"), "o": rng.standard_normal((width, heads * size), "f4"),
    }  # fmt: skip
    x = ow.input("x_attention", (5, width))
    each = size * heads // groups
    by = {"q": ow.Sharded(devices, multiple=each), "[kv]": ow.Sharded(devices, multiple=size),
          "o": ow.Sharded(devices, axis=1, multiple=each)}  # fmt: skip
    feeds = {"x_attention": rng.standard_normal((5, width), "f4")}
    got, want, why = both(devices, lambda w: attention_block(w, x, heads, groups, size), arrays, by, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert sum(node.op == "attention" for node in why.nodes) == len(devices)
    assert not any(node.op == "concat" for node in why.nodes)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_experts_are_split_by_experts_or_by_their_rows_or_columns(cpus, axis):
    devices, rng = cpus[:2], np.random.default_rng(axis)
    arrays = {"w": integers(rng, 6, 16, 8)}
    x, ids = ow.input("x_experts", (5, 8)), ow.input("ids_experts", (5, 2), "i32")
    feeds = {"x_experts": integers(rng, 5, 8), "ids_experts": rng.integers(0, 6, (5, 2)).astype("i4")}
    got, want, why = both(
        devices, lambda w: ow.expert_linear(x, w["w"], ids), arrays, ow.Sharded(devices, axis=axis, multiple=1), feeds
    )
    assert np.array_equal(got, want)
    assert sum(node.op == "expert_linear" for node in why.nodes) == 2


@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_table_is_split_by_rows_or_columns(cpus, axis, dtype):
    devices, rng = cpus[:3], np.random.default_rng(axis)
    arrays = {"table": rng.integers(-99, 99, (13, 12)).astype(dtype)}
    ids = ow.input("ids_table", (2, 7), "i64")
    feeds = {"ids_table": rng.integers(0, 13, (2, 7))}
    got, want, _ = both(devices, lambda w: ow.embedding(w["table"], ids), arrays, ow.Sharded(devices, axis=axis), feeds)
    assert got.dtype == want.dtype
    assert np.array_equal(got, want)


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "i32"])
@pytest.mark.parametrize("axis", [0, 1])
def test_products_of_every_dtype(cpus, axis, dtype):
    devices, rng = cpus[:3], np.random.default_rng(7)
    x = ow.input("x_dtypes", (4, 48), dtype)
    kind = x.dtype.numpy
    arrays = {"w": integers(rng, 40, 48).astype(kind), "b": integers(rng, 40).astype(kind)}
    got, want, _ = both(
        devices, lambda w: ow.linear(x, w["w"], w["b"]), arrays, {"w": ow.Sharded(devices, axis=axis)},
        {"x_dtypes": integers(rng, 4, 48).astype(kind)},
    )  # fmt: skip
    assert got.dtype == want.dtype
    assert np.array_equal(got, want)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k"])
@pytest.mark.parametrize("axis", [0, 1])
def test_quantized_weights_are_cut_at_whole_blocks(cpus, axis, kind):
    devices, rng = cpus[:2], np.random.default_rng(3)
    blocks = ow.quantize(rng.standard_normal((24, 1024), "f4"), kind)
    x = ow.input("x_blocks", (3, 1024))
    feeds = {"x_blocks": rng.standard_normal((3, 1024), "f4")}
    shares = ow.Sharded({devices[0]: 3, devices[1]: 1}, axis=axis)
    got, want, _ = both(devices, lambda w: ow.linear(x, w["w"]), {"w": blocks}, shares, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    leaf = ow.weights({"w": blocks}, device=shares)["w"].leaf
    assert leaf is not None
    assert leaf.shards is not None
    parts = leaf.shards.parts
    read = np.concatenate([ow.read(part) for part in parts], axis)
    assert np.array_equal(read, np.asarray(blocks.data).reshape(read.shape))


# --- random graphs --------------------------------------------------------------------------------------------------

FACTS = {"width": 24, "rows": 6}


class Steps:
    """Makes a random graph on integers: values stay in -3 .. 3, so that every sum is exact."""

    def __init__(self, draw, weights, x):
        self.draw, self.weights, self.values = draw, weights, [x]

    def pick(self):
        return self.values[self.draw(st.integers(max(0, len(self.values) - 3), len(self.values) - 1))]

    def step(self, number):
        a, b = self.pick(), self.pick()
        rows, width = FACTS["rows"], FACTS["width"]
        w, v = self.weights[f"w{number}"], self.weights[f"v{number}"]
        kind = self.draw(st.sampled_from(
            ["linear", "bias", "matmul", "add", "mul", "relu", "heads", "max", "mean", "rows", "concat", "where",
             "softmax", "matmul_rows", "weight"]))  # fmt: skip
        made = {
            "linear": lambda: ow.linear(a, w),
            "bias": lambda: ow.linear(a, w, v),
            "matmul": lambda: ow.matmul(a, w),
            "add": lambda: a + b,
            "mul": lambda: a * b,
            "relu": lambda: ow.relu(a) - v,
            "heads": lambda: ow.reshape(ow.transpose(ow.reshape(a, (rows, 3, width // 3)), (1, 0, 2)), (rows, width)),
            "max": lambda: a + ow.max(b, axis=self.draw(st.integers(0, 1)), keepdims=True),
            "mean": lambda: a + ow.sum(b, axis=self.draw(st.integers(0, 1)), keepdims=True),
            "rows": lambda: ow.linear(ow.matmul(a, ow.transpose(b)), w[:, :rows]),
            "concat": lambda: ow.concat([a[:, 8:], b[:, :8]], 1),
            "where": lambda: ow.where(a > b, v, a),
            "softmax": lambda: ow.where(ow.softmax(a) > 0.5, a, b),
            "matmul_rows": lambda: ow.matmul(ow.matmul(a, ow.transpose(b)), b),
            "weight": lambda: a + w[:rows] * v,
        }[kind]()
        self.values.append(ow.minimum(ow.maximum(made, -3.0), 3.0))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_graphs_with_random_shardings_equal_one_device(cpus, data):
    draw = data.draw
    count, depth = draw(st.integers(2, COUNT)), draw(st.integers(1, 6))
    devices = draw(st.permutations(cpus))[:count]
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    arrays: dict[str, Any] = {}
    by: dict[str, ow.Sharded] = {}
    for i in range(depth):
        arrays |= {f"w{i}": integers(rng, 24, 24), f"v{i}": integers(rng, 24)}
        for name, axes in ((f"w{i}", 2), (f"v{i}", 1)):
            multiple = draw(st.sampled_from([None, 2]))
            axis = draw(st.integers(-1, axes - 1))
            shares = {d: draw(st.integers(1, 4)) for d in devices[: draw(st.integers(2, count))]}
            if axis >= 0:
                by[name] = ow.Sharded(shares if draw(st.booleans()) else devices, axis, multiple=multiple)
    if not by:
        return
    x = ow.input("x_random", (FACTS["rows"], FACTS["width"]))
    choices: list[Any] = []

    def build(w):
        steps = Steps(draw if not choices else replay(choices), w, x)
        steps.draw = steps.draw if choices else recording(draw, choices)
        for i in range(depth):
            steps.step(i)
        return [steps.values[-1], steps.values[depth // 2]]

    got, want, _ = both(devices, build, arrays, by, {"x_random": integers(rng, 6, 24)})
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


def recording(draw, choices):
    def drawn(strategy):
        choices.append(draw(strategy))
        return choices[-1]

    return drawn


def replay(choices):
    given_again = iter(choices)
    return lambda strategy: next(given_again)


# --- devices of several backends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 700])
@pytest.mark.parametrize("others", [("torch:cpu",), ("opencl",), ("opencl", "torch:cpu")], ids=str)
def test_parts_lie_on_devices_of_several_backends(cpus, others, rows, monkeypatch):
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", "1")
    registry = ow.Registry()
    try:
        devices = [*[registry.device(name) for name in others], cpus[0]]
    except (ow.UnknownNameError, ow.PluginError) as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(rows)
    arrays = {"up": integers(rng, 96, 48), "bias": integers(rng, 96), "gate": integers(rng, 96, 48),
              "down": integers(rng, 48, 96)}  # fmt: skip
    x = ow.input(f"x_backends_{rows}", (rows, 48))

    def mlp(w):
        gated = ow.relu(ow.linear(x, w["up"], w["bias"])) * ow.linear(x, w["gate"])
        return x + ow.linear(gated, w["down"])

    by = {"down": ow.Sharded(devices, axis=1), "*": ow.Sharded(devices)}
    got, want, why = both(devices, mlp, arrays, by, {x.key: integers(rng, rows, 48)})
    assert np.array_equal(got, want)
    assert {node.device for node in why.nodes if node.op == "linear"} == {device.name for device in devices}


def test_a_limit_of_memory_keeps_what_is_known_of_shards(cpus):
    """What is computed again makes another graph: its collectives, its weights and the tensors that stand in for those
    of the caller's graph are still known, and an observer sees the same placement."""
    devices, rng, width, rows = cpus[:2], np.random.default_rng(7), 32, 64
    arrays = {f"w{i}": integers(rng, width, width) for i in range(12)}
    x = ow.input("x_limit", (rows, width))
    feeds, layers = {"x_limit": integers(rng, rows, width)}, [x]
    for weight in ow.weights(arrays, device={"*": ow.Sharded(devices)}).values():
        layers.append(ow.tanh(ow.linear(layers[-1], weight) * 0.01))
    output = ow.gradients(ow.mean(ow.square(layers[-1])), [x])[0]

    def known(program):
        annotated, found = program.partition.annotated, {}
        for i, layer in enumerate(layers):  # of some layers there are only parts
            with suppress(ow.SchedulerError):
                found[i] = program.device_of(layer)
        return len(annotated.sharded), len(annotated.collectives) > 0, found

    with ow.Scheduler(devices) as scheduler:
        program = scheduler.build(output)
        want, facts = program.run(feeds), known(program)
        size = sum(scheduler.buffer_size(device.name) for device in devices)
    assert facts[:2] == (12, True)
    with ow.Scheduler(devices, memory_limit=int(0.85 * size)) as scheduler:
        program = scheduler.build(output)
        again = [node for node in program.partition.graph.nodes if node.name.endswith(" again")]
        assert again
        assert {program.partition.assignment.causes[node] for node in again} >= {"shard"}, "beside the parts"
        assert known(program) == facts
        assert "shards w0 f32" in str(program.explain())
        shown: list[ow.Tensor] = []
        with program.observe(lambda node, value: shown.append(node), again[:2]):
            assert np.array_equal(program.run(feeds), want)
        assert shown == again[:2]
        assert np.array_equal(program.run(feeds), want)
    # Where nearly all is computed again, there are collectives over views of what only late readers read.
    with ow.Scheduler(devices, memory_limit=size // 2) as scheduler, pytest.raises(ow.AllocationError, match="again"):
        scheduler.build(output)
