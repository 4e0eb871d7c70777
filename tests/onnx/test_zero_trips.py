"""Loops of no iterations, scans over no elements, sequences without elements, recurrent networks without steps: shapes
and dtypes of what was never computed come from the body."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper

import opweave as ow
import opweave_onnx
from tests.support.onnx_models import model, node, value

F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64
SCALARS = [value("i", I64, []), value("go", bool, [])]


def run(proto, feeds, placement=("cpu", "host")):
    with opweave_onnx.load(proto, list(placement)) as loaded:
        return loaded.run(feeds)


def same(proto, feeds, placement=("cpu", "host")):
    """The results, which are those of ONNX Runtime in shape, dtype and value."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = run(proto, feeds, placement)
    for output, want in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        have = found[output.name]
        assert (have.shape, have.dtype) == (want.shape, want.dtype), output.name
        np.testing.assert_allclose(have, want, rtol=1e-6)
    return found


def loop(nodes, carried, scanned, *, states="v", version=21, initializers=(), more=()):
    """A loop over ``limit`` and ``go_on``; ``carried`` and ``scanned`` are outputs of the body behind its condition."""
    body = helper.make_graph(
        [*nodes, node("Identity", "go", "again")], "body", [*SCALARS, *carried[0]],
        [value("again", bool, []), *carried[1], *scanned],
    )  # fmt: skip
    outputs = [f"last{k}" for k in range(len(carried[1]))] + [f"rows{k}" for k in range(len(scanned))]
    return model(
        [node("Loop", f"limit go_on {states}", " ".join(outputs), body=body)],
        [value("limit", I64, []), value("go_on", bool, []), value("v", F32, ["n", 3]), *more], outputs,
        dict(initializers), version,
    )  # fmt: skip


def grown(version=21):
    nodes = [
        node("Add", "w one", "next"),
        node("Cast", "w", "half", to=10),
        node("Transpose", "w", "turned"),
        node("Cast", "i", "count", to=6),
    ]
    carried = [value("w", F32, ["n", 3])], [value("next", F32, ["n", 3])]
    scanned = [value("half", F16, ["n", 3]), value("turned", F32, [3, "n"]), value("count", I32, [])]
    return loop(nodes, carried, scanned, version=version, initializers={"one": np.ones(1, F32)}.items())


@pytest.mark.parametrize("version", [11, 13, 16, 21])
@pytest.mark.parametrize(("limit", "go_on"), [(0, True), (5, False), (-1, True), (0, False)])
def test_loops_of_no_iterations_take_shapes_and_dtypes_from_their_bodies(placement, version, limit, go_on):
    feeds = {"limit": np.array(limit), "go_on": np.array(go_on), "v": np.arange(6, dtype=F32).reshape(2, 3)}
    found = run(grown(version), feeds, placement)
    np.testing.assert_array_equal(found["last0"], feeds["v"])
    shown = [(found[f"rows{k}"].shape, found[f"rows{k}"].dtype) for k in range(3)]
    assert shown == [((0, 2, 3), F16), ((0, 3, 2), F32), ((0,), I32)]


@pytest.mark.parametrize("limit", [1, 3, 20])
def test_the_same_loops_with_iterations_agree_with_onnx_runtime(limit):
    feeds = {"limit": np.array(limit), "go_on": np.array(True), "v": np.arange(6, dtype=F32).reshape(2, 3)}
    assert same(grown(), feeds)["rows1"].shape == (limit, 3, 2)


def test_a_body_that_reads_an_element_of_nothing_is_not_run():
    """What a loop over the rows of a table does: with no rows, row 0 is not there."""
    nodes = [node("Gather", "v i", "row"), node("Slice", "v begin end", "part"), node("Identity", "i", "place"),
             node("Unsqueeze", "i zero", "begin"), node("Add", "begin one", "end")]  # fmt: skip
    nodes = [nodes[0], *nodes[3:], nodes[1], nodes[2]]
    scanned = [value("row", F32, [3]), value("part", F32, [1, 3]), value("place", I64, [])]
    known = {"zero": np.array([0]), "one": np.array([1])}.items()
    proto = loop(nodes, ([], []), scanned, states="", initializers=known)
    feeds = {"limit": np.array(0), "go_on": np.array(True), "v": np.zeros((0, 3), F32)}
    found = run(proto, feeds)
    assert [found[f"rows{k}"].shape for k in range(3)] == [(0, 3), (0, 1, 3), (0,)]
    same(proto, feeds | {"limit": np.array(2), "v": np.ones((2, 3), F32)})


def found_rows(declared):
    """A loop whose rows have as many elements as ``v`` has others than 0."""
    nodes = [node("NonZero", "v", "where"), node("Cast", "where", "rows", to=6)]
    return loop(nodes, ([], []), [declared], states="")


