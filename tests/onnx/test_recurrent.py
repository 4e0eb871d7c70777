"""Recurrent networks: short ones as parts of the graph, long ones by a program for some steps that is run again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

import opweave_onnx
from tests.support.onnx_models import model, node, value

F32, I32 = np.float32, np.int32
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def network(op, directions, steps, *, lengths=False, start=False, size=6, width=3, weights="known", **attributes):
    rng = np.random.default_rng(3)
    direction = {1: attributes.pop("direction", "forward"), 2: "bidirectional"}[directions]
    rows = GATES[op] * size
    known = {
        "w": rng.standard_normal((directions, rows, width)).astype(F32) / 2,
        "r": rng.standard_normal((directions, rows, size)).astype(F32) / 2,
        "b": rng.standard_normal((directions, 2 * rows)).astype(F32) / 4,
    }
    inputs = [value("x", F32, [steps, "n", width])]
    names = ["x", "w", "r", "b", "lengths" if lengths else "-"]
    if lengths:
        inputs.append(value("lengths", I32, ["n"]))
    if start:
        inputs.append(value("h", F32, [directions, "n", size]))
        names.append("h")
        if op == "LSTM":
            inputs.append(value("c", F32, [directions, "n", size]))
            names.append("c")
    outputs = ["y", "last", *(["cell"] if op == "LSTM" else [])]
    while names[-1] == "-":
        names.pop()
    scaled = [node(op, " ".join(names), " ".join(outputs), hidden_size=size, direction=direction, **attributes),
              node("Neg", "y", "z")]  # fmt: skip
    return model(scaled, inputs, ["z", *outputs[1:]], known)


def feeds_of(proto, batch=2):
    rng = np.random.default_rng(4)
    feeds = {}
    for given in proto.graph.input:
        shape = [d.dim_value or batch for d in given.type.tensor_type.shape.dim]
        if given.name == "lengths":
            feeds["lengths"] = rng.integers(1, proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value, batch, I32)
        else:
            feeds[given.name] = rng.standard_normal(shape).astype(F32)
    return feeds


def agree(proto, loaded, feeds):
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = loaded.run(feeds)
    for name, want in zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True):
        np.testing.assert_allclose(found[name], want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(("directions", "options"), [
    (1, {}), (2, {"lengths": True, "start": True}), (1, {"direction": "reverse", "start": True}),
])  # fmt: skip
@pytest.mark.parametrize("steps", [5, 100])
def test_networks_agree_with_onnx_runtime(op, directions, options, steps):
    proto = network(op, directions, steps, **options)
    with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
        agree(proto, loaded, feeds_of(proto))
        agree(proto, loaded, feeds_of(proto, 3))


def test_long_networks_run_on_every_device(placement):
    proto = network("LSTM", 2, 70, lengths=True)
    with opweave_onnx.load(proto, placement) as loaded:
        agree(proto, loaded, feeds_of(proto))


def test_a_long_network_is_a_program_for_some_steps_that_is_run_again():
    proto = network("LSTM", 1, 1000)
    with opweave_onnx.load(proto, ["cpu"]) as loaded:
        feeds = feeds_of(proto)
        agree(proto, loaded, feeds)
        bodies: dict[Any, Any] = dict(loaded.session._bodies)
        assert sorted(key[2] for key in bodies) == [8, 32]  # 31 times 32 steps, and 8
        nodes = [len(program.explain().nodes) for program in bodies.values()]
        assert sum(nodes) + len(loaded.program(feeds).explain().nodes) < 700
        traced = loaded.traced
        agree(proto, loaded, feeds)
        assert loaded.traced == traced
        assert dict(loaded.session._bodies) == bodies


def test_a_plan_of_a_long_network_takes_no_memory():
    proto = network("GRU", 1, 200)
    with opweave_onnx.load(proto, ["cpu", "host"]) as loaded:
        assert loaded.plan().partition.graph.nodes
        assert not loaded.session._bodies
