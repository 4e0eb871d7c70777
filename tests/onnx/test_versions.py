"""Every operator of ONNX in every version: it runs by the meaning of that version, or is refused with the version.

The truths are ONNX's own tests, run in each version in which their node means the same; where versions differ, NumPy,
and ONNX Runtime from version 7 on, which it begins with.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.defs import get_all_schemas_with_history
from onnxruntime.capi import onnxruntime_pybind11_state

import opweave as ow
import opweave_onnx
from opweave_onnx.conformance.scoreboard import Case, cases, run_case
from opweave_onnx.operators import OPERATORS
from opweave_onnx.schemas import check_operators, signature_of
from tests.support.onnx_models import model, node, value

F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64
INF = np.inf
RNG = np.random.default_rng(0)

CHANGED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"], (7,)),
    "Gemm": (7,), "PRelu": (7,),
    **dict.fromkeys(["Max", "Min", "Sum", "Mean"], (8,)),
    **dict.fromkeys(["Softmax", "LogSoftmax", "Hardmax"], (13,)),
    "BatchNormalization": (7, 9, 14), "Clip": (6, 11), "Concat": (4,), "Dropout": (7, 10, 12),
    "GroupNormalization": (21,), "Resize": (11,), "Scan": (9,), "Selu": (6,), "Split": (2,),
}  # fmt: skip
"""Versions from which on the same node means something else."""
ABSENT = {
    "ImageDecoder", "Multinomial", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer",
}  # fmt: skip
"""Operators that opweave does not have in any version."""
RETIRED = {("Scatter", 11): "ScatterElements", ("Upsample", 10): "Resize"}


def history():
    found = defaultdict(list)
    for schema in get_all_schemas_with_history():
        if schema.domain == "":
            found[schema.name].append(schema)
    return {name: sorted(schemas, key=lambda s: s.since_version) for name, schemas in sorted(found.items())}


HISTORY = history()
PAIRS = {(op, schema.since_version) for op, schemas in HISTORY.items() for schema in schemas}


def allowed(proto, schema):
    """Whether a model of one node is valid in a version of its operator."""
    made = proto.graph.node[0]
    try:
        check_operators("", [made], {"": schema.since_version}, set())
    except ow.OpweaveError:
        return False
    types = {v.name: v.type for v in proto.graph.input}
    kinds = {t.type_param_str: t.allowed_type_strs for t in schema.type_constraints}
    for i, name in enumerate(made.input):
        part = schema.inputs[min(i, len(schema.inputs) - 1)]
        if name and types[name].HasField("tensor_type"):
            kind = onnx.helper.tensor_dtype_to_string(types[name].tensor_type.elem_type).split(".")[-1].lower()
            if f"tensor({kind})" not in kinds.get(part.type_str, [part.type_str]):
                return False
    return True


def same_meaning(op, a, b):
    return not any(min(a, b) < changed <= max(a, b) for changed in CHANGED.get(op, ()))


def of_the_standard():
    """For each operator and version up to two of ONNX's own tests."""
    made = defaultdict(list)
    for case in cases("node"):
        nodes, functions = case.model.graph.node, case.model.functions
        if len(nodes) == 1 and nodes[0].domain == "" and nodes[0].op_type not in ABSENT and not functions:
            made[nodes[0].op_type].append(case)
    for op, schemas in HISTORY.items():
        for schema in schemas:
            found: list[Case] = []
            for case in made[op]:
                version = next(e.version for e in case.model.opset_import if e.domain in ("", "ai.onnx"))
                if len(found) < 2 and same_meaning(op, schema.since_version, version) and allowed(case.model, schema):
                    found.append(case)
            yield (op, schema.since_version), found


def in_version(case, version):
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = version
    return case._replace(model=proto)


# --- cases of single versions ---------------------------------------------------------------------------------------

A = RNG.standard_normal((2, 3, 4, 5)).astype(F32)
X = RNG.standard_normal((2, 6, 4, 4)).astype(F32)
C = [RNG.uniform(0.5, 2, 6).astype(F32) for _ in range(4)]
E = [RNG.uniform(0.5, 2, X.shape[1:]).astype(F32) for _ in range(4)]
COLUMN = (slice(None), None, None)


