"""Models: feeds, results, weights on devices, buckets, threads, comparison with ONNX Runtime."""

from __future__ import annotations

import threading
import time

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import opweave as ow
import opweave_onnx
from opweave_onnx.compare import compare
from opweave_onnx.conformance import Backend
from opweave_onnx.trace import Trace
from tests.support.onnx_models import mlp, model, node, value

F32 = np.float32
RNG = np.random.default_rng(0)
PROTO = mlp(RNG)


def truth(x):
    w = {t.name: onnx.numpy_helper.to_array(t) for t in PROTO.graph.initializer}
    z = np.maximum(x @ w["w1"] + w["b1"], 0) @ w["w2"].T
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


X = RNG.standard_normal((3, 16)).astype(F32)


def test_a_model_is_called_by_the_names_of_the_file(placement, tmp_path):
    path = tmp_path / "mlp.onnx"
    path.write_bytes(PROTO.SerializeToString())
    for source in (path, str(path), path.read_bytes(), PROTO):
        with opweave_onnx.load(source, placement) as loaded:
            np.testing.assert_allclose(loaded(x=X), truth(X), rtol=1e-5, atol=1e-6)
            assert list(loaded.run({"x": X[:1]})) == ["y"]
            assert [(v.name, v.shape) for v in loaded.inputs] == [("x", ("batch", 16))]
            assert sorted(loaded.weights) == ["w1", "w2"]
    with pytest.raises(ow.OpweaveError):
        loaded(x=X)


def test_feeds_that_do_not_fit_are_refused_before_anything_runs():
    with opweave_onnx.load(PROTO, ["cpu"]) as loaded:
        for feeds, error, match in (
            ({}, ow.SchedulerError, "input 'x' is missing; the inputs are x"),
            ({"x": X, "z": X}, ow.UnknownNameError, "no input named 'z'"),
            ({"x": X.astype(np.float64)}, ow.DTypeError, "input 'x' is f32, not float64; convert it"),
            ({"x": X[0]}, ow.ShapeError, r"input 'x' has the shape \(batch, 16\), not \(16,\)"),
            ({"x": X[:, :8]}, ow.ShapeError, r"not \(3, 8\)"),
        ):
            with pytest.raises(error, match=match):
                loaded.run(feeds)
        assert loaded.traced[0] == 0


def with_defaults(ir_version):
    """``y = x · scale + shift`` reshaped, where scale and the shape are inputs with a default, and shift is none."""
    nodes = [node("MatMul", "x scale", "p"), node("Add", "p shift", "s"), node("Reshape", "s shape", "y")]
    known = {"scale": np.eye(20, dtype=F32), "shift": np.ones(20, F32), "shape": np.array([-1])}
    inputs = [value("x", F32, ["n", 20]), value("scale", F32, [20, 20]), value("shape", np.int64, [None])]
    proto = model(nodes, inputs, ["y"], known)
    proto.ir_version = ir_version
    return proto


def test_initializers_that_are_inputs_can_be_fed(placement):
    x = np.arange(40, dtype=F32).reshape(2, 20)
    twice = 2 * np.eye(20, dtype=F32)
    proto = with_defaults(10)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    with opweave_onnx.load(proto, placement) as loaded:
        assert [v.name for v in loaded.inputs] == ["x"]
        assert [v.name for v in loaded.overridable_initializers] == ["scale", "shape"]
        both = {"scale": twice, "shape": np.array([40, 1])}
        for more in ({}, {"scale": twice}, {"shape": np.array([4, 10])}, both, {}):
            feeds = {"x": x, **more}
            np.testing.assert_array_equal(loaded.run(feeds)["y"], session.run(None, feeds)[0])
        with pytest.raises(ow.ShapeError, match=r"input 'scale' has the shape \(20, 20\), not \(2, 20\)"):
            loaded(x=x, scale=x)
        with pytest.raises(ow.UnknownNameError, match="no input named 'shift'"):
            loaded(x=x, shift=x[0])


