"""Placed weights and states, the host's references, and boundaries between devices: where nodes go, what is copied."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Kind
from opweave.runtime.host.device import HostDevice
from tests.support.devices import BASIC, Beside, Member, Plain, Separate
from tests.support.evaluate import evaluate
from tests.support.random_graphs import ALL_OPS, Case

OPS = (*BASIC, "layer_norm", "rms_norm", "softmax", "cast", "sum", "embedding")
ROWS, SIZE = 8, 16
RNG = np.random.default_rng(0)
VALUES = RNG.integers(-2, 3, (ROWS, SIZE)).astype(np.float32)


def separate(name: str, **options: Any) -> Separate:
    device = Separate(name, OPS, **options)
    return device


def plan(outputs, *devices, pins=None, **options):
    return ow.Scheduler(list(devices), **options).partition(outputs, pins)


def where(planned, *tensors):
    return [planned.device_of(t).name for t in tensors]


def encoder(layers: int, place) -> tuple[ow.Tensor, list[dict[str, ow.Tensor]], dict[str, np.ndarray]]:
    """Layers as in BERT: norm(x + linear(x)); ``place(layer)`` is where all weights of a layer lie."""
    h = ow.input("x", (ROWS, SIZE))
    found: list[dict[str, ow.Tensor]] = []
    arrays: dict[str, np.ndarray] = {}
    for i in range(layers):
        made = {
            f"w{i}": RNG.integers(-2, 3, (SIZE, SIZE)).astype(np.float32),
            f"b{i}": RNG.integers(-2, 3, SIZE).astype(np.float32),
            f"g{i}": RNG.integers(-2, 3, SIZE).astype(np.float32),
            f"s{i}": RNG.integers(-2, 3, SIZE).astype(np.float32),
        }
        arrays |= made
        w = ow.weights(made, device=place(i))
        nodes: dict[str, ow.Tensor] = {"linear": ow.linear(h, w[f"w{i}"])}
        nodes["bias"] = nodes["linear"] + w[f"b{i}"]
        nodes["add"] = nodes["bias"] + h
        nodes["norm"] = h = ow.layer_norm(nodes["add"], w[f"g{i}"], w[f"s{i}"])
        found.append(nodes)
    return h, found, arrays


def weights_copied(planned) -> list[str]:
    roots = [copy.tensor.root for copy in planned.copies]
    return [root.name for root in roots if root.leaf is not None and root.leaf.kind == "weight"]


class TestPlacedWeights:
    @pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
    def test_every_node_of_a_layer_stays_with_its_weights(self, order):
        devices = {name: separate(name) for name in "ab"}
        y, layers, _ = encoder(4, lambda i: devices["ab"[i % 2]])
        with ow.Scheduler([devices[n] for n in order]) as scheduler:
            program = scheduler.build(y)
            for i, nodes in enumerate(layers):
                assert where(program, nodes["linear"], nodes["bias"], nodes["norm"]) == ["ab"[i % 2]] * 3
            assert weights_copied(program.partition) == [], "no weight is copied in each run"
            assert {c.cause for c in program.partition.copies} == {"transfer"}
            host = ow.compile(y, devices=["host"])
            np.testing.assert_array_equal(program.run(x=VALUES), host(x=VALUES))

    def test_vectors_decide_where_nothing_larger_does(self):
        a, b = separate("a"), separate("b")
        x = ow.input("x", (ROWS, SIZE))
        w = ow.weights({"w": np.eye(SIZE, dtype="f")}, device=a)["w"]
        g = ow.weights({"g": np.ones(SIZE, "f"), "s": np.zeros(SIZE, "f")}, device=b)
        normed = ow.layer_norm(ow.linear(x, w), g["g"], g["s"])
        planned = plan(ow.linear(normed, w), a, b)
        assert (where(planned, normed), planned.cause_of(normed)) == (["b"], "weights")

    def test_what_its_device_does_not_run_goes_elsewhere(self):
        a, b = separate("a"), Separate("b", ["linear"])
        g = ow.weights({"g": np.ones(SIZE, "f")}, device=b)["g"]
        x = ow.input("x", (ROWS, SIZE))
        y = ow.rms_norm(x, g)
        planned = plan(y, b, a)
        assert where(planned, y) == ["a"]
        assert weights_copied(planned) == ["g"]

    def test_of_several_weights_the_largest_that_a_device_runs_with_decides(self):
        a, b = Separate("a", ["exp"]), separate("b")
        x = ow.input("x", (ROWS, SIZE))
        w = ow.weights({"w": np.eye(SIZE, dtype="f"), "b": np.ones(SIZE, "f")}, device={"w": a, "b": b})
        y = ow.linear(x, w["w"], w["b"])
        planned = plan(y, a, b, separate("c"))
        assert (where(planned, y), planned.cause_of(y)) == (["b"], "weights")

    def test_a_device_that_shares_the_memory_runs_what_the_one_that_holds_them_does_not(self):
        holder, beside, other = Plain("holder", ["exp"]), Beside("beside", OPS), separate("other")
        x = ow.input("x", (ROWS, SIZE))
        w = ow.weights({"w": np.eye(SIZE, dtype="f")}, device=holder)["w"]
        y = ow.linear(x, w)
        planned = plan(y, other, holder, beside)
        assert where(planned, y) == ["beside"]
        assert planned.n_copies == 0

    def test_a_small_table_of_several_nodes_goes_to_its_readers(self):
        """Frequencies lie on one device; each layer multiplies by them where its own weights are."""
        a, b = separate("a"), separate("b")
        h = ow.input("x", (ROWS, SIZE))
        table = ow.weights({"table": np.ones(SIZE, "f")}, device=a)["table"]
        turned = []
        for i in range(4):
            w = ow.weights({f"w{i}": np.eye(SIZE, dtype="f"), f"v{i}": np.eye(SIZE, dtype="f")}, device=(a, b)[i // 2])
            turned.append(ow.linear(h, w[f"w{i}"]) * table)
            h = ow.linear(turned[-1], w[f"v{i}"])
        planned = plan(h, a, b)
        assert where(planned, *turned) == ["a", "a", "b", "b"]
        assert [planned.cause_of(t) for t in turned[2:]] == ["expand-down"] * 2
        assert weights_copied(planned) == ["table"], "once a run, for both"

    def test_a_small_table_decides_where_nothing_else_does(self):
        a, b = separate("a"), separate("b")
        table = ow.weights({"table": np.ones(SIZE, "f")}, device=b)["table"]
        x = ow.input("x", (ROWS, SIZE))
        y = ow.exp(x * table) * table
        planned = plan(y, a, b)
        assert {s.target.name for s in planned.splits} == {"b"}
        assert planned.n_copies == 0
        assert planned.cause_of(y.srcs[0].srcs[0]) == "most-inputs"

    def test_a_small_table_does_not_decide_for_a_node_that_reads_another_weight(self):
        a, b = separate("a"), separate("b")
        w = ow.weights({"table": np.ones(SIZE, "f"), "shift": np.ones(SIZE, "f")}, device={"table": a, "shift": b})
        first = ow.exp(ow.input("x", (ROWS, SIZE)) * w["table"])
        y = ow.layer_norm(first, w["table"], w["shift"])
        planned = plan(y, a, b)
        assert (where(planned, y), planned.cause_of(y)) == (["b"], "weights")

    def test_a_small_table_decides_for_products(self):
        a, b = separate("a"), separate("b")
        table = ow.weights({"table": np.ones((1, SIZE), "f")}, device=b)["table"]
        h = ow.exp(ow.input("x", (ROWS, SIZE)))
        products = [ow.linear(h, table), ow.linear(ow.neg(h), table)]
        planned = plan(products, a, b, pins={h: a})
        assert where(planned, *products) == ["b", "b"]

    def test_a_large_weight_of_several_nodes_decides(self):
        a, b = separate("a"), separate("b")
        shared = ow.weights({"w": np.eye(SIZE, dtype="f")}, device=b)["w"]
        own = ow.weights({f"w{i}": np.eye(SIZE, dtype="f") for i in range(2)}, device=a)
        x = ow.input("x", (ROWS, SIZE))
        first = ow.linear(ow.linear(x, own["w0"]), shared)
        second = ow.linear(ow.linear(first, own["w1"]), shared)
        assert where(plan(second, a, b), first, second) == ["b", "b"]


class TestHost:
    def test_it_computes_only_what_nobody_else_can(self):
        beside, host = Beside("beside", OPS), HostDevice()
        y, _, _ = encoder(3, lambda i: host)
        odd = ow.custom(lambda a: a * 2, y, like=y)
        with ow.Scheduler([beside, host]) as scheduler:
            program = scheduler.build(ow.exp(odd))
            assert [s.target.name for s in program.splits] == ["beside", host.name, "beside"]
            assert program.splits[1].nodes == [odd]
            assert program.partition.assignment.causes[odd] == "host"
            assert program.n_copies == 0

    def test_also_where_it_is_named_first(self):
        x = ow.input("x", (ROWS, SIZE))
        assert where(plan(ow.exp(x), HostDevice(), Plain("cpu")), ow.exp(x)) == ["cpu"]

    def test_alone_it_computes_everything(self):
        y, _, _ = encoder(1, lambda i: "host")
        assert plan(y, "host").splits[0].target.device.kind is Kind.HOST

    def test_weights_in_its_memory_are_brought_to_a_device_that_computes(self):
        gpu, host = separate("gpu"), HostDevice()
        y, layers, _ = encoder(3, lambda i: host)
        with ow.Scheduler([gpu, host]) as scheduler:
            program = scheduler.build(y)
            assert {s.target.name for s in program.splits} == {"gpu"}
            assert len(program.splits) == len(layers), "a split for each matrix, so that one's memory serves the next"
            assert {c.cause for c in program.partition.copies} == {"weight-fetch"}
            np.testing.assert_array_equal(program.run(x=VALUES), ow.compile(y, devices=["host"])(x=VALUES))

    def test_they_stay_where_bringing_them_is_not_allowed(self):
        gpu, host = separate("gpu"), HostDevice()
        y, layers, _ = encoder(2, lambda i: host)
        planned = plan(y, gpu, host, op_offload=False)
        assert where(planned, layers[0]["linear"], layers[1]["norm"]) == [host.name] * 2
        assert planned.cause_of(layers[0]["linear"]) == "weights"
        assert weights_copied(planned) == []

    def test_a_state_in_its_memory_is_written_there(self):
        gpu, host = separate("gpu"), HostDevice()
        cache = ow.state("cache", (ROWS, SIZE), device=host)
        x = ow.input("x", (ROWS, SIZE))
        written = ow.assign(cache, ow.exp(x))
        planned = plan(written, gpu, host)
        assert where(planned, written.srcs[1], written) == ["gpu", host.name]
        assert [c.cause for c in planned.copies] == ["transfer"]

    def test_a_result_that_the_caller_placed_there_is_computed_elsewhere_and_written_back(self):
        gpu, host = separate("gpu"), HostDevice()
        x = ow.input("x", (ROWS, SIZE))
        y = ow.neg(x)
        buffer = host.alloc(y.nbytes)
        with ow.Scheduler([gpu, host]) as scheduler:
            program = scheduler.build(y, placements=[ow.place(y, buffer, 0)])
            assert where(program, y) == ["gpu"]
            assert [c.cause for c in program.partition.copies] == ["write-back"]
            np.testing.assert_array_equal(program.run(x=VALUES), -VALUES)


class TestOffload:
    def test_weights_in_host_memory_are_brought_to_a_device_that_wants_them_norms_with_them(self):
        """No norm is left on another device with its vector: its values would be copied twice."""
        gpu, cpu = separate("gpu", offload=["linear"]), Plain("cpu", OPS)
        y, layers, _ = encoder(4, lambda i: "host")
        with ow.Scheduler([gpu, cpu]) as scheduler:
            program = scheduler.build(y)
            assert [program.partition.assignment.causes[n["linear"]] for n in layers] == ["offload"] * 4
            assert {s.target.name for s in program.splits[:-1]} == {"gpu"}
            causes = {c.cause for c in program.partition.copies}
            assert causes <= {"weight-fetch", "transfer"}
            assert sum(c.cause == "transfer" for c in program.partition.copies) <= 1
            np.testing.assert_array_equal(program.run(x=VALUES), ow.compile(y, devices=["host"])(x=VALUES))

    def test_of_two_devices_the_one_that_wants_weights_gets_them(self):
        """Also where the other one comes first, and could run the step."""
        cpu, x = Plain("cpu", OPS), ow.input("x", (ROWS, SIZE))
        data = RNG.integers(-2, 3, (SIZE, SIZE)).astype(np.float32)
        fed = RNG.integers(-2, 3, (ROWS, SIZE)).astype(np.float32)
        for wanting in (0, 1):
            gpus = [separate(f"gpu{i}", offload=["linear"] if i == wanting else []) for i in range(2)]
            y = ow.linear(x, ow.weights({"w": data}, device=cpu)["w"])
            with ow.Scheduler([*gpus, cpu]) as scheduler:
                program = scheduler.build(y)
                assert where(program, y) == [f"gpu{wanting}"]
                assert program.partition.assignment.causes[y] == "offload"
                np.testing.assert_array_equal(program.run(x=fed), fed @ data.T)

    def test_layers_that_lie_on_two_sides_stay_there_without_offload(self):
        gpu, cpu = separate("gpu"), Plain("cpu", OPS)
        y, layers, _ = encoder(4, lambda i: gpu if i < 2 else "host")
        planned = plan(y, gpu, cpu)
        assert where(planned, *[n["norm"] for n in layers]) == ["gpu", "gpu", "cpu", "cpu"]
        assert weights_copied(planned) == []

    def test_rows_chosen_by_ids_do_not_serve_another_reader(self):
        gpu, cpu = separate("gpu", offload=["embedding"]), Plain("cpu", OPS)
        gpu.kernels("embedding", dtypes="f32")(_embedding)
        data = RNG.integers(-2, 3, (ROWS, SIZE)).astype(np.float32)
        table = ow.weights({"t": data}, device=cpu)["t"]
        ids = ow.input("ids", (2,), "i32")
        some, whole = ow.embedding(table, ids), ow.neg(table)
        with ow.Scheduler([gpu, cpu]) as scheduler:
            program = scheduler.build([some, whole], pins={whole: gpu})
            got = program.run(ids=np.array([1, 5], np.int32))
            np.testing.assert_array_equal(got[0], data[[1, 5]])
            np.testing.assert_array_equal(got[1], -data)


def _embedding(stream: Any, op: str, out: Any, table: Any, ids: Any, **attrs: Any) -> Any:
    target, rows, chosen = out.view, table.view, ids.view
    return lambda: np.copyto(target, rows[chosen])


class TestBoundaries:
    """Between weights on two devices."""

    def between(self, build):
        """The nodes that ``build`` makes between a product on ``a`` and one on ``b``, and the plan."""
        a, b = separate("a"), separate("b")
        w = ow.weights({"w": np.eye(SIZE, dtype="f")}, device=a)["w"]
        first = ow.linear(ow.input("x", (ROWS, SIZE)), w)
        nodes = build(first)
        v = ow.weights({"v": np.ones((4, nodes[-1].shape[-1]), "f")}, device=b)["v"]
        return nodes, plan(ow.linear(nodes[-1], v), a, b)

    def test_what_narrows_runs_before_it(self):
        nodes, planned = self.between(lambda h: [s := ow.sum(h, axis=0, keepdims=True), ow.exp(s)])
        assert where(planned, *nodes) == ["a", "a"]
        assert [planned.cause_of(n.root) for n in nodes] == ["expand-down"] * 2
        assert sum(c.nbytes for c in planned.copies) == SIZE * 4

    def test_without_gain_nothing_moves(self):
        nodes, planned = self.between(lambda h: [e := ow.exp(h), ow.neg(e)])
        assert where(planned, *nodes) == ["a", "a"]
        assert [planned.cause_of(n) for n in nodes] == ["expand-down"] * 2

    def test_a_node_goes_to_the_larger_of_its_sources(self):
        a, b = separate("a"), separate("b")
        x = ow.input("x", (ROWS, SIZE))
        small, large = ow.exp(x[0:1]), ow.neg(x)
        y = small + large
        planned = plan(y, a, b, pins={small: a, large: b})
        assert where(planned, y) == ["b"]
        assert sum(c.nbytes for c in planned.copies if c.tensor.root is small) == SIZE * 4

    def test_what_only_one_device_runs_draws_nobody_there(self):
        """The rest goes back to the device that comes first, however few bytes it is."""
        a, b = Separate("a", ["linear", "exp", "sum"]), separate("b")
        w = ow.weights({"w": np.eye(SIZE, dtype="f")}, device=a)["w"]
        h = ow.linear(ow.input("x", (ROWS, SIZE)), w)
        odd = ow.neg(h)
        y = ow.exp(ow.sum(odd, axis=0))
        planned = plan(y, a, b)
        assert where(planned, h, odd, y) == ["a", "b", "a"]


class TestStates:
    """Nodes that read states run where these lie, if they are larger than what else the nodes read."""

    def test_a_node_that_reads_a_large_state_runs_where_it_lies(self):
        a, b = separate("a"), separate("b")
        cache = ow.state("cache", (64, SIZE), device=b)
        w = ow.weights({"w": np.eye(SIZE, dtype="f"), "v": np.eye(SIZE, dtype="f")}, device=a)
        scores = ow.linear(ow.linear(ow.input("x", (1, SIZE)), w["w"]), cache)
        y = ow.linear(ow.matmul(scores, cache), w["v"])
        planned = plan(y, a, b)
        assert where(planned, scores, y) == ["b", "a"]
        assert planned.cause_of(scores) == planned.cause_of(y.srcs[0]) == "state"
        assert sum(c.nbytes for c in planned.copies) == 2 * SIZE * 4

    @pytest.mark.parametrize("given", ["placed", "pinned", "writer"])
    @pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
    def test_so_do_those_that_read_what_was_written_in_the_same_graph(self, given, order):
        """Also where the state has no memory yet: it is pinned, or lies where the node runs that writes it."""
        devices = {name: separate(name) for name in "ab"}
        a, b = devices["a"], devices["b"]
        cache = ow.state("cache", (64, SIZE), device=b if given == "placed" else None)
        w = ow.weights({"w": np.eye(SIZE, dtype="f"), "v": np.eye(SIZE, dtype="f")}, device=a)
        h = ow.linear(ow.input("x", (1, SIZE)), w["w"])
        written = ow.index_copy(cache, ow.constant(np.array([3])), h)
        scores = ow.softmax(ow.linear(h, written))
        y = ow.linear(ow.matmul(scores, written), w["v"])
        pins = {"placed": {}, "pinned": {cache: b}, "writer": {written: b}}[given]
        with ow.Scheduler([devices[name] for name in order]) as scheduler:
            program = scheduler.build(y, pins)
            assert where(program, written, scores, y.srcs[0], y) == ["b", "b", "b", "a"]
            assert sum(c.nbytes for c in program.partition.copies) == 2 * SIZE * 4, "the row, and what is made of all"
            fed = VALUES[:1]
            rows = np.zeros((64, SIZE), np.float32)
            rows[3] = fed
            logits = np.exp(fed @ rows.T - (fed @ rows.T).max())
            np.testing.assert_allclose(program.run(x=fed), logits / logits.sum() @ rows, rtol=1e-5)

    def test_a_state_that_is_not_the_largest_value_draws_nobody(self):
        a, b = separate("a"), separate("b")
        state = ow.state("mean", (1, SIZE), device=b)
        w = ow.weights({"w": np.eye(SIZE, dtype="f")}, device=a)["w"]
        y = ow.linear(ow.input("x", (ROWS, SIZE)), w) + state
        equal = ow.sum(y, axis=0, keepdims=True) + state
        planned = plan(equal, a, b)
        assert where(planned, y, equal) == ["a", "a"]
        assert [c.tensor.root for c in planned.copies] == [state], "once for both"

    def test_a_weight_decides_before_a_state(self):
        a, b = separate("a"), separate("b")
        state = ow.state("cache", (64, SIZE), device=b)
        y = ow.linear(state, ow.weights({"w": np.eye(SIZE, dtype="f")}, device=a)["w"])
        planned = plan(y, a, b)
        assert (where(planned, y), planned.cause_of(y)) == (["a"], "weights")

    def test_nobody_moves_to_the_references_or_to_a_device_that_does_not_run_it(self):
        a, b, host = separate("a"), Separate("b", ["linear"]), HostDevice()
        for device in (b, host):
            cache = ow.state(f"cache {device.name}", (64, SIZE), device=device)
            y = ow.sum(ow.exp(cache), axis=0)
            planned = plan(y, a, b, host)
            assert where(planned, y.srcs[0], y) == ["a", "a"]

    def test_a_device_that_reaches_the_state_keeps_the_node(self):
        cpu, beside = Plain("cpu", OPS), Beside("beside", OPS)
        cache = ow.state("cache", (64, SIZE), device=cpu)
        w = ow.weights({"w": np.eye(SIZE, dtype="f")}, device=beside)["w"]
        scores = ow.linear(ow.linear(ow.input("x", (1, SIZE)), w), cache)
        planned = plan(scores, separate("other"), beside, cpu)
        assert where(planned, scores) == ["beside"]
        assert planned.n_copies == 0

    @pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
    @pytest.mark.parametrize("blocks", [None, 8])
    @pytest.mark.parametrize("first", ["gpu", "cpu"])
    def test_a_decoder_whose_caches_lie_beside_its_weights_copies_no_cache(self, first, blocks, dtype):
        """Each layer's new key, value and query cross to the caches, and what attention makes of them back."""
        gpu, cpu, host = Member("gpu"), Member("cpu"), HostDevice()
        layers, heads, groups, size = 3, 4, 2, 32
        width = heads * size
        shapes = {"q": (width, width), "k": (groups * size, width), "v": (groups * size, width), "o": (width, width)}
        arrays = {f"{i}.{n}": 0.1 * RNG.standard_normal(s, dtype="f") for i in range(layers) for n, s in shapes.items()}
        fed = [RNG.standard_normal((1, tokens, width), dtype="f") for tokens in (32, 1)]

        def decoded(devices, weights_on, caches_on):
            """The result of a step of one token behind 32 others, and the program that it runs."""
            w = ow.weights(arrays, device=weights_on)
            cache = ow.KVCache(layers, 1, 64, groups, size, dtype, device=caches_on, block=8, blocks=blocks)

            @ow.compile(devices=devices)
            def step(x, positions, slots, blocks, reach):
                for i in range(layers):
                    q, k, v = (ow.linear(x, w[f"{i}.{n}"]).reshape(*x.shape[:2], -1, size) for n in "qkv")
                    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q, k, v))
                    mixed = cache.attend(i, q, k, v, positions, slots, blocks, reach)
                    x = x + ow.linear(mixed.transpose(0, 2, 1, 3).reshape(x.shape), w[f"{i}.o"])
                return x

            sequence = cache.join()
            for x in fed:
                batch = cache.feed({sequence: [0] * x.shape[1]})
                given = x, batch.positions, batch.slots, batch.blocks, batch.reach
                y = step(*given)
            return y, step.program(*given)

        got, program = decoded([gpu, cpu] if first == "gpu" else [cpu, gpu], gpu, cpu)
        np.testing.assert_allclose(got, decoded([host], host, host)[0], rtol=1e-4, atol=1e-5)
        copies = program.partition.copies
        assert not [c for c in copies if c.tensor.memory.leaf is not None and c.tensor.memory.leaf.kind == "state"]
        each_layer = (2 * heads + 2 * groups) * size * 4
        assert 0 < sum(c.nbytes for c in copies) <= layers * each_layer + 64 * 4, "and what says which tokens are seen"


