"""`opweave_conformance.compare`: two devices node by node, the first difference named, and a script that repeats it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.device import HostDevice
from opweave_conformance import compare
from opweave_conformance.device_comparison import NodeError
from tests.support.devices import BASIC, Separate
from tests.support.rounding import Rounding

F = np.float32


class Wrong(Separate):
    """A device that gets one operation wrong, from the given row on."""

    def __init__(self, op: str, ops: tuple[str, ...] = BASIC) -> None:
        super().__init__("wrong", [name for name in ops if name != op])

        @self.kernels(op, dtypes="f32")
        def broken(stream: Any, op: str, out: Any, *srcs: Any, **attrs: Any) -> Any:
            from opweave.graph.opdef import OPS

            def run() -> None:
                np.copyto(out.view, OPS[op].reference(*[s.view for s in srcs], **attrs), casting="unsafe")
                out.view.reshape(-1)[-1] += 1

            return run


def op_of(row: NodeError) -> str:
    assert row.node.op is not None
    return row.node.op.name


@pytest.fixture
def graph() -> tuple[list[ow.Tensor], dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    w = ow.weights({"w": rng.standard_normal((8, 8)).astype(F)})["w"]
    x, total = ow.input("x", (4, 8)), ow.state("total", (4, 8))
    h = ow.relu(ow.linear(x, w)).named("hidden")
    out = ow.exp(ow.neg(h).T[2:6]).named("out")  # without the last element of neg's result
    return [out, ow.assign(total, total + h)], {"x": rng.standard_normal((4, 8)).astype(F)}


def test_devices_that_agree_agree(graph):
    outputs, feeds = graph
    found = compare(outputs, feeds, first=HostDevice(), second=Separate("same"))
    assert found
    assert found.first_divergence is None
    assert [op_of(row) for row in found.nodes] == ["linear", "relu", "neg", "exp", "add", "assign"]
    assert all(row.nmse == 0 and not row.reason for row in found.nodes)
    assert [row.nmse for row in found.outputs] == [0, 0]
    assert "no difference" in str(found)


@pytest.mark.parametrize("op", ["relu", "neg", "exp", "linear"])
def test_the_node_that_is_wrong_is_named_and_not_the_ones_behind_it(graph, op):
    outputs, feeds = graph
    found = compare(outputs, feeds, first=HostDevice(), second=Wrong(op))
    assert not found
    assert [op_of(row) for row in found.nodes if row.diverges] == [op]
    assert found.first_divergence is not None
    assert op_of(found.first_divergence) == op
    assert "first difference" in str(found)
    assert any(row.diverges for row in found.outputs) == (op != "neg"), "differences at the outputs are reported too"


def test_states_are_as_they_were(graph):
    outputs, feeds = graph
    total = next(t for t in ow.Graph(outputs).leaves if t.name == "total")
    ow.write(total, np.full((4, 8), 3, F))
    assert compare(outputs, feeds, first=HostDevice(), second=Separate("same"))
    assert (ow.read(total) == 3).all()


def test_what_the_second_device_does_not_run_is_said_and_is_no_difference(graph):
    outputs, feeds = graph
    found = compare(outputs, feeds, first=HostDevice(), second=Separate("few", ["linear", "relu"]))
    assert found
    assert {op_of(row): row.reason for row in found.nodes if row.reason} == {
        name: f"no kernel for {name}" for name in ("neg", "exp", "add", "assign")
    }


def test_what_products_in_bf16_cost(graph):
    outputs, feeds = graph
    found = compare(outputs, feeds, first=HostDevice(), second=Rounding(), precision="bf16")
    by_op = {op_of(row): row for row in found.nodes}
    assert 1e-7 < by_op["linear"].nmse < 3e-5
    assert (by_op["linear"].precision, by_op["exp"].precision) == ("bf16", "exact")
    assert by_op["exp"].nmse == 0
    assert 0 < found.outputs[0].nmse < 1e-3
    assert found.outputs[0].precision == "bf16"
    assert found, "within what the precision allows"
    figures = f"{by_op['linear'].nmse:.2e}"
    assert f"computed in bf16: 1 nodes, each with a normalised mean square error of {figures} to {figures}" in str(
        found
    )
    assert not compare(outputs, feeds, first=HostDevice(), second=Rounding(), precision="bf16", allowed=1e-9)


def test_what_one_device_loses_by_it(graph):
    outputs, feeds = graph
    device = Rounding()
    assert all(row.nmse == 0 for row in compare(outputs, feeds, first=device, second=device).nodes)
    found = compare(outputs, feeds, first=device, second=device, precision={"linear": "bf16"})
    assert [op_of(row) for row in found.nodes if row.nmse] == ["linear"]


def test_what_products_in_int8_cost():
    weights = ow.weights({"w": ow.quantize(np.random.default_rng(1).standard_normal((8, 64)), "q8_0")})
    feeds = {"x": np.random.default_rng(2).standard_normal((4, 64)).astype(F)}
    output = ow.linear(ow.input("x", (4, 64)), weights["w"])
    found = compare(output, feeds, first=HostDevice(), second=Rounding(exact=False), precision="int8")
    assert found
    assert found.nodes[0].precision == "int8"
    assert 1e-6 < found.nodes[0].nmse < 1e-4
    wrong = compare(output, feeds, first=HostDevice(), second=Rounding(levels=5), precision="int8")
    assert wrong.first_divergence is not None


def test_the_script_repeats_the_difference_by_itself(graph, tmp_path):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "wrong.py").write_text(
        textwrap.dedent("""
        import numpy as np
        from opweave.contract import Backend
        from opweave.runtime.host.memory import HostMemory
        from opweave.contract.kernels import KernelTable

        kernels = KernelTable("f32", "strided")

        @kernels("neg")
        def neg(stream, op, out, x):
            def run():
                np.negative(x.view, out.view)
                out.view.reshape(-1)[-1] += 1
            return run

        class Bad(HostMemory):
            kernels = kernels

        class Wrong(Backend):
            def devices(self):
                return [Bad()]
        """)
    )
    outputs, feeds = graph
    found = compare(outputs, feeds, first="host", second=Wrong("neg"), script=tmp_path / "repro")
    assert found.script == str(tmp_path / "repro.py")
    assert (tmp_path / "repro.npz").exists()
    environment = {**os.environ, "OPWEAVE_BACKEND_PATH": str(tmp_path / "plugins" / "wrong.py")}
    done = subprocess.run(
        [sys.executable, found.script], capture_output=True, text=True, env=environment, check=True, cwd=tmp_path
    )
    assert "wrong against host: normalised mean square error" in done.stdout
    assert "largest at (3, 7)" in done.stdout


def test_scripts_keep_layouts_attributes_types_and_states(tmp_path):
    device = HostDevice()
    x = ow.input("x", (6, 4), "bf16")
    total = ow.state("total", (4, 3), "bf16", device=device)
    w = ow.weights({"w": ow.Blocks(np.zeros((5, 34), np.uint8), (5, 32), "q8_0")})["w"]
    cases = [
        ow.softmax(x.T[1:3, ::2], axis=0),
        ow.assign(total[1:, :2], x[:3, :2]),
        ow.linear(ow.input("y", (2, 32)), w),
        ow.cast(x, "f16"),
        ow.pad(ow.input("z", (3, 3)), ((1, 0), (0, 2)), value=float("inf")),
    ]
    feeds = {"x": np.arange(24).reshape(6, 4).astype(x.dtype.numpy), "y": np.ones((2, 32), F), "z": np.ones((3, 3), F)}
    for i, node in enumerate(cases):
        # Nothing is within an allowance below zero: every node counts as different.
        given = {k: v for k, v in feeds.items() if k in {t.name for t in ow.Graph((node,)).leaves}}
        found = compare(node, given, first="host", second="host", allowed=-1.0, script=tmp_path / f"case{i}")
        assert found.script, found
        done = subprocess.run([sys.executable, found.script], capture_output=True, text=True, check=True)
        assert "error 0.00e+00" in done.stdout, node.describe()


def test_progress_is_reported(graph):
    outputs, feeds = graph
    seen: list[tuple[int, int]] = []
    compare(outputs, feeds, first=HostDevice(), second=Separate("same"), progress=lambda *a: seen.append(a))
    assert seen == [(i, 6) for i in range(1, 7)]


def test_bad_input_is_refused_before_anything_runs(graph):
    outputs, feeds = graph
    with pytest.raises(ow.SchedulerError, match="no value"):
        compare(outputs, {}, first=HostDevice(), second=HostDevice())
    with pytest.raises(ow.UnknownNameError):
        compare(outputs, feeds, second="nowhere")
    with pytest.raises(ow.UnknownNameError, match="did you mean 'int8'"):
        compare(outputs, feeds, second=HostDevice(), precision="i8")  # type: ignore[arg-type]


def test_a_script_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    def never(values):
        raise AssertionError("ran")

    x = ow.input("x", (2,))
    node = ow.custom(never, x, like=x)
    with pytest.raises(ow.PathError, match=r"no folder .*nowhere; make it first"):
        compare(node, {"x": np.ones(2, F)}, second="host", script=tmp_path / "nowhere" / "case.py")