def test_initializers_are_constants_before_version_4_of_the_format():
    x = np.ones((1, 20), F32)
    with opweave_onnx.load(with_defaults(3), ["cpu", "host"]) as loaded:
        assert not loaded.overridable_initializers
        np.testing.assert_array_equal(loaded(x=x), np.full(20, 2))
        with pytest.raises(ow.UnknownNameError, match="no input named 'scale'"):
            loaded(x=x, scale=np.eye(20, dtype=F32))


def test_the_default_of_an_input_of_a_body():
    body = helper.make_graph(
        [node("Identity", "go", "again"), node("Add", "w step", "next")], "body",
        [value("i", np.int64, []), value("go", bool, []), value("w", F32, [3]), value("step", F32, [3])],
        [value("again", bool, []), value("next", F32, [3]), value("step", F32, [3])],
        [onnx.numpy_helper.from_array(np.full(3, 100, F32), "step")],
    )  # fmt: skip
    for count in (3, 20):
        nodes = [node("Loop", "count - x two", "y rest", body=body)]
        known = {"count": np.array(count), "two": np.full(3, 2, F32)}
        with opweave_onnx.load(model(nodes, [value("x", F32, [3])], ["y"], known), ["cpu", "host"]) as loaded:
            np.testing.assert_array_equal(loaded(x=np.zeros(3, F32)), np.full(3, 2.0 * count))


def test_axes_of_one_name_have_one_length():
    proto = model([node("Add", "a b", "y")], [value("a", F32, ["n"]), value("b", F32, ["n"])], ["y"])
    with (
        opweave_onnx.load(proto, ["cpu"]) as loaded,
        pytest.raises(ow.ShapeError, match=r"\(n\), not \(1,\), with {'n': 2}"),
    ):
        loaded(a=np.ones(2, F32), b=np.ones(1, F32))


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "parallel"])
def test_batches_of_0_and_1(placement, parallel):
    device = placement[0]  # without the host, which sums of nothing need
    nodes = [*PROTO.graph.node, node("ReduceSum", "y axes", "s", keepdims=0), node("Concat", "y one", "c", axis=0)]
    more = {"axes": np.array([0]), "one": np.ones((1, 16), F32)}
    initializers = {i.name: onnx.numpy_helper.to_array(i) for i in PROTO.graph.initializer}
    proto = model(nodes, [value("x", F32, ["batch", 16])], ["y", "s", "c"], initializers | more)
    with ow.Scheduler(device, parallel=parallel) as scheduler, opweave_onnx.load(proto, scheduler) as loaded:
        for batch in (2, 0, 1, 0):
            x = RNG.standard_normal((batch, 16)).astype(F32)
            want = truth(x)
            for got, expected in zip(loaded(x=x).values(), (want, want.sum(0), [*want, *more["one"]]), strict=True):
                assert got.shape == np.shape(expected)
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_the_report_names_nodes_of_the_file_and_planning_takes_no_memory():
    with opweave_onnx.load(PROTO, ["cpu", "host"]) as loaded:
        planned = loaded.plan({"x": X})
        assert "gemm_h" in str(planned.explain())
        assert loaded.traced[0] == 0
        assert {row.device for row in loaded.explain({"x": X}).nodes} == {"cpu"}


def test_weights_lie_where_patterns_say(monkeypatch):
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", "1")
    with opweave_onnx.load(PROTO, ["cpu", "torch:cpu"], weights={"w1": "torch:cpu", "*": "cpu"}) as loaded:
        np.testing.assert_allclose(loaded(x=X), truth(X), rtol=1e-5, atol=1e-6)
        rows = [row for row in loaded.explain({"x": X}).nodes if row.op in ("matmul", "linear")]
        devices = {row.node.split("/")[0]: row.device for row in rows}
        assert (devices["gemm_h"], devices["gemm_z"]) == ("torch:cpu", "cpu")
    with pytest.raises(ow.UnknownNameError, match="pattern"):
        opweave_onnx.load(PROTO, ["cpu"], weights={"nothing.*": "cpu"})


