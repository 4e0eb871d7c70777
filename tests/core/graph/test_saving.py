"""Graphs as bytes and back, pickled, copied and drawn."""

# mypy: disable-error-code="union-attr"

import copy
import json
import os
import pickle
import re
from contextlib import suppress
from struct import pack_into, unpack_from
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import opweave as ow
from opweave.graph.attributes import decode_attrs, encode_attrs
from opweave.graph.opdef import OPS
from opweave.graph.tensor import node
from opweave_conformance.case import Case
from opweave_conformance.cases import CASES

RNG = np.random.default_rng(7)
MUTATIONS = int(os.environ.get("OPWEAVE_MUTATIONS", "300"))


def model():
    """Every kind of leaf, views, a written state, scopes, names, and attributes of several types."""
    weights = ow.weights({"w": RNG.standard_normal((4, 8), np.float32), "q": ow.Blocks(_blocks(), (4, 64), "q8_0")})
    x = ow.input("x", (3, 8))
    cache = ow.state("cache", (6, 4), fill=0.5)
    with ow.scope("layer0"):
        h = ow.linear(x, weights["w"]).named("projected")
        with ow.scope("attention"):
            h = ow.softmax(h, mask=ow.constant(np.tril(np.ones((3, 4), bool))), scale=0.3)
    written = ow.index_copy(cache, ow.constant(np.array([4, 0, 2])), h)
    y = ow.linear(ow.pad(ow.concat([h, written[1:4, ::2]], axis=1), ((0, 0), (0, 58))), weights["q"])
    return ow.where(y > 0.25, y, ow.clamp(y.T.reshape(3, 4), max=0.0)), written.T


def _blocks():
    raw = RNG.integers(0, 255, (4, 2, 34)).astype(np.uint8)
    raw[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return raw.reshape(4, 68)


FEED = {"x": RNG.standard_normal((3, 8), np.float32)}


def run(graph, device="cpu"):
    with ow.Scheduler(list(dict.fromkeys([device, "host"]))) as scheduler:
        return scheduler.build(graph.outputs).run(FEED)


def shown(graph):
    return [(t.name, t.scope, t.site, t.dtype, t.shape, t.strides, t.offset) for t in (*graph.leaves, *graph.nodes)]


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["host", "cpu", "torch:cpu", "opencl"])
def test_a_graph_comes_back_with_its_values_names_scopes_and_sites(device):
    graph = ow.Graph(model())
    saved = graph.to_bytes(weights=True, states=True)
    assert saved == graph.to_bytes(weights=True, states=True)
    loaded = ow.Graph.from_bytes(saved)
    assert shown(loaded) == shown(graph)
    assert "layer0/attention/softmax" in [t.name for t in loaded.nodes]
    assert "layer0/projected" in [t.name for t in loaded.nodes]
    assert loaded.to_bytes(weights=True, states=True) == saved
    for got, want in zip(run(loaded, device), run(graph, device), strict=True):
        np.testing.assert_array_equal(got, want)


def test_every_operation_and_every_attribute_comes_back():
    """By hash-consing an equal node is the same node, so that identity is equality of all attributes."""
    seen: dict[tuple[str, str], Case] = {}
    for case in CASES:
        seen.setdefault((case.op, case.id.rpartition("-")[2]), case)
    for case in seen.values():
        graph = ow.Graph(case.build(*case.tensors()))
        if case.op == "custom":
            with pytest.raises(ow.SchedulerError, match=r"'fn' is .*ow\.define_op"):
                graph.to_bytes()
            continue
        loaded = ow.Graph.from_bytes(graph.to_bytes())
        if all(t.leaf.kind == "input" for t in graph.leaves):
            assert loaded.outputs == graph.outputs, case.id
        assert [(t.op, t.attrs) for t in loaded.nodes] == [(t.op, t.attrs) for t in graph.nodes], case.id


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text()
        | st.sampled_from(list(ow.DTYPES.values()))
        | st.builds(slice, st.integers(0, 9), st.none(), st.integers(1, 3)),
        lambda inner: st.lists(inner, max_size=3).map(tuple),
        max_leaves=6,
    )
)  # fmt: skip
def test_attributes_come_back_exactly(value):
    encoded = json.loads(json.dumps(encode_attrs({"a": value}, "it"), allow_nan=False))
    assert repr(decode_attrs(encoded)["a"]) == repr(value)  # repr distinguishes 1 from 1.0 and True, 0.0 from -0.0


