"""Shape arithmetic on the host, values that decide, loops, and which programs are kept."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import opweave as ow
import opweave_onnx
from tests.support.onnx_models import model, node, value

F32, I64 = np.float32, np.int64
X = value("x", F32, ["n", 4])
RNG = np.random.default_rng(0)


def runtime(proto, feeds):
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def agree(proto, *feeds, devices=("cpu", "host")):
    """The model gives what ONNX Runtime gives, for each of the feeds, twice."""
    with opweave_onnx.load(proto, list(devices)) as loaded:
        for _ in range(2):
            for each in feeds:
                got, want = loaded.run(each), runtime(proto, each)
                assert got.keys() == want.keys()
                for name in want:
                    assert got[name].dtype == want[name].dtype
                    np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)
        return loaded


def test_arithmetic_of_shapes_reaches_no_device():
    proto = model(
        [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Mul", "n two", "m"),
         node("Unsqueeze", "m zero1", "m1"),
         node("Concat", "m1 rest", "shape", axis=0), node("Reshape", "x shape", "r"), node("Relu", "r", "y")],
        [X], ["y"],
        {"zero": np.array(0), "two": np.array(2), "zero1": np.array([0]), "rest": np.array([-1])},
    )  # fmt: skip
    with opweave_onnx.load(proto, ["cpu"]) as loaded:
        assert loaded(x=np.ones((3, 4), F32)).shape == (6, 2)
        program = loaded.program({"x": np.ones((3, 4), F32)})
        assert [row.op for row in program.explain().nodes] == ["relu"]
        loaded(x=np.ones((3, 4), F32))
        assert loaded.traced[0] == 1
        loaded(x=np.ones((5, 4), F32))
        assert loaded.traced[0] == 2


def test_weights_that_are_joined_or_converted_are_so_once():
    w = RNG.standard_normal((2, 40, 4)).astype(F32)
    proto = model(
        [node("Concat", "a b", "w", axis=0), node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "x t", "y")],
        [X], ["y"], {"a": w[0], "b": w[1]},
    )  # fmt: skip
    with opweave_onnx.load(proto, ["cpu"]) as loaded:
        x = np.ones((3, 4), F32)
        np.testing.assert_allclose(loaded(x=x), x @ np.concatenate([w[0], w[1]]).T, rtol=1e-6)
        assert "concat" not in [row.op for row in loaded.program({"x": x}).explain().nodes]


def test_how_many_elements_are_not_zero_decides_the_shape(placement):
    proto = model(
        [node("Relu", "x", "r"), node("NonZero", "r", "places"), node("Transpose", "places", "ids"),
         node("GatherND", "r ids", "found"), node("Exp", "found", "y"), node("ReduceSum", "y", "sum", keepdims=0)],
        [X], ["y", "sum", "ids"],
    )  # fmt: skip
    feeds = [{"x": RNG.standard_normal((n, 4)).astype(F32)} for n in (3, 3, 5)]
    agree(proto, *feeds, {"x": np.zeros((2, 4), F32) - 1}, devices=placement)


def test_programs_behind_a_cut_are_kept_by_shape_or_by_value():
    proto = model(
        [node("NonZero", "x", "places"), node("Cast", "places", "y", to=1), node("Neg", "y", "z")],
        [value("x", F32, [6])], ["z"],
    )  # fmt: skip
    with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
        for x in ([1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 1]):
            np.testing.assert_array_equal(loaded(x=np.array(x, F32)), -np.array(np.nonzero(np.array(x)), F32))
        assert loaded.traced[0] == 3  # to the cut, and on for two and for three elements


def branch(name, *nodes, result, initializers=()):
    return helper.make_graph(list(nodes), name, [], [onnx.ValueInfoProto(name=result)], list(initializers))


def test_a_condition_that_is_computed_chooses_a_graph(placement):
    proto = model(
        [node("Mul", "x x", "sq"), node("ReduceSum", "x", "sum", keepdims=0), node("Greater", "sum zero", "c"),
         node("If", "c", "y", then_branch=branch("a", node("Sqrt", "sq", "root"), result="root"),
              else_branch=branch("b", node("Neg", "sq", "minus"), node("Add", "minus x", "both"), result="both")),
         node("Add", "y sq", "z")],
        [X], ["z", "y"], {"zero": np.array(0, F32)},
    )  # fmt: skip
    x = RNG.random((3, 4)).astype(F32)
    agree(proto, {"x": x}, {"x": -x}, {"x": x + 1}, devices=placement)


def loop_body(condition):
    nodes = [node("Mul", "v factor", "v2"), node("Add", "v2 x", "v3"), node("Identity", "v3", "row"), *condition]
    inputs = [value("i", I64, []), value("c", np.bool_, []), value("v", F32, ["n", 4])]
    outputs = [value("go", np.bool_, []), value("v3", F32, ["n", 4]), value("row", F32, ["n", 4])]
    return helper.make_graph(nodes, "body", inputs, outputs)


FIXED = [node("Identity", "c", "go")]
COMPUTED = [node("ReduceMax", "v3", "top", keepdims=0), node("Less", "top limit", "go")]


@pytest.mark.parametrize(("condition", "count"), [(FIXED, 3), (FIXED, 40), (COMPUTED, 40), (FIXED, 1)])
def test_loops_carry_values_and_collect_rows(condition, count, placement):
    proto = model(
        [node("Abs", "x", "start"), node("Loop", "count yes start", "last rows", body=loop_body(condition)),
         node("Neg", "last", "y")],
        [X, value("count", I64, [])], ["y", "rows"],
        {"yes": np.array(True), "factor": np.array(1.1, F32), "limit": np.array(9, F32)},
    )  # fmt: skip
    feeds = {"x": RNG.random((2, 4)).astype(F32), "count": np.array(count)}
    agree(proto, feeds, {**feeds, "x": feeds["x"] + 1}, devices=placement)


def test_a_long_loop_runs_one_program_for_its_body():
    proto = model(
        [node("Loop", "count - x", "last rows", body=loop_body(FIXED))], [X, value("count", I64, [])], ["last"],
        {"factor": np.array(0.5, F32)},
    )  # fmt: skip
    with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
        x = RNG.random((2, 4)).astype(F32)
        want = x
        for _ in range(100):
            want = want * F32(0.5) + x
        np.testing.assert_allclose(loaded(x=x, count=np.array(100)), want, rtol=1e-6)
        body = loaded.session.runner(loaded.source.graph.nodes[0].attributes["body"])
        assert body.traced[0] == 1


@pytest.mark.parametrize("length", [5, 100])
def test_scans_run_over_the_elements_of_an_axis(length):
    body = helper.make_graph(
        [node("Add", "sum e", "next"), node("Mul", "next next", "out")], "body",
        [value("sum", F32, [4]), value("e", F32, [4])], [value("next", F32, [4]), value("out", F32, [4])],
    )  # fmt: skip
    proto = model(
        [node("Scan", "zero x", "last rows", body=body, num_scan_inputs=1, scan_output_directions=[1])], [X],
        ["last", "rows"], {"zero": np.zeros(4, F32)},
    )  # fmt: skip
    agree(proto, {"x": RNG.random((length, 4)).astype(F32)})


def test_programs_are_kept_for_a_number_of_shapes():
    proto = model([node("Relu", "x", "y")], [X], ["y"])
    with opweave_onnx.load(proto, ["cpu"], max_programs=2) as loaded:
        for n in (1, 2, 1, 3, 1, 2):
            loaded(x=np.ones((n, 4), F32))
        assert loaded.traced[0] == 4  # 2 went for 3, and was made again


def test_boxes_are_suppressed_between_programs(placement):
    proto = model(
        [node("Mul", "boxes scale", "b"), node("NonMaxSuppression", "b scores most overlap", "chosen"),
         node("Gather", "chosen two", "box", axis=1), node("Cast", "box", "y", to=1)],
        [value("boxes", F32, [1, "n", 4]), value("scores", F32, [1, 2, "n"])], ["y", "chosen"],
        {"scale": np.array(2, F32), "most": np.array([5]), "overlap": np.array([0.4], F32), "two": np.array([2])},
    )  # fmt: skip
    corner = RNG.random((1, 30, 2)).astype(F32)
    boxes = np.concatenate([corner, corner + 0.3], -1)
    agree(proto, {"boxes": boxes, "scores": RNG.random((1, 2, 30)).astype(F32)}, devices=placement)


def test_a_scheduler_can_be_shared():
    proto = model([node("Relu", "x", "y")], [X], ["y"])
    with ow.Scheduler(["cpu"]) as scheduler:
        with opweave_onnx.load(proto, scheduler) as loaded:
            assert loaded.scheduler is scheduler
            loaded(x=np.ones((1, 4), F32))
        a = ow.input("a", (2,))
        assert scheduler.build(a + a).run(a=[1.0, 2.0]).tolist() == [2.0, 4.0]