def bucketed(**options):
    nodes = [node("Exp", "x", "e"), node("Neg", "e", "y")]
    return opweave_onnx.load(
        onnx_with_outputs(model(nodes, [value("x", F32, ["n", 4, "m"])], ["y"])), ["cpu"], **options
    )


def onnx_with_outputs(proto):
    proto.graph.output[0].CopyFrom(value("y", F32, ["n", 4, "m"]))
    return proto


def test_buckets_let_few_programs_serve_all_lengths():
    with bucketed(buckets={"m": [8, 2]}) as loaded:
        for m in (1, 2, 3, 7, 8, 2, 11):
            x = RNG.standard_normal((2, 4, m)).astype(F32)
            y = loaded(x=x)
            np.testing.assert_allclose(y, -np.exp(x), rtol=1e-6)
        assert loaded.traced[0] == 3  # 2, 8, and 11, which is longer than all
        assert loaded.prepare(n=2) >= 0
        assert loaded.traced[0] == 3
    for buckets, error in (({"q": [1]}, ow.UnknownNameError), ({"m": []}, ow.ShapeError), ({"m": [0]}, ow.ShapeError)):
        with pytest.raises(error):
            bucketed(buckets=buckets)
    with pytest.raises(ow.ShapeError, match="does not say the axes of the output 'y'"):
        opweave_onnx.load(PROTO, ["cpu"], buckets={"batch": [4]})


def padded_alone(axis="m"):
    """A model with one dynamic axis: its buckets are built from loading on."""
    proto = model([node("Exp", "x", "e"), node("Neg", "e", "y")], [value("x", F32, [axis])], ["y"])
    proto.graph.output[0].CopyFrom(value("y", F32, [axis]))
    return proto


def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def ended_of(loaded):
    assert loaded._background is not None
    return loaded._background.ended


def test_programs_for_buckets_are_built_in_the_background_while_others_run(monkeypatch):
    """The build of 64 is held back: 8 is there, and serves what it can; 3 is not built, as 8 holds it too."""
    held, stage = threading.Event(), Trace.stage

    def slowly(trace):
        if trace.frame.values["x"].shape in ((64,), (3,)):
            assert held.wait(20)
        return stage(trace)

    monkeypatch.setattr(Trace, "stage", slowly)
    with opweave_onnx.load(padded_alone(), ["cpu"], buckets={"m": [64, 8, 2]}) as loaded:
        assert until(lambda: loaded.traced[0] == 2)
        x = RNG.standard_normal(5).astype(F32)
        np.testing.assert_allclose(loaded(x=x), -np.exp(x), rtol=1e-6)
        assert loaded.traced[0] == 2
        held.set()
        assert until(lambda: loaded.traced[0] == 3)
        np.testing.assert_allclose(loaded(x=np.zeros(33, F32)), -np.ones(33), rtol=1e-6)
        assert loaded.traced[0] == 3


def test_a_larger_bucket_serves_while_the_next_one_is_not_built(monkeypatch):
    held, stage = threading.Event(), Trace.stage

    def slowly(trace):
        if trace.frame.values["x"].shape == (16,):
            assert held.wait(20)
        return stage(trace)

    with opweave_onnx.load(padded_alone("k"), ["cpu"], buckets={"k": [32]}) as loaded:
        loaded.prepare()
        monkeypatch.setattr(Trace, "stage", slowly)
        loaded._buckets.lengths["k"].insert(0, 16)
        loaded._background = None
        loaded._build_buckets({"x": np.zeros(1, F32)})
        x = RNG.standard_normal(9).astype(F32)
        np.testing.assert_allclose(loaded(x=x), -np.exp(x), rtol=1e-6)
        assert loaded.traced[0] == 1
        held.set()