def test_values_are_left_out_and_given_again():
    outputs = model()
    graph = ow.Graph(outputs)
    small, large = graph.to_bytes(), graph.to_bytes(weights=True)
    assert len(large) > len(small)
    leaves = {t.name: t for t in graph.leaves if t.leaf.kind == "weight"}
    for given_ in (leaves, {"w": leaves["w"].leaf.data, "q": leaves["q"]}):
        for got, want in zip(run(ow.Graph.from_bytes(small, weights=given_)), run(graph), strict=True):
            np.testing.assert_array_equal(got, want)
    planned = ow.Graph.from_bytes(small)
    assert len(ow.Scheduler(["cpu", "host"]).partition(planned.outputs).splits) >= 1
    with pytest.raises(ow.SchedulerError, match="has no bytes"):
        run(planned)
    with pytest.raises(ow.UnknownNameError, match="no weight named 'q'"):
        ow.Graph.from_bytes(small, weights={"w": leaves["w"]})
    with pytest.raises(ow.SchedulerError, match=r"weight 'w' was saved as f32\[4, 8\]"):
        ow.Graph.from_bytes(small, weights={**leaves, "w": np.ones((4, 7), np.float32)})


def test_two_weights_of_one_name_are_saved_with_values_only():
    a, b = (ow.weights({"w": np.full(3, v, np.float32)})["w"] for v in (1, 2))
    graph = ow.Graph(a + b)
    with pytest.raises(ow.SchedulerError, match="two different leaves are named 'w'"):
        graph.to_bytes()
    np.testing.assert_array_equal(run2(ow.Graph.from_bytes(graph.to_bytes(weights=True))), [3, 3, 3])


def run2(graph):
    with ow.Scheduler(["cpu"]) as scheduler:
        return scheduler.build(graph.outputs[0]).run({})


@pytest.mark.parametrize("device", ["cpu", "opencl"])
def test_states_are_saved_with_what_they_hold_now(device):
    state = ow.state("s", (3,), fill=2, device=device)
    graph = ow.Graph(state * 1.0)
    ow.write(state, [5, 6, 7])
    kept, begun = (ow.Graph.from_bytes(graph.to_bytes(states=s)) for s in (True, False))
    assert run2(kept).tolist() == [5, 6, 7]
    assert run2(begun).tolist() == [2, 2, 2]
    ow.write(kept.leaves[0], [0, 0, 0])
    assert ow.read(state).tolist() == [5, 6, 7]


def test_values_lie_in_the_bytes_aligned():
    weights = ow.weights({"w": np.arange(1000, dtype=np.float32)})
    saved = np.frombuffer(ow.Graph(weights["w"] * 2.0).to_bytes(weights=True), np.uint8)
    (leaf,) = ow.Graph.from_bytes(saved).leaves
    assert np.shares_memory(leaf.leaf.data, saved)
    assert (leaf.leaf.data.ctypes.data - saved.ctypes.data) % 64 == 0
    assert not leaf.leaf.data.flags.writeable


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_operation_that_is_not_defined_here_is_named():
    op = ow.define_op(ow.OpDef("saved_elsewhere", infer=lambda x: (x.shape, x.dtype), reference=lambda x: x))
    saved = ow.Graph(node(op, (ow.input("x", (3,)),), {})).to_bytes()
    assert ow.Graph.from_bytes(saved).outputs[0].op is op
    del OPS["saved_elsewhere"]
    with pytest.raises(ow.UnknownNameError, match=r"no operation named 'saved_elsewhere'.*Import the module"):
        ow.Graph.from_bytes(saved)


