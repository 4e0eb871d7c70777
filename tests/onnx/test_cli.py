"""``opweave onnx``: info, plan, run and compare."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import opweave_onnx
from opweave.errors import SchedulerError
from opweave_onnx.cli import add_commands
from opweave_onnx.compare import examples
from tests.support.onnx_models import mlp, model, node, value


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mlp.onnx"
    file.write_bytes(mlp(np.random.default_rng(0)).SerializeToString())
    return str(file)


def call(*arguments, code=0):
    app = typer.Typer()
    add_commands(app)
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, ["onnx", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def test_info(path):
    document = json.loads(call("info", path, "--json"))
    assert document["inputs"] == [{"name": "x", "dtype": "f32", "shape": ["batch", 16]}]
    assert document["operators"] == {"Gemm": 2, "Relu": 1, "Softmax": 1}
    assert document["missing"] == {}
    assert document["bytes"] == 4 * (16 * 32 + 32 + 16 * 32)
    assert "batch×16" in call("info", path)


def test_info_names_what_is_not_known(tmp_path):
    file = tmp_path / "m.onnx"
    file.write_bytes(model([node("Foo", "x", "y")], [value("x", np.float32, [2])], ["y"]).SerializeToString())
    assert json.loads(call("info", str(file), "--json"))["missing"] == {"Foo": ["foo_y"]}
    assert "not known: Foo (foo_y)" in call("info", str(file))


def test_plan(path, tmp_path):
    page = tmp_path / "plan.html"
    text = call("plan", path, "--devices", "cpu,host", "--dim", "batch=4", "--html", str(page))
    assert "gemm_h" in text
    assert "cpu: 4.12 KiB weights" in text
    assert "gemm_h" in page.read_text()
    document = json.loads(call("plan", path, "--devices", "cpu,host", "--json"))
    assert {row["device"] for row in document["nodes"]} == {"cpu"}
    assert document["memory"]["cpu"]["weights"] == 4224
    assert document["lacking"] == {}


def test_lengths_of_axes_that_are_not_there_are_told(path):
    with pytest.raises(AssertionError, match="there is no dynamic axis named 'foo'; there are: batch"):
        call("plan", path, "--devices", "cpu", "--dim", "foo=3")


def test_plan_says_what_a_device_lacks(tmp_path):
    file = tmp_path / "m.onnx"
    file.write_bytes(model([node("Det", "x", "y")], [value("x", np.float32, [2, 2])], ["y"]).SerializeToString())
    document = json.loads(call("plan", str(file), "--devices", "cpu,host", "--json"))
    assert "onnx.det" in document["lacking"]["cpu"]
    assert "cpu does not run onnx.det" in call("plan", str(file), "--devices", "cpu,host")


def test_run(path, tmp_path):
    x = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    document = json.loads(call("run", path, "--devices", "cpu", "--input", f"x={tmp_path / 'x.npy'}", "--output",
                               str(tmp_path / "out"), "--json"))  # fmt: skip
    assert document["outputs"] == [{"name": "y", "dtype": "float32", "shape": [3, 16]}]
    np.testing.assert_allclose(np.load(tmp_path / "out" / "y.npy").sum(-1), 1, rtol=1e-5)
    assert "first run" in call("run", path, "--devices", "cpu", "--dim", "batch=2", "--repeat", "2")


def test_compare(path):
    document = json.loads(call("compare", path, "--devices", "cpu", "--dim", "batch=3", "--json"))
    assert document["agree"]
    assert [row["op"] for row in document["values"]] == ["Gemm", "Relu", "Gemm", "Softmax"]
    shown = call("compare", path, "--devices", "cpu")
    assert "first difference" not in shown
    assert shown.splitlines()[-1].startswith("outputs agree: largest mean square error ")


def test_values_that_nobody_gave_suit_the_inputs():
    """Ids are rows of the tables that they index, masks are ones, images have all values."""
    inputs = [value("ids", np.int64, ["n"]), value("mask", np.int64, ["n"]), value("picture", np.uint8, ["n"]),
              value("x", np.float32, ["n"])]  # fmt: skip
    nodes = [
        node("Cast", "ids", "ids32", to=6),
        node("Gather", "wide ids32", "a"),
        node("Gather", "narrow ids", "b", axis=1),
    ]  # fmt: skip
    tables = {"wide": np.zeros((50, 1), np.float32), "narrow": np.zeros((1, 7), np.float32)}
    with opweave_onnx.load(model(nodes, inputs, ["a", "b"], tables), ["host"]) as loaded:
        drawn, again = examples(loaded, 3, n=500), examples(loaded, 3, n=500)
        assert examples(loaded)["ids"].shape == (1,)
    assert set(drawn["ids"]) == set(range(7))
    assert (drawn["mask"] == 1).all()
    assert drawn["picture"].min() < 10
    assert drawn["picture"].max() > 245
    assert 0.9 < drawn["x"].std() < 1.1
    assert all(a.dtype == v.dtype and (a == v).all() for a, v in zip(drawn.values(), again.values(), strict=True))


@pytest.mark.parametrize(
    ("command", "wrong", "kind", "says"),
    [
        ("run", ["--dim", "batch"], SchedulerError, "--dim is given as NAME=N, not 'batch'"),
        ("run", ["--dim", "batch=x"], SchedulerError, "the length of 'batch' is a number, not 'x'"),
        ("run", ["--input", "x"], SchedulerError, "--input is given as NAME=FILE.npy, not 'x'"),
        ("run", ["--input", "x=/nowhere.npy"], SchedulerError, "cannot read /nowhere.npy: No such file or directory"),
    ],
)
def test_wrong_arguments(path, command, wrong, kind, says):
    app = typer.Typer()
    add_commands(app)
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, ["onnx", command, path, "--devices", "cpu", *wrong])
    assert isinstance(done.exception, kind)
    assert says in str(done.exception)


@pytest.mark.parametrize(
    ("command", "wrong"), [("run", ["--output", "/dev/null/x"]), ("plan", ["--html", "/nowhere/x.html"])]
)
def test_results_that_could_not_be_written_are_a_wrong_call(path, command, wrong):
    call(command, path, *wrong, code=2)


def test_the_command_is_there():
    done = subprocess.run(
        [sys.executable, "-m", "opweave", "onnx", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in ("info", "plan", "run", "compare"))