def test_what_building_in_the_background_raises_comes_out_at_the_next_run(monkeypatch):
    def fails(trace):
        raise ow.UnsupportedOpError("not today")

    monkeypatch.setattr(Trace, "stage", fails)
    with opweave_onnx.load(padded_alone(), ["cpu"], buckets={"m": [4]}) as loaded:
        ended_of(loaded).wait()
        monkeypatch.undo()
        with pytest.raises(ow.UnsupportedOpError, match="not today"):
            loaded(x=np.zeros(3, F32))
        np.testing.assert_array_equal(loaded(x=np.zeros(3, F32)), -np.ones(3))


def test_closing_ends_the_building_of_buckets(monkeypatch):
    held, stage = threading.Event(), Trace.stage

    def slowly(trace):
        held.wait(20)
        return stage(trace)

    monkeypatch.setattr(Trace, "stage", slowly)
    loaded = opweave_onnx.load(padded_alone(), ["cpu"], buckets={"m": [2, 4, 8]})
    threading.Timer(0.05, held.set).start()
    loaded.close()
    assert ended_of(loaded).is_set()
    assert loaded.traced[0] <= 1


def test_there_are_no_more_buckets_than_programs_are_kept():
    with pytest.raises(ow.ShapeError, match="3 combinations, and 2 programs"):
        opweave_onnx.load(padded_alone(), ["cpu"], buckets={"m": [1, 2, 3]}, max_programs=2)


def test_threads_share_a_model():
    failures: list[tuple[int, int]] = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for n in (1, 2, 3, 1):
            x = rng.standard_normal((n, 16)).astype(F32)
            if not np.allclose(loaded(x=x), truth(x), rtol=1e-4, atol=1e-5):
                failures.append((seed, n))

    with opweave_onnx.load(PROTO, ["cpu"]) as loaded:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert loaded.traced[0] == 3


def test_functions_of_a_model_are_built_in_place_with_their_attributes():
    body = [node("LeakyRelu", "a", "b"), node("Add", "b a", "c")]
    reference = onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    body[0].attribute.append(reference)
    function = helper.make_function(
        "mine", "f", ["a"], ["c"], body, [helper.make_opsetid("", 21)], attributes=["slope"]
    )
    proto = model([helper.make_node("f", ["x"], ["y"], domain="mine", slope=0.5)], [value("x", F32, [3])], ["y"],
                  functions=[function])  # fmt: skip
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    with opweave_onnx.load(proto, ["cpu"]) as loaded:
        np.testing.assert_array_equal(loaded(x=np.array([-2, 0, 2], F32)), [-3, 0, 4])


def test_comparison_with_onnx_runtime_names_the_first_difference(monkeypatch):
    same = compare(PROTO, {"x": X}, ["cpu"])
    assert same
    assert len(same.values) == 4
    from opweave_onnx.operators.table import OPERATORS, Operator

    monkeypatch.setitem(OPERATORS, ("", "Relu"), Operator(lambda call, x: ow.abs(x)))
    found = compare(PROTO, {"x": X}, ["cpu"])
    assert not found
    assert found.first_divergence is not None
    assert found.first_divergence.node == "relu_r"
    assert found.first_divergence.own is not None
    assert found.values[-1].diverges  # since its input does
    assert not found.values[-1].wrong
    assert found.values[-1].cause == "from its inputs"
    assert "first difference at relu_r (Relu)" in str(found)
    assert str(found).splitlines()[-1].startswith("outputs differ at ")
    newer = model([node("Relu", "x", "y")], [value("x", F32, [3])], ["y"], version=28)
    with pytest.raises(ow.Unavailable, match=r"ONNX Runtime .* does not load the model"):
        compare(newer, {"x": X[0, :3]}, ["cpu"])


