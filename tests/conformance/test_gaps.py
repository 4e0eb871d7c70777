"""`opweave conformance acme --gaps MODEL`: what a device lacks for a model, by what it costs, with what to declare."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import opweave as ow
from opweave import registry as core_registry
from opweave.cli.app import build_app
from opweave.contract import Device
from opweave.errors import SchedulerError, UnknownNameError
from opweave.registry import Registry
from opweave_conformance.gaps import Gaps, gaps
from opweave_conformance.hooks import opweave_cli
from tests.support.example_backend import ExampleDevice


@pytest.fixture
def device() -> Device:
    made = ExampleDevice()  # add sub mul exp linear of f32, dense, in memory of its own
    made.name = "example"
    return made


def found_in(outputs: Any, device: Device) -> Gaps:
    with ow.Scheduler([device, ow.device("host")]) as scheduler:
        return gaps(device, scheduler.partition(outputs), "a graph")


def test_each_refused_operation_has_its_reason_cost_and_declaration(device: Device):
    x = ow.input("x", (8, 64))
    w = ow.weights({"w": np.ones((64, 64), "f4")})["w"]
    found = found_in(ow.exp(ow.softmax(ow.linear(x, w)) + x), device)
    (gap,) = found.rows
    assert (gap.op, gap.dtypes, gap.steps, gap.device) == ("softmax", "f32 f32", 1, "host")
    assert gap.reason == "no kernel for softmax"
    assert gap.declaration == '@kernels("softmax", dtypes="f32")'
    assert (gap.copies, gap.nbytes) == (2, 2 * 8 * 64 * 4)  # there and back
    assert gap.seconds is not None
    assert gap.seconds > 0
    assert gap.cost == gap.seconds + gap.copying
    assert gap.copying > 0
    assert (found.taken, found.steps) == (3, 4)
    assert found.text.startswith("example runs 3 of 4 steps of a graph")


def test_the_most_expensive_comes_first(device: Device):
    big, small = ow.input("big", (512, 1024)), ow.input("small", (1, 4))
    found = found_in((ow.exp(ow.cumsum(big, 1)), ow.exp(ow.tanh(small))), device)
    assert [gap.op for gap in found.rows] == ["cumsum", "tanh"]
    assert found.rows[0].cost > found.rows[1].cost


def test_equal_steps_are_one_gap_and_other_types_are_another(device: Device):
    x, y = ow.input("x", (4, 4)), ow.input("y", (4, 4), "f16")
    found = found_in((ow.tanh(ow.tanh(ow.tanh(x))), ow.exp(y)), device)
    by_op = {gap.op: gap for gap in found.rows}
    assert by_op["tanh"].steps == 3
    assert by_op["exp"].reason == "the output is f16, not f32"
    assert by_op["exp"].declaration == '@kernels("exp", dtypes="f16")'


def test_indices_are_declared_beside_the_data(device: Device):
    table, ids = ow.weights({"t": np.ones((16, 8), "f4")})["t"], ow.input("ids", (3,), "i64")
    (gap,) = found_in(ow.embedding(table, ids), device).rows
    assert gap.declaration == '@kernels("embedding", dtypes="f32", index="i64")'


def test_a_condition_of_a_kernel_is_named(device: Device):
    w, b = ow.weights({"w": np.ones((4, 4), "f4"), "b": np.ones(4, "f4")}).values()
    (gap,) = found_in(ow.linear(ow.input("x", (2, 4)), w, b), device).rows
    assert gap.reason == "a bias is not supported"
    assert gap.declaration == "let the when= of linear accept it: the types fit"


def test_one_copy_is_no_copies(device: Device):
    x = ow.input("x", (4, 4))
    assert "1 copy of 64 B\n" in found_in(ow.tanh(ow.exp(x)), device).text


def test_declaring_what_it_says_closes_the_gap(device: Device):
    x = ow.input("x", (8, 8))
    (gap,) = found_in(ow.exp(ow.tanh(x)), device).rows
    kernels = type(device.kernels)("f32", "dense", parent=device.kernels)
    device.kernels = kernels
    decorate = eval(gap.declaration[1:], {"kernels": kernels})
    decorate(lambda stream, op, out, a: partial(np.tanh, a.view, out.view))
    assert found_in(ow.exp(ow.tanh(x)), device).rows == []


def test_a_graph_that_prefers_another_device_is_refused(device: Device):
    with ow.Scheduler([ow.device("host"), device]) as scheduler:
        planned = scheduler.partition(ow.tanh(ow.input("x", (2, 2))))
        with pytest.raises(SchedulerError, match="not on example"):
            gaps(device, planned, "a graph")


# --- files ----------------------------------------------------------------------------------------------------------


def plan_of(path: Path, device: Device, length: int = 4) -> Gaps:
    registry = Registry(environ={"OPWEAVE_BACKENDS": ""})
    fmt = registry.model_format(path)
    assert fmt.plan is not None
    with fmt.plan(path, [device, ow.device("host")], length) as planned:
        return gaps(device, planned, path.name)


def test_an_onnx_file_with_open_axes(device: Device, tmp_path: Path):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    from onnx import TensorProto, helper

    nodes = [helper.make_node("Exp", ["x"], ["y"]), helper.make_node("Erf", ["y"], ["z"])]
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=["n", 8])
    graph = helper.make_graph(nodes, "g", [value("x")], [value("z")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "m.onnx")
    (gap,) = plan_of(tmp_path / "m.onnx", device, 32).rows
    assert gap.op == "erf"
    assert gap.nbytes % (32 * 8 * 4) == 0


def test_an_exported_program(device: Device, tmp_path: Path):
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")

    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.tanh(torch.exp(x))

    torch.export.save(torch.export.export(Net(), (torch.ones(3, 5),)), tmp_path / "net.pt2")
    assert [gap.op for gap in plan_of(tmp_path / "net.pt2", device).rows] == ["tanh"]


def test_a_file_of_no_model_is_refused(tmp_path: Path):
    (tmp_path / "m.txt").write_text("no model")
    with pytest.raises(UnknownNameError, match="file format"):
        Registry(environ={}, search=[]).model_format(tmp_path / "m.txt")


@pytest.mark.parametrize(
    ("file", "package"), [("m.onnx", "onnx"), ("m.pt2", "torch"), ("m.gguf", "models"), ("config.json", "models")]
)
def test_the_package_that_reads_a_model_is_named_where_it_is_missing(
    file: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(core_registry, "REGISTRY", Registry(environ={}, search=[]))
    (tmp_path / file).write_bytes(b"")
    app = build_app()
    opweave_cli(app)
    result = CliRunner().invoke(app, ["conformance", "host", "--gaps", str(tmp_path / file)])
    assert result.exit_code == 2
    assert re.search(f"pip install .*{package}", result.output)


def test_a_model_that_is_not_there_is_a_wrong_call(tmp_path: Path):
    app = build_app()
    opweave_cli(app)
    result = CliRunner().invoke(app, ["conformance", "host", "--gaps", "nofile.onnx"])
    assert result.exit_code == 2
    assert "does not exist" in result.output
    result = CliRunner().invoke(app, ["conformance", "host", "--gaps", str(tmp_path)])
    assert result.exit_code == 2
    assert "no config.json" in " ".join(result.output.replace("│", "").split())


def expect_gaps_of_a_transformer(path: Path, device: Device) -> None:
    found = plan_of(path, device, 5)
    assert {"embedding", "attention"} <= {gap.op for gap in found.rows}
    there = {"a bias is not supported": "let the when= of linear accept it"}
    assert all(gap.declaration.startswith(there.get(gap.reason, f'@kernels("{gap.op}"')) for gap in found.rows)
    assert 0 < found.taken < found.steps


@pytest.mark.parametrize("file", ["config.json", "m.gguf"])
def test_a_language_model(file: str, device: Device, tmp_path: Path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from opweave_models.writing import write_gguf
    from tests.support.small_models import make_folder

    make_folder("llama", tmp_path)
    if file == "m.gguf":
        write_gguf(tmp_path, tmp_path / file)
    expect_gaps_of_a_transformer(tmp_path / file, device)


def test_the_folder_of_an_encoder(device: Device, tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=48, max_position_embeddings=64)
    transformers.BertModel(config).save_pretrained(tmp_path)
    expect_gaps_of_a_transformer(tmp_path / "config.json", device)