def normalized(scale, bias, mean, var, *, spatial=True):
    at = COLUMN if spatial else ...
    return (X - mean[at]) / np.sqrt(var[at] + 1e-5) * scale[at] + bias[at]


def trained(given, axes):
    scale, bias, mean, var = given
    now, spread = X.mean(axes), X.var(axes)
    y = normalized(scale, bias, now, spread, spatial=len(axes) > 1)
    return [y, mean * 0.9 + now * 0.1, var * 0.9 + spread * 0.1, now, spread]


def softmax(x, axis):
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1)
    e = np.exp(flat - flat.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True)).reshape(x.shape)


def hardmax(x, axis):
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1)
    return (np.arange(flat.shape[1]) == flat.argmax(1)[:, None]).astype(x.dtype).reshape(x.shape)


def old_cases():
    """(operator, versions, inputs, attributes, results); names in inputs that begin with ``_`` are initializers."""
    function: Any
    more: dict[str, Any]
    dtype: Any
    functions = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power}
    tests = {"Greater": np.greater, "Less": np.less, "Equal": np.equal}
    logic = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}
    for op, function in {**functions, **tests, **logic}.items():
        for shape, axis in (((), None), ((1, 1), None), ((5,), None), ((4, 5), None), ((3, 4), 1), ((2,), 0),
                            ((3, 1), 1), ((3,), -3)):  # fmt: skip
            dtype = bool if op in logic else I32 if op == "Equal" else F32
            a, b = (v.astype(dtype) for v in (np.abs(A) * 3, RNG.uniform(0, 3, shape)))
            first = 4 - len(shape) if axis is None else axis % 4
            want = function(a, b.reshape(()) if b.size == 1 else b.reshape(*shape, *[1] * (4 - first - len(shape))))
            more = {"broadcast": 1} | ({} if axis is None else {"axis": axis})
            yield op, (1, 6) if op in ("Add", "Sub", "Mul", "Div") else (1,), {"a": a, "b": b}, more, [want]
    a, b, c = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 5)), RNG.standard_normal(5)
    three = {"a": a.astype(F32), "b": b.astype(F32), "c": c.astype(F32)}
    yield "Gemm", (1, 6), three, {"broadcast": 1, "beta": 0.5}, [a @ b + c / 2]
    slope = C[0]
    yield "PRelu", (1, 6), {"x": X, "_s": slope}, {}, [np.where(X < 0, X * slope[COLUMN], X)]
    for op, merge in (("Max", np.max), ("Min", np.min), ("Sum", np.sum), ("Mean", np.mean)):
        yield op, (1, 6), {"x": X, "y": X[::-1].copy(), "z": -X}, {}, [merge([X, X[::-1], -X], 0)]
    for op, function in (("Softmax", softmax), ("LogSoftmax", lambda *a: np.log(softmax(*a))), ("Hardmax", hardmax)):
        for axis in (0, 1, 2):
            yield op, (1, 11), {"x": X}, {"axis": axis}, [function(X, axis)]
        yield op, (1, 11), {"x": X}, {}, [function(X, 1)]
        yield op, (11,), {"x": X}, {"axis": -2}, [function(X, 2)]
    # Statistics: folded where they are known, computed where not, also in training.
    for place in ("", "_"):
        names = [f"{place}{n}" for n in ("scale", "bias", "mean", "var")]
        channels, elements = dict(zip(names, C, strict=True)), dict(zip(names, E, strict=True))
        by_elements = normalized(E[0], E[1], E[2], E[3], spatial=False)
        old, test = {"consumed_inputs": [0, 0, 0, 1, 1]}, {"is_test": 1}
        for version, more in ((1, old | test), (6, test), (7, {})):
            yield "BatchNormalization", (version,), {"x": X, **channels}, more, [normalized(*C)]
            more = more | {"spatial": 0}
            yield "BatchNormalization", (version,), {"x": X, **elements}, more, [by_elements]
        yield "BatchNormalization", (9,), {"x": X, **channels}, {}, [normalized(*C)]
        for version, more in ((1, old), (6, {}), (7, {}), (9, {})):
            yield "BatchNormalization", (version,), {"x": X, **channels}, more, trained(C, (0, 2, 3))
        yield "BatchNormalization", (6,), {"x": X, **elements}, {"spatial": 0}, trained(E, (0,))
    yield "Dropout", (1, 6), {"x": X}, {"is_test": 1, "ratio": 0.3}, [X]
    yield "Dropout", (7,), {"x": X}, {"ratio": 0.3}, [X, np.ones_like(X)]
    yield "Dropout", (10,), {"x": X}, {"ratio": 0.3}, [X, np.ones(X.shape, bool)]
    yield "Dropout", (1, 6), {"x": X}, {"ratio": 0.0}, [X, np.ones_like(X)]
    yield "Dropout", (1, 6), {"x": X}, {"ratio": 1.0}, [np.zeros_like(X), np.zeros_like(X)]
    for name, dtype in (("FLOAT16", F16), ("INT32", I32), ("BOOL", bool), ("DOUBLE", np.float64)):
        yield "Cast", (1,), {"x": 5 * X}, {"to": name}, [(5 * X).astype(dtype)]
    wild = np.array([-INF, -3, 0, 3, INF], F32)
    yield "Clip", (1,), {"x": wild}, {"min": -2.0}, [np.maximum(wild, -2)]
    yield "Clip", (1,), {"x": wild}, {"max": 2.0}, [np.minimum(wild, 2)]
    limit = np.finfo(F32).max
    yield "Clip", (6,), {"x": wild}, {"min": -2.0}, [np.clip(wild, -2, limit)]
    yield "Clip", (6,), {"x": wild}, {}, [np.clip(wild, -limit, limit)]
    yield "Selu", (1,), {"x": X}, {}, [1.0507 * np.where(X > 0, X, 1.6732 * np.expm1(X))]
    yield "Concat", (1,), {"x": X, "y": X}, {}, [np.concatenate([X, X], 1)]
    yield "Concat", (1,), {"x": X, "y": X}, {"axis": 2}, [np.concatenate([X, X], 2)]
    yield "Split", (1,), {"x": X}, {"axis": 1, "split": [1, 2, 3]}, np.split(X, [1, 3], 1)
    yield "Split", (1,), {"x": X, "_s": np.array([1, 2, 3], F32)}, {"axis": 1}, np.split(X, [1, 3], 1)
    yield "Split", (2, 11), {"x": X}, {"split": [1, 1]}, np.split(X, 2, 0)
    yield (
        "DepthToSpace",
        (1,),
        {"x": X[:, :4]},
        {"blocksize": 2},
        [X[:, :4].reshape(2, 2, 2, 1, 4, 4).transpose(0, 3, 4, 1, 5, 2).reshape(2, 1, 8, 8)],
    )
    powers = (np.abs(X.astype(np.float64)) ** 3).sum((2, 3), keepdims=True) ** (1 / 3)
    yield "GlobalLpPool", (1,), {"x": X}, {"p": 3.0}, [powers]
    yield "GlobalLpPool", (2, 22), {"x": X}, {"p": 3}, [powers]
    squares = np.sqrt((X.astype(np.float64) ** 2).reshape(2, 6, 2, 2, 2, 2).sum((3, 5)))
    pool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    yield "LpPool", (1,), {"x": X}, pool | {"p": 2.0}, [squares]
    yield "LpPool", (1,), {"x": X}, pool, [squares]
    wide = [(0, 0), (0, 0), (1, 2), (0, 3)]
    flat = [0, 0, 1, 0, 0, 0, 2, 3]
    for mode in ("constant", "edge", "reflect"):
        more = {"constant_values": 1.5} if mode == "constant" else {}
        want = [np.pad(X, wide, mode, **more)]
        yield "Pad", (1,), {"x": X}, {"paddings": flat, "mode": mode, "value": 1.5}, want
        yield "Pad", (2,), {"x": X}, {"pads": flat, "mode": mode, "value": 1.5}, want
    yield "Pad", (2,), {"x": X}, {"pads": [0, 0, -1, 1, 0, 0, 0, 0]}, [np.pad(X[:, :, 1:], [*wide[:2], (0, 0), (1, 0)])]
    positive = np.abs(A)
    log, total = np.log, lambda x, **k: np.sum(x, **k)
    for op, function in {
        "ReduceSum": total, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceProd": np.prod,
        "ReduceL1": total, "ReduceL2": lambda x, **k: np.sqrt(total(x * x, **k)),
        "ReduceSumSquare": lambda x, **k: total(x * x, **k), "ReduceLogSum": lambda x, **k: log(total(x, **k)),
        "ReduceLogSumExp": lambda x, **k: log(total(np.exp(x), **k)),
    }.items():  # fmt: skip
        versions = (1, 11) if op == "ReduceSum" else (1, 11, 13)
        yield op, versions, {"x": positive}, {"axes": [1, 3]}, [function(positive, axis=(1, 3), keepdims=True)]
        yield op, versions, {"x": positive}, {"keepdims": 0}, [function(positive, axis=(0, 1, 2, 3))]
        yield op, versions[1:], {"x": positive}, {"axes": [-1], "keepdims": 0}, [function(positive, axis=3)]
    yield "Reshape", (1,), {"x": X}, {"shape": [0, -1, 8]}, [X.reshape(2, -1, 8)]
    cut = {"starts": [1, -3], "ends": [1000, -1]}
    yield "Slice", (1,), {"x": X}, cut, [X[1:, -3:-1]]
    yield "Slice", (1,), {"x": X}, cut | {"axes": [3, 1]}, [X[:, -3:-1, :, 1:]]
    one = X[:, :1, :, :1].copy()
    yield "Squeeze", (1, 11), {"x": one}, {"axes": [1, 3]}, [one[:, 0, :, 0]]
    yield "Squeeze", (1, 11), {"x": one}, {}, [one.squeeze()]
    yield "Unsqueeze", (1, 11), {"x": X}, {"axes": [0, 5]}, [X[None, ..., None]]
    yield "Unsqueeze", (11,), {"x": X}, {"axes": [-1]}, [X[..., None]]
    tile = {"_tiles": np.array([3], F32), "_axis": np.array([2], F32)}
    yield "Tile", (1,), {"x": X, **tile}, {}, [np.tile(X, (1, 1, 3, 1))]
    order = np.argsort(-X, 1, kind="stable")[:, :2]
    yield "TopK", (1,), {"x": X}, {"k": 2, "axis": 1}, [np.take_along_axis(X, order, 1), order]
    larger = X.repeat(2, 2).repeat(3, 3)
    yield "Upsample", (1,), {"x": X}, {"height_scale": 2.0, "width_scale": 3.0}, [larger]
    yield "Upsample", (7,), {"x": X}, {"scales": [1.0, 1.0, 2.0, 3.0]}, [larger]
    yield "Upsample", (9,), {"x": X, "_s": np.array([1, 1, 2, 3], F32)}, {}, [larger]
    yield "Resize", (10,), {"x": X, "_s": np.array([1, 1, 0.6, 3], F32)}, {}, [X[:, :, [0, 2]].repeat(3, 3)]
    roi = {"_roi": np.zeros(0, F32), "_s": np.array([1, 1, 2, 1], F32)}
    yield (
        "Resize",
        (11,),
        {"x": X, **roi},
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        [X.repeat(2, 2)],
    )
    groups, per_group = X.reshape(2, 3, 2, 4, 4), (np.array([1, 2, 3], F32), np.array([0, 1, -1], F32))
    parts = (groups - groups.mean((2, 3, 4), keepdims=True)) / np.sqrt(groups.var((2, 3, 4), keepdims=True) + 1e-5)
    scaled = parts * per_group[0][:, None, None, None] + per_group[1][:, None, None, None]
    yield (
        "GroupNormalization",
        (18,),
        dict(zip(("x", "_s", "_b"), (X, *per_group), strict=True)),
        {"num_groups": 3},
        [scaled.reshape(X.shape)],
    )
    region = {"rois": np.array([[0.4, 0.3, 3.1, 3.6]], F32), "images": np.array([1])}
    yield "RoiAlign", (10,), {"x": X, **region}, {"output_height": 2, "output_width": 2, "sampling_ratio": 2}, None
    rois = {"rois": np.array([[0, 0, 0, 3, 3], [1, 1, 0, 2, 3]], F32)}
    yield "MaxRoiPool", (1, 22), {"x": X, **rois}, {"pooled_shape": [2, 2]}, None