def test_what_depends_on_values_comes_from_the_declaration():
    feeds = {"limit": np.array(0), "go_on": np.array(True), "v": np.eye(3, dtype=F32)}
    proto = found_rows(value("rows", I32, [2, "found"]))
    assert same(proto, feeds)["rows0"].shape == (0, 2, 0)
    same(proto, feeds | {"limit": np.array(2)})
    with pytest.raises(ow.FormatError, match=r"node 'loop_rows0' \(Loop\): graph 'body' is not run, and does not decl"):
        run(found_rows(value("rows", I32, None)), feeds)


def test_a_loop_without_rows_needs_no_declaration():
    """Only what is stacked has a shape of the body; values that are carried stay."""
    nodes = [node("NonZero", "w", "where"), node("Cast", "where", "next", to=1)]
    proto = loop(nodes, ([value("w", F32, None)], [value("next", F32, None)]), [])
    feeds = {"limit": np.array(0), "go_on": np.array(True), "v": np.eye(2, 3, dtype=F32)}
    np.testing.assert_array_equal(run(proto, feeds)["last0"], feeds["v"])
    found = run(proto, feeds | {"limit": np.array(1)})
    np.testing.assert_array_equal(found["last0"], [[0, 1], [0, 1]])


def test_loops_of_no_iterations_within_others():
    inner = helper.make_graph(
        [node("Identity", "inner_go", "inner_again"), node("Mul", "w w", "squares")], "inner",
        [value("j", I64, []), value("inner_go", bool, [])],
        [value("inner_again", bool, []), value("squares", F32, ["n", 3])],
    )  # fmt: skip
    nodes = [node("Loop", "i -", "table", body=inner), node("ReduceSum", "table", "sum", keepdims=0),
             node("Add", "w sum", "next")]  # fmt: skip
    carried = [value("w", F32, ["n", 3])], [value("next", F32, ["n", 3])]
    proto = loop(nodes, carried, [value("sum", F32, [])])
    feeds = {"go_on": np.array(True), "v": np.ones((2, 3), F32)}
    for limit in (0, 1, 3):  # the inner loop has 0, 1, 2 iterations
        found = same(proto, feeds | {"limit": np.array(limit)})
        assert found["rows0"].shape == (limit,)


def test_a_condition_that_is_computed_chooses_a_branch_or_no_iteration(placement):
    branches = {
        f"{name}_branch": helper.make_graph([made], name, [], [value(made.output[0], F32, ["n", 3])])
        for name, made in (("then", node("Neg", "v", "less")), ("else", grown().graph.node[0]))
    }
    branches["else_branch"] = helper.make_graph([node("Exp", "v", "more")], "else", [], [value("more", F32, ["n", 3])])
    body = grown().graph.node[0].attribute[0].g
    nodes = [node("ReduceMax", "v", "top", keepdims=0), node("Greater", "top zero", "high"),
             node("If", "high", "chosen", **branches),
             node("Loop", "limit high chosen", "last a b c", body=body)]  # fmt: skip
    proto = model(nodes, [value("limit", I64, []), value("v", F32, ["n", 3])], ["chosen", "last", "a", "b", "c"],
                  {"zero": np.array(0, F32), "one": np.ones(1, F32)})  # fmt: skip
    for v, truth in ((np.full((2, 3), 2, F32), -2), (np.full((2, 3), -1, F32), np.exp(-1))):
        found = run(proto, {"limit": np.array(2), "v": v}, placement)
        np.testing.assert_allclose(found["chosen"], np.full((2, 3), truth), rtol=1e-6)
        n = 2 if truth == -2 else 0
        assert [found[k].shape for k in "abc"] == [(n, 2, 3), (n, 3, 2), (n,)]
        assert [found[k].dtype for k in "abc"] == [F16, F32, I32]


# --- scans and sequences --------------------------------------------------------------------------------------------


def scan(version, axes=None):
    body = helper.make_graph(
        [node("Add", "state x", "next"), node("Cast", "next", "row", to=10)], "body",
        [value("state", F32, [2]), value("x", F32, [2])], [value("next", F32, [2]), value("row", F16, [2])],
    )  # fmt: skip
    lead = ["b"] if version == 8 else []
    made = node("Scan", ("- " if version == 8 else "") + "start rows", "last all", body=body, num_scan_inputs=1,
                **(axes or {}))  # fmt: skip
    given = [value("start", F32, [*lead, 2]), value("rows", F32, [*lead, None, None] if axes else [*lead, "n", 2])]
    return model([made], given, ["last", "all"], version=version)