BLOCKS = 10
CASES = int(os.environ.get("OPWEAVE_RANDOM_CASES", "400"))


def small_table(weight: ow.Tensor, nodes: list[ow.Tensor]) -> bool:
    """Whether several nodes read it, and all combine it with values of more bytes: it decides for products only."""
    readers = [n for n in nodes if any(s.root is weight for s in n.srcs)]
    values = [
        max([n.nbytes, *[s.nbytes for s in n.srcs if s.root.leaf is None or s.root.leaf.kind == "input"]])
        for n in readers
    ]
    return len(readers) > 1 and weight.nbytes < min(values)


def check_rules(program: ow.Program, pins: dict[ow.Tensor, ow.Device], message: str) -> None:
    """Readers of placed weights run where these lie; the host computes only what no other device supports."""
    assignment = program.partition.assignment
    nodes = [n for n in program.partition.graph.nodes if not n.is_view]
    runs = [[t.device for t in assignment.targets if assignment.capabilities.supports(t, n)] for n in nodes]
    for node, able in zip(nodes, runs, strict=True):
        if node in pins:
            assert program.device_of(node) is pins[node], message
            continue
        device, computing = program.device_of(node), [d for d in able if d.kind is not Kind.HOST]
        if device.kind is Kind.HOST:
            kept = node.state is not None or not node.srcs
            assert kept or not computing, f"{message}: {node.describe()} runs on the references"
        if node.state is not None:
            continue
        placed = [w for w in dict.fromkeys(s.root for s in node.srcs) if w.leaf is not None and w.leaf.kind == "weight"]
        placed = [w for w in placed if w.leaf is not None and w.leaf.placement is not None]
        assert node.op is not None
        if not node.op.product:
            placed = [w for w in placed if not small_table(w, nodes)]
        for weight in sorted(placed, key=lambda w: -w.nbytes):
            assert weight.leaf is not None
            assert weight.leaf.placement is not None
            space = weight.leaf.placement.buffer.space
            if any(d.reaches(space) for d in computing):
                assert device.reaches(space), f"{message}: {node.describe()} left {weight.name}\n{program.explain()}"
                break


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_graphs_with_weights_placed_at_random_keep_the_rules_and_equal_the_references(block):
    checked = 0
    for seed in range(block * CASES // BLOCKS, (block + 1) * CASES // BLOCKS):
        rng = random.Random(20_000_000 + seed)
        devices: list[ow.Device] = []
        for i in range(rng.randint(2, 3)):
            ops = [op for op in ALL_OPS if rng.random() < 0.85]
            devices.append(Separate(f"d{i}", ops) if rng.random() < 0.7 else Plain(f"d{i}", ops))
        devices.append(HostDevice())
        case = Case(rng, rng.sample(devices, rng.randint(1, len(devices))))
        try:
            reachable = set(ow.Graph(case.outputs).nodes) if case.outputs else set()
        except ow.HazardError:
            continue
        if not reachable:
            continue
        with ow.Scheduler(devices, op_offload=rng.random() < 0.8) as scheduler:
            pins: dict[ow.Tensor, ow.Device] = {}
            for node in case.nodes:
                at = rng.randrange(len(devices))
                if node in reachable and rng.random() < 0.15 and node.signature is not None:
                    target = scheduler._targets[at]
                    if target.support(node.signature).reason is None:
                        pins[node] = devices[at]
            program = scheduler.build(case.outputs, pins)
            if scheduler._options["op_offload"]:
                check_rules(program, pins, f"seed {seed}")
            feeds = {name: array for name, array in case.feeds.items() if name in program.inputs}
            known: dict[ow.Tensor, np.ndarray] = {}
            expected = [evaluate(t, case.leaves, known) for t in case.outputs]
            for got, want in zip(program.run(feeds), expected, strict=True):
                np.testing.assert_array_equal(got, want, err_msg=f"seed {seed}\n{program.explain()}")
            checked += 1
    assert checked >= CASES // BLOCKS // 2