OLD = list(old_cases())
RUNTIME = {"RoiAlign": 10, "MaxRoiPool": 7}
"""Operators whose truth is ONNX Runtime's, and the version that it has."""


def proto_of(op, version, inputs, attributes, count):
    names = [n.lstrip("_") for n in inputs]
    fed = [value(n, a.dtype, a.shape) for n, a in inputs.items() if not n.startswith("_")]
    made = node(op, " ".join(names), " ".join(f"out{i}" for i in range(count)), **attributes)
    known = {n[1:]: a for n, a in inputs.items() if n.startswith("_")}
    return model([made], fed, list(made.output), known, version)


def by_runtime(proto, feeds):
    """The results of ONNX Runtime, or ``None`` where it does not run the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception:  # it has a type of its own for each kind of refusal
        return None
    return session.run(None, feeds)


def test_every_version_of_every_operator_has_a_case():
    covered = {pair for pair, found in of_the_standard() if found}
    covered |= {(op, version) for op, versions, *_ in OLD for version in versions}
    covered |= {pair for pair in PAIRS if pair[0] in ABSENT} | set(RETIRED) | OTHERS
    assert sorted(PAIRS - covered) == []


@pytest.mark.timeout(300)
def test_the_tests_of_onnx_in_every_version_in_which_they_mean_the_same():
    wrong = []
    for (op, version), found in of_the_standard():
        for case in found:
            result = run_case(in_version(case, version), ["cpu", "host"])
            if result.state != "passed":
                wrong.append((op, version, case.name, result.why))
    assert wrong == []


def test_versions_with_a_meaning_of_their_own(placement):
    for op, versions, inputs, attributes, wanted in OLD:
        feeds = {n: a for n, a in inputs.items() if not n.startswith("_")}
        for version in versions:
            count = 1 if wanted is None else len(wanted)
            # In a model of the version in which it begins, and of the last one that has it.
            later = min([s.since_version for s in HISTORY[op] if s.since_version > version], default=version + 1) - 1
            for imported in {version, later} if placement[0] == "cpu" else {version}:
                proto = proto_of(op, imported, inputs, attributes, count)
                truth = wanted or by_runtime(proto_of(op, RUNTIME[op], inputs, attributes, 1), feeds)
                with opweave_onnx.load(proto, placement) as loaded:
                    found = list(loaded.run(feeds).values())
                for have, want in zip(found, truth, strict=True):
                    message = f"{op} {imported} {attributes}"
                    assert have.shape == np.shape(want), message
                    np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-5, err_msg=message)


def test_onnx_runtime_agrees_from_version_7_on():
    """That the truths above are what ONNX Runtime computes, too; it has no training of versions before 14, and its
    mask of Dropout before version 12 is not filled."""
    compared = 0
    for op, versions, inputs, attributes, wanted in OLD:
        last = max(s.since_version for s in HISTORY[op])
        for version in versions:
            later = min([s.since_version for s in HISTORY[op] if s.since_version > version], default=last + 1) - 1
            trains = op == "BatchNormalization" and wanted is not None and len(wanted) > 1
            if later < 7 or wanted is None or trains or op == "Dropout":
                continue
            feeds = {n: a for n, a in inputs.items() if not n.startswith("_")}
            found = by_runtime(proto_of(op, later, inputs, attributes, len(wanted)), feeds)
            for have, want in zip(found or (), wanted, strict=False):
                np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-5, err_msg=f"{op} {later} {attributes}")
                compared += 1
    assert compared > 50


# --- sequences, loops, random numbers -------------------------------------------------------------------------------

OTHERS = {
    *[(op, 11) for op in ("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
                          "SequenceLength")],
    ("Loop", 1), ("Optional", 15), ("Optional", 28),
    *[(f"Random{kind}{like}", v) for kind in ("Normal", "Uniform") for like in ("", "Like") for v in (1, 22)],
}  # fmt: skip
"""Pairs of operators and versions that the following tests cover."""


def test_sequences_in_version_11():
    nodes = [
        node("SequenceEmpty", "", "none"),
        node("SequenceInsert", "none x", "one"),
        node("SequenceLength", "one", "n"),
        node("SequenceConstruct", "x y x", "three"),
        node("SequenceErase", "three at", "two"),
        node("SequenceAt", "two at", "second"),
        node("ConcatFromSequence", "two", "both", axis=1),
    ]
    x, y = X[0], 2 * X[1]
    proto = model(nodes, [value("x", F32, x.shape), value("y", F32, y.shape)], ["n", "second", "both"],
                  {"at": np.array(1)}, 11)  # fmt: skip
    with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
        found = loaded.run({"x": x, "y": y})
    assert found["n"] == 1
    np.testing.assert_array_equal(found["second"], x)
    np.testing.assert_array_equal(found["both"], np.concatenate([x, x], 1))


@pytest.mark.parametrize("version", [15, 28])
def test_optional_values(version):
    nodes = [node("Optional", "x", "o"), node("OptionalGetElement", "o", "e"), node("Neg", "e", "y")]
    with opweave_onnx.load(model(nodes, [value("x", F32, [3])], ["y"], version=version), ["cpu", "host"]) as loaded:
        np.testing.assert_array_equal(loaded(x=np.ones(3, F32)), -np.ones(3))


def test_a_loop_of_version_1():
    body = onnx.helper.make_graph(
        [node("Add", "w w", "next"), node("Identity", "go", "again"), node("Identity", "w", "row")], "body",
        [value("i", I64, []), value("go", bool, []), value("w", F32, [2])],
        [value("again", bool, []), value("next", F32, [2]), value("row", F32, [2])],
    )  # fmt: skip
    for count in (0, 1, 3):
        proto = model([node("Loop", "count - x", "y rows", body=body)], [value("x", F32, [2])], ["y", "rows"],
                      {"count": np.array(count)}, 1)  # fmt: skip
        x = np.array([1, 3], F32)
        with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
            found = loaded.run({"x": x})
        np.testing.assert_array_equal(found["y"], x * 2**count)
        np.testing.assert_array_equal(found["rows"], np.array([x * 2**i for i in range(count)]).reshape(count, 2))


@pytest.mark.parametrize("version", [1, 22])
def test_random_numbers(version):
    like = np.zeros((40, 50), F32)
    nodes = [
        node("RandomNormal", "", "a", shape=[40, 50], mean=3.0, scale=2.0, dtype=11),
        node("RandomNormalLike", "x", "b", mean=3.0, scale=2.0),
        node("RandomUniform", "", "c", shape=[40, 50], low=-1.0, high=2.0),
        node("RandomUniformLike", "x", "d", low=-1.0, high=2.0, dtype=10),
    ]
    with opweave_onnx.load(model(nodes, [value("x", F32, [40, 50])], [*"abcd"], version=version), ["cpu", "host"]) as m:
        found = m.run({"x": like})
    assert [found[k].dtype for k in "abcd"] == [np.float64, F32, F32, F16]
    for k, mean, deviation in (("a", 3, 2), ("b", 3, 2), ("c", 0.5, 3**0.5 / 2), ("d", 0.5, 3**0.5 / 2)):
        assert found[k].shape == like.shape
        assert abs(found[k].astype(np.float64).mean() - mean) < 0.2
        assert abs(found[k].astype(np.float64).std() - deviation) < 0.2
    assert all(found[k].min() >= -1 and found[k].max() <= 2 for k in "cd")


def test_training_dropout_of_old_versions():
    for version in (1, 6):
        made = node("Dropout", "x", "y mask", ratio=0.25)
        with opweave_onnx.load(
            model([made], [value("x", F32, [100, 100])], ["y", "mask"], version=version), ["cpu"]
        ) as m:
            found = m.run({"x": np.ones((100, 100), F32)})
        assert found["mask"].dtype == F32
        assert 0.7 < found["mask"].mean() < 0.8
        np.testing.assert_allclose(found["y"], found["mask"] / 0.75, rtol=1e-6)


# --- what is not valid ----------------------------------------------------------------------------------------------


def refused(proto, match, error=ow.FormatError):
    with pytest.raises(error, match=match):
        opweave_onnx.load(proto, ["cpu"])


P = value("x", F32, [2, 3, 4])


def test_operators_of_other_versions_are_refused_with_the_version():
    for (op, version), instead in RETIRED.items():
        inputs = "x x" if op == "Upsample" else "x x x"
        match = (
            rf"node '{op.lower()}_y' \({op}\): version {version} of ai.onnx retired {op}.*version 13; it has {instead}"
        )
        refused(model([node(op, inputs, "y")], [P], ["y"], version=13), match, ow.UnsupportedOpError)
    for op, version in (("Gelu", 20), ("Resize", 10), ("Where", 9)):
        match = rf"\({op}\): ai.onnx has {op} from version {version} on; the model imports version {version - 1}"
        refused(model([node(op, "x", "y")], [P], ["y"], version=version - 1), match, ow.UnsupportedOpError)
    for op in ABSENT:
        assert ("", op) not in OPERATORS
        proto = model([node(op, "x", "y")], [P], ["y"], version=28)
        with pytest.raises(ow.OpweaveError, match=op):
            opweave_onnx.load(proto, ["cpu"])
    proto = proto_of("Split", 1, {"x": X}, {}, 2)
    with (
        opweave_onnx.load(proto, ["cpu"]) as loaded,
        pytest.raises(ow.UnsupportedOpError, match="version 1 does not say"),
    ):
        loaded.run({"x": X})


@pytest.mark.parametrize(
    ("made", "version", "match"),
    [
        (node("LeakyRelu", "x", "y", slope=0.5), 21,
         r"node 'leakyrelu_y' \(LeakyRelu\): LeakyRelu in version 21 of ai.onnx has no attribute 'slope'; its"),
        (node("Add", "x x", "y", broadcast=1, axis=1), 7, r"no attribute '(axis|broadcast)'; its attributes: none"),
        (node("Softmax", "x", "y", axis=1.0), 13, "'axis' of Softmax in version 13 of ai.onnx is of type INT, not FL"),
        (node("LeakyRelu", "x", "y", alpha="much"), 21, "'alpha' of LeakyRelu.* is of type FLOAT, not STRING"),
        (node("LeakyRelu", "x", "y", alpha=1), 21, "is of type FLOAT, not INT"),
        (node("Cast", "x", "y"), 13, "attribute 'to' is missing, which Cast in version 13 of ai.onnx requires"),
        (node("Cast", "x", "y", to="FLOAT"), 6, "'to' of Cast in version 6 of ai.onnx is of type INT, not STRING"),
        (node("Relu", "x x", "y"), 21, r"node 'relu_y' \(Relu\) has 2 inputs; Relu has 1$"),
        (node("Conv", "x", "y"), 21, r"node 'conv_y' \(Conv\) has 1 inputs; Conv has 2 to 3$"),
        (node("Concat", "", "y", axis=0), 21, "has 0 inputs; Concat has at least 1$"),
        (node("Relu", "x", "y z"), 21, "has 2 outputs; Relu has 1$"),
        (node("Add", "- x", "y"), 21, "input 0 is left out, which Add needs$"),
        (node("Squeeze", "x", "y", axes=[0]), 13, "Squeeze in version 13 of ai.onnx has no attribute 'axes'"),
        (node("Squeeze", "x x", "y"), 12, "has 2 inputs; Squeeze has 1$"),
        (node("ReduceMean", "x", "y", axes=[0]), 18, "ReduceMean in version 18 .* has no attribute 'axes'"),
        (node("Dropout", "x", "y", ratio=0.5), 13, "Dropout in version 13 of ai.onnx has no attribute 'ratio'"),
        (onnx.helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft", beta=1.0), 21,
         "QuickGelu in version 1 of com.microsoft has no attribute 'beta'; its attributes: alpha"),
        (onnx.helper.make_node("Attention", ["x", "x"], ["y"], domain="com.microsoft"), 21, "'num_heads' is missing"),
        (onnx.helper.make_node("BiasGelu", ["x"], ["y"], domain="com.microsoft"), 21, "has 1 inputs; BiasGelu has 2"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_fit_their_schema_are_refused_when_they_are_loaded(made, version, match):
    refused(model([made], [P], ["y"], version=version), match)
    branch = onnx.helper.make_graph([made], "branch", [], [onnx.ValueInfoProto(name="y")])
    within = node("If", "c", "out", then_branch=branch, else_branch=branch)
    refused(model([within], [P], ["out"], {"c": np.array(True)}, version), match)


def test_attributes_that_opweave_runs_at_one_value_only():
    made = onnx.helper.make_node("Attention", ["x", "x"], ["y"], domain="com.microsoft", num_heads=1, do_rotary=1)
    refused(model([made], [P], ["y"]), "do_rotary=1 is not supported; do_rotary=0 is", ow.UnsupportedOpError)
    made = node("LayerNormalization", "x x", "y", stash_type=16)
    refused(model([made], [P], ["y"]), "stash_type=16 is not supported; stash_type=1 is", ow.UnsupportedOpError)


def test_an_attribute_that_is_twice_there_and_one_of_a_tool():
    made = node("LeakyRelu", "x", "y", alpha=0.5, __note=1)
    with opweave_onnx.load(model([made], [P], ["y"]), ["cpu"]) as loaded:
        np.testing.assert_array_equal(loaded(x=np.full((2, 3, 4), -2, F32)), np.full((2, 3, 4), -1))
    made.attribute.append(onnx.helper.make_attribute("alpha", 0.5))
    refused(model([made], [P], ["y"]), "attribute 'alpha' is there twice")


@pytest.mark.parametrize(
    ("op", "version", "inputs", "attributes", "match"),
    [
        ("Add", 6, {"a": A, "b": A[0, 0, 0]}, {}, r"\(Add\): .* differ, and broadcast is 0, its default before"),
        ("Add", 6, {"a": A, "b": A[0, 0]}, {"broadcast": 1, "axis": 1}, r"are not the axes of .* from axis 1 on"),
        ("Add", 6, {"a": A[0], "b": A}, {"broadcast": 1}, r"\(Add\)"),
        ("Max", 6, {"a": A, "b": A[0]}, {}, r"\(Max\): .* differ, which version 8 allows first"),
        ("Gemm", 6, {"a": A[0, 0], "b": A[0, 0].T.copy(), "c": A[0, 0, 0, :4]}, {}, r"\(Gemm\): C is .*broadcast is 0"),
        ("Cast", 1, {"x": A}, {"to": "REAL"}, r"\(Cast\): attribute 'to' is 'REAL', which is no type"),
        ("Conv", 21, {"x": X, "_w": X[:, :, :3, :3].copy()}, {"kernel_shape": [2, 2]}, "kernel_shape is .*weights"),
        ("ConvTranspose", 21, {"x": X, "_w": X.transpose(1, 0, 2, 3).copy()}, {"kernel_shape": [2, 2]}, "weights have"),
        ("RNN", 21, {"x": A[0], "_w": A[0, :1, :4], "_r": A[0, :1, :4, :4].copy()}, {"hidden_size": 3}, "size is 3"),
    ],
)  # fmt: skip
def test_shapes_that_a_version_does_not_allow(op, version, inputs, attributes, match):
    proto = proto_of(op, version, inputs, attributes, 1)
    feeds = {n: np.ascontiguousarray(a) for n, a in inputs.items() if not n.startswith("_")}
    with (
        opweave_onnx.load(proto, ["cpu", "host"]) as loaded,
        pytest.raises((ow.ShapeError, ow.FormatError), match=match),
    ):
        loaded.run(feeds)


def test_signatures_of_com_microsoft_are_those_of_onnx_runtime():
    known = {s.name: s for s in onnxruntime_pybind11_state.get_all_operator_schema() if s.domain == "com.microsoft"}
    compared = 0
    for op, schema in known.items():
        signature = signature_of(op, 1, "com.microsoft")
        if signature is not None:
            attributes = {a.name: str(a.type).rpartition(".")[2] for a in schema.attributes.values()}
            assert {n: onnx.AttributeProto.AttributeType.Name(k) for n, k in signature.attributes.items()} == attributes
            assert signature.required == {a.name for a in schema.attributes.values() if a.required}
            assert signature.inputs == (schema.min_input, schema.max_input), op
            assert signature.outputs == (schema.min_output, schema.max_output), op
            compared += 1
    assert compared >= 30