@pytest.mark.parametrize("count", [0, 1, 3, 70])
def test_scans_over_any_number_of_elements(placement, count):
    rows = np.arange(2 * count, dtype=F32).reshape(count, 2) % 5
    start = np.array([1, 2], F32)
    want = np.concatenate([start[None], start + np.cumsum(rows, 0)])
    for version in (8, 9, 21):
        batch = (None,) if version == 8 else ()
        found = run(scan(version), {"start": start[(*batch,)], "rows": rows[(*batch,)]}, placement)
        np.testing.assert_array_equal(found["last"], want[-1][(*batch,)])
        np.testing.assert_array_equal(found["all"], want[1:].astype(F16)[(*batch,)])
        assert found["all"].dtype == F16
    axes = {"scan_input_axes": [1], "scan_output_axes": [-1]}
    found = run(scan(11, axes), {"start": start, "rows": np.ascontiguousarray(rows.T)}, placement)
    np.testing.assert_array_equal(found["all"], want[1:].T.astype(F16))


def test_scans_of_no_batch():
    found = run(scan(8), {"start": np.zeros((0, 2), F32), "rows": np.zeros((0, 70, 2), F32)})
    assert [(found[k].shape, found[k].dtype) for k in ("last", "all")] == [((0, 2), F32), ((0, 70, 2), F16)]


def test_sequences_without_elements(placement):
    body = helper.make_graph([node("Neg", "e", "f")], "body", [value("e", F32, None)], [value("f", F32, None)])
    nodes = [
        node("SplitToSequence", "x", "parts"),
        node("SequenceMap", "parts", "mapped", body=body),
        node("SequenceLength", "mapped", "n"),
        node("SplitToSequence", "x two", "pairs"),
        node("SequenceLength", "pairs", "m"),
    ]
    proto = model(nodes, [value("x", F32, ["k", 2])], ["n", "m"], {"two": np.array(2)})
    for k in (0, 1, 3):
        found = run(proto, {"x": np.ones((k, 2), F32)}, placement)
        assert (int(found["n"]), int(found["m"])) == (k, (k + 1) // 2)
    joined = model([nodes[0], node("ConcatFromSequence", "parts", "y", axis=0)], [value("x", F32, ["k", 2])], ["y"])
    with pytest.raises(ow.ShapeError, match=r"node 'concatfromsequence_y' \(ConcatFromSequence\): the sequence is em"):
        run(joined, {"x": np.ones((0, 2), F32)})


# --- recurrent networks, NonZero ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("steps", "batch"), [(0, 2), (3, 0), (70, 0), (0, 0)])
def test_recurrent_networks_without_steps_or_batch(placement, op, direction, steps, batch):
    size, width, count = 4, 3, 2 if direction == "bidirectional" else 1
    rows = {"LSTM": 4, "GRU": 3, "RNN": 1}[op] * size
    known = {"w": np.ones((count, rows, width), F32), "r": np.ones((count, rows, size), F32)}
    outputs = ["y", "last", *(["cell"] if op == "LSTM" else [])]
    given = ["h", *(["c"] if op == "LSTM" else [])]
    for layout in (0, 1):
        made = node(op, f"x w r - - {' '.join(given)}", " ".join(outputs), hidden_size=size, direction=direction,
                    layout=layout)  # fmt: skip
        lead, state = ((batch, steps), (batch, count)) if layout else ((steps, batch), (count, batch))
        proto = model([made], [value("x", F32, [*lead, width]), *[value(n, F32, [*state, size]) for n in given]],
                      outputs, known)  # fmt: skip
        feeds = {n: np.full((*state, size), k + 1, F32) for k, n in enumerate(given)}
        found = run(proto, {"x": np.ones((*lead, width), F32)} | feeds, placement)
        assert found["y"].shape == ((batch, steps, count, size) if layout else (steps, count, batch, size))
        for name, start in zip(outputs[1:], given, strict=True):  # without steps the states stay
            assert found[name].shape == (*state, size)
            np.testing.assert_array_equal(found[name], feeds[start])


@pytest.mark.parametrize(("x", "shape"), [
    (np.array(3, F32), (0, 1)), (np.array(0, F32), (0, 0)), (np.zeros(0, F32), (1, 0)), (np.zeros((2, 0), F32), (2, 0)),
    (np.array([0, 2], F32), (1, 1)), (np.array(True), (0, 1)),
])  # fmt: skip
def test_non_zero_of_scalars_and_of_nothing(placement, x, shape):
    found = run(model([node("NonZero", "x", "y")], [value("x", x.dtype, x.shape)], ["y"]), {"x": x}, placement)
    assert (found["y"].shape, found["y"].dtype) == (shape, I64)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_dynamic_quantization_of_any_number_of_rows(placement, rows):
    proto = model(
        [node("DynamicQuantizeLinear", "x", "y scale zero")], [value("x", F32, ["n", 3])], ["y", "scale", "zero"]
    )
    same(proto, {"x": np.arange(3 * rows, dtype=F32).reshape(rows, 3) - 1}, placement)