def header_of(saved):
    (length,) = unpack_from("<Q", saved, 16)
    return json.loads(saved[24 : 24 + length])


def with_header(saved, header):
    """The same values after another header, with a matching checksum."""
    (length,) = unpack_from("<Q", saved, 16)
    text = json.dumps(header).encode()
    head = bytearray(saved[:24])
    pack_into("<IQ", head, 12, crc32(text), len(text))
    data = saved[-(-(24 + length) // 64) * 64 :]
    return bytes(head) + text + bytes(-(24 + len(text)) % 64) + data


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b[:10], "too few"),
        (lambda b: b"x" + b[1:], "do not begin with its mark"),
        (lambda b: b[:8] + b"\x09" + b[9:], "version 9 of the format; this opweave reads 1"),
        (lambda b: b[:60] + b"?" + b[61:], "another checksum"),
        (lambda b: b[:100], "cut off"),
        (lambda b: b[:-8], "cut off"),
        (lambda b: "text", "bytes, not str"),
        (lambda b: None, "bytes, not NoneType"),
    ],
)
def test_bytes_that_were_not_saved_are_refused(change, says):
    with pytest.raises(ow.FormatError, match=says):
        ow.Graph.from_bytes(change(ow.Graph(model()).to_bytes(weights=True)))


def test_views_show_only_bytes_that_are_there():
    saved = ow.Graph(ow.input("x", (8, 8))[2:4, ::2] * 2.0).to_bytes()
    for window in ([[64, 8], 448], [[64, 8], -32], [[-32, 8], 64], [[64, 7], 64], [[64], 0], [[1 << 40, 8], 0]):
        header = header_of(saved)
        header["tensors"][1]["window"] = window
        with pytest.raises(ow.FormatError, match="does not fit into input 'x'"):
            ow.Graph.from_bytes(with_header(saved, header))


VALUES = [None, True, -1, 0, 1, 7, 1 << 40, 1 << 70, 1e308, "", "f64", "add", [], [1, [2]], {}, {"dtype": "q8_0"}]


def places(value, found):
    if isinstance(value, (list, dict)):
        for key in range(len(value)) if isinstance(value, list) else list(value):
            found.append((value, key))
            places(value[key], found)
    return found


def test_mutated_graphs_are_refused_or_run():
    """Bytes, and values of a header whose checksum fits: typed errors only. More with OPWEAVE_MUTATIONS=10000."""
    rng = np.random.default_rng(MUTATIONS)
    saved = ow.Graph(model()).to_bytes(weights=True, states=True)
    refused = 0
    with np.errstate(all="ignore"), ow.Scheduler(["cpu", "host"]) as scheduler:
        for i in range(MUTATIONS):
            if i % 3 == 0:
                changed = bytearray(saved)
                changed[rng.integers(len(saved))] ^= 1 << rng.integers(8)
            else:
                header = header_of(saved)
                known = places(header, [])
                for _ in range(rng.integers(1, 3)):
                    within, key = known[rng.integers(len(known))]
                    within[key] = VALUES[rng.integers(len(VALUES))]
                changed = with_header(saved, header)
            try:
                graph = ow.Graph.from_bytes(bytes(changed))
            except ow.OpweaveError:
                refused += 1
            else:
                if graph.leaves and all(t.nbytes < 1 << 20 for t in (*graph.leaves, *graph.nodes)):
                    with suppress(ow.OpweaveError):
                        scheduler.build(graph.outputs).run(FEED)
    assert refused > MUTATIONS // 3


# --- pickling and copying -------------------------------------------------------------------------------------------