def test_a_model_whose_outputs_agree_agrees_whatever_cancels_within(monkeypatch):
    """Of ``mean(x) - mean(x)``, computed in two ways, nothing is left but rounding: no digit of it is right anywhere,
    and beside the output it is nothing."""
    from opweave_onnx.operators.table import OPERATORS, Operator

    axes = np.array([0], np.int64)
    nodes = [
        node("ReduceMean", "x axes", "mean"), node("ReduceSum", "x axes", "sum"), node("Div", "sum count", "again"),
        node("Sub", "mean again", "rest"), node("Add", "rest x", "y"), node("Identity", "rest", "same"),
        node("Add", "same y", "z"),
    ]  # fmt: skip
    x = np.random.default_rng(0).standard_normal((1000, 8)).astype(F32) + 100
    weights: dict[str, np.ndarray] = {"axes": axes, "count": np.array(1000, F32)}
    proto = model(nodes, [value("x", F32, [1000, 8])], ["z"], weights)
    # Correctly rounded, which ONNX Runtime's sum is not.
    exact = Operator(lambda call, x, axes: ow.cast(ow.mean(ow.cast(x, "f64"), 0, keepdims=True), "f32"))
    monkeypatch.setitem(OPERATORS, ("", "ReduceMean"), exact)
    found = compare(proto, {"x": x}, ["host"])
    rows = {row.value: row for row in found.values}
    assert rows["rest"].diverges
    assert (rows["rest"].wrong, rows["rest"].cancels) == (False, True)
    assert (rows["same"].cancels, rows["same"].cause) == (False, "from its inputs")
    assert found
    assert [row.value for row in found.outputs] == ["z"]
    assert found.first_divergence is None
    assert "cancellation of its inputs" in str(found)
    strict = compare(proto, {"x": x}, ["host"], tolerance=0.0)
    assert not strict
    with pytest.raises(ValueError, match="a tolerance is a number from 0 on"):
        compare(proto, {"x": x}, ["host"], tolerance=-1.0)


def test_a_node_with_graphs_of_its_own_is_run_alone(monkeypatch):
    """Of what the branches of an If read from around them, too."""
    from opweave_onnx.operators.table import OPERATORS, Operator

    then = helper.make_graph([node("Mul", "h w", "t")], "then", [], [value("t", F32, [3])])
    other = helper.make_graph([node("Add", "h w", "e")], "else", [], [value("e", F32, [3])])
    nodes = [
        node("Neg", "x", "h"),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other, name="if"),
    ]
    proto = model(nodes, [value("x", F32, [3]), value("c", np.bool_, [])], ["y"], {"w": np.full(3, 2, F32)})
    feeds = {"x": np.arange(3, dtype=F32), "c": np.array(True)}
    assert compare(proto, feeds, ["cpu"])
    monkeypatch.setitem(OPERATORS, ("", "Mul"), Operator(lambda call, a, b: a * b + 1))
    found = compare(proto, feeds, ["cpu"])
    assert found.first_divergence is not None
    assert (found.first_divergence.node, found.first_divergence.wrong) == ("if", True)


def test_small_results_of_onnx_runtimes_sigmoid_are_no_difference(monkeypatch):
    proto = model([node("Sigmoid", "x", "y")], [value("x", F32, [64])], ["y"])
    x = np.linspace(-30, -13, 64, dtype=F32)
    found = compare(proto, {"x": x}, ["cpu"])
    assert found
    assert found.values[0].nmse > 1e-4
    from opweave_onnx.operators.table import OPERATORS, Operator

    monkeypatch.setitem(OPERATORS, ("", "Sigmoid"), Operator(lambda call, x: ow.sigmoid(x) + 1e-5))
    assert not compare(proto, {"x": x}, ["cpu"])


def test_the_class_that_onnx_asks_for():
    assert Backend.supports_device("CPU")
    assert not Backend.supports_device("CUDA")
    (y,) = Backend.prepare(PROTO).run([X])
    np.testing.assert_allclose(y, truth(X), rtol=1e-5, atol=1e-6)
    (y,) = Backend.run_model(PROTO, [X])
    np.testing.assert_allclose(y, truth(X), rtol=1e-5, atol=1e-6)