def test_tensors_and_graphs_are_pickled_with_all_values():
    outputs = model()
    graph = ow.Graph(outputs)
    want = run(graph)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(graph, protocol))
        assert shown(loaded) == shown(graph)
        for got, expected in zip(run(loaded), want, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_tensors_that_are_pickled_together_share_what_they_shared():
    s, x = ow.state("s", (3,)), ow.input("x", (3,))
    first, second, state = pickle.loads(pickle.dumps([ow.exp(s) + x, ow.tanh(s), s]))
    assert first.srcs[0].srcs[0] is second.srcs[0] is state
    assert state is not s
    assert first.srcs[1] is x
    assert pickle.loads(pickle.dumps(ow.exp(x))) is ow.exp(x)


def test_a_deep_graph_is_pickled():
    t = ow.input("x", (2,))
    for i in range(5000):
        t = t * (1.0 + i)
    assert pickle.loads(pickle.dumps(t)) is t


def test_what_cannot_be_pickled_says_what_to_do():
    x = ow.custom(np.sort, ow.input("x", (3,)), like=((3,), "f32"))
    with pytest.raises(ow.SchedulerError, match=r"custom .* cannot be saved: its attribute 'fn' .* \(ow\.define_op\)"):
        pickle.dumps(x)


def test_copies_of_symbolic_values_are_themselves():
    outputs = model()
    graph = ow.Graph(outputs)
    assert copy.deepcopy(outputs) == outputs
    assert copy.copy(outputs[0]) is outputs[0]
    assert copy.deepcopy({"g": graph})["g"] is copy.copy(graph) is graph


# --- DOT ------------------------------------------------------------------------------------------------------------

TOKEN = re.compile(r'\s+|"(?:[^"\\]|\\.)*"|->|[{}\[\];=]|[A-Za-z_]\w*')


def test_dot_has_nodes_edges_and_nested_clusters():
    with ow.scope('a/b "c" \\'):
        y = ow.exp(ow.input('in"put', (3,)) * 2.5).named("semi;colon")
    text = ow.Graph([y, y.reshape(3, 1)]).to_dot()
    tokens = [t for t in TOKEN.findall(text) if not t.isspace()]
    assert "".join(TOKEN.findall(text)) == text, "every character belongs to a token"
    assert tokens.count("{") == tokens.count("}") == 3
    assert tokens.count("->") == 5
    assert '"cluster a/b \\"c\\" \\\\"' in tokens
    assert '"input in\\"put\\nf32[3]"' in tokens
    assert '"exp semi;colon\\nf32[3]"' in tokens


# --- what does not pickle, and mappings of weights --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["program", "scheduler", "function"])
def test_what_belongs_to_this_process_says_what_to_pickle_instead(what):
    x = ow.input("x", (3,))
    with ow.Scheduler("host") as scheduler:
        found = {
            "program": scheduler.build(ow.neg(x)),
            "scheduler": scheduler,
            "function": ow.compile(ow.neg(x), devices=scheduler),
        }[what]
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(ow.SchedulerError, match=rf"(?i){what}.*Graph\(outputs\).to_bytes\(\)"):
                attempt(found)


@pytest.mark.parametrize("device", [None, "host", "cpu"])
def test_weights_pickle_with_their_values(device):
    rng = np.random.default_rng(0)
    arrays = {"a": rng.standard_normal((4, 32), np.float32), "b": rng.integers(0, 9, 5).astype(np.int16)}
    weights = ow.weights({**arrays, "q": ow.quantize(arrays["a"], "q8_0")}, device=device)
    weights.metadata = {"made by": "a test"}
    back, node = pickle.loads(pickle.dumps((weights, ow.linear(ow.input("x", (1, 32)), weights["q"]))))
    assert list(back) == list(weights)
    assert back.metadata == weights.metadata
    assert node.srcs[1] is back["q"], "what is pickled together shares its leaves"
    for name in weights:
        assert back[name] is not weights[name]
        assert (back[name].name, back[name].dtype, back[name].shape) == (name, weights[name].dtype, weights[name].shape)
        np.testing.assert_array_equal(ow.read(back[name]), ow.read(weights[name]))


def test_weights_without_bytes_pickle_as_such():
    back = pickle.loads(pickle.dumps(ow.weights({"w": ow.Spec((4, 32), ow.as_dtype("q8_0"))})))
    assert (back["w"].shape, back["w"].dtype.name) == ((4, 32), "q8_0")
    with pytest.raises(ow.SchedulerError):
        ow.read(back["w"])
