"""`opweave fuzz` finds faults that are planted in a device, shrinks them to scripts that repeat them, raises no false
alarms, and repeats itself by its seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import opweave as ow
from opweave.graph.graph import Graph
from opweave_conformance.fuzz.draw import LARGEST, _Drawing, affordable, draw, operations
from opweave_conformance.fuzz.example import NodeEntry, script
from opweave_conformance.fuzz.process import Child
from opweave_conformance.fuzz.samples import differences, evaluate
from opweave_conformance.fuzz.search import Search
from tests.support.devices import Separate
from tests.support.example_backend import ExampleDevice

BACKEND = """
import os, signal, sys, time
import numpy as np
from opweave.contract import Backend, MemorySpace, Stream
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import ReferenceKernels

FAULT = os.environ["FUZZ_FAULT"]
HELD = []


def reference(out, op, srcs, attrs):
    arrays = [s.view for s in srcs]
    with np.errstate(all="ignore"):
        if OPS[op].writes:
            OPS[op].reference(out.view, *arrays, **attrs)
        else:
            np.copyto(out.view, OPS[op].reference(*arrays, **attrs), casting="unsafe")


class FaultyStream(Stream):
    def _bind(self, group):
        step = group.steps[0]
        out, srcs = step.out, step.srcs

        def call():
            pointwise = OPS[step.op].pointwise
            if FAULT == "layout" and pointwise and any(len(s.shape) == 2 and s.strides[0] < s.strides[1] for s in srcs):
                return  # transposed operands are forgotten
            reference(out, step.op, srcs, step.attrs)
            flat = out.view.reshape(-1)
            if FAULT == "tail" and pointwise and flat.size > 64 and flat.size % 8:
                out.view[...].reshape(-1)[-1:] = 0
            if FAULT == "exit" and step.op == "relu":
                os._exit(3)
            if FAULT == "segv" and step.op == "relu":
                os.kill(os.getpid(), signal.SIGSEGV)
            if FAULT == "hang" and step.op == "relu":
                time.sleep(1000)
            if FAULT == "error" and step.op == "relu":
                raise ZeroDivisionError("planted")
            if FAULT == "leak" and step.op == "relu":
                HELD.append(self.device.alloc(1 << 20))

        return call


class Faulty(ReferenceKernels):
    def __init__(self):
        self.name = "faulty"
        self.space = MemorySpace("faulty")

    def _open(self, **params):
        return FaultyStream(self)


class FaultyBackend(Backend):
    name = "faulty"
    priority = 50

    def devices(self):
        return (Faulty(),)


if FAULT == "order" and "pytest" not in sys.modules:  # in the process that runs the scripts
    import opweave.graph.graph as graph
    graph._anti_dependencies = lambda *args: {}
"""
"""A backend that runs the references, and is wrong in the way that an environment variable names."""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """``faulty("tail")``: a search on a device with that fault, in processes that have no other plugins."""
    path = tmp_path / "faulty.py"
    path.write_text(BACKEND, encoding="utf-8")
    monkeypatch.setenv("OPWEAVE_BACKEND_PATH", str(path))
    monkeypatch.setenv("OPWEAVE_BACKENDS", "faulty")
    searches = []

    def make(fault: str, seed: int = 1, seconds: float = 60, largest: int = 1 << 11) -> Search:
        monkeypatch.setenv("FUZZ_FAULT", fault)
        devices = [Separate("faulty", operations())]
        searches.append(Search(devices, seed, out=tmp_path / "found", seconds=seconds, largest=largest))
        return searches[-1]

    yield make
    for search in searches:
        search.close()


@pytest.mark.parametrize(
    ("fault", "kind", "reason", "within"),
    [
        ("layout", "Mismatch", "elements are wrong", 80),
        ("tail", "Mismatch", "elements are wrong: at ", 60),
        ("order", "Mismatch", "", 400),
        ("exit", "crash", "it ended the process with exit status 3", 200),
        ("segv", "crash", "SIGSEGV", 200),
        ("error", "ExecutionError", "planted", 200),
        ("hang", "hang", "has not ended", 200),
        ("leak", "leak", "bytes of buffers stay", 400),
    ],
)
def test_planted_faults_are_found_and_shrunk_to_scripts_that_repeat_them(faulty, fault, kind, reason, within):
    seconds = 1.5 if fault == "hang" else 60  # about ten hangs are waited for so long; a sound case takes 10 ms
    search = faulty(fault, seconds=seconds)
    finding = next((f for f in map(search.try_case, range(within)) if f is not None), None)
    assert finding is not None, f"not found within {within} cases"
    assert (finding.kind, finding.alone) == (kind, True)
    assert reason in finding.reason
    code = finding.script.split('"""')[2]
    assert code.count("apply(") <= 3, code
    assert "['faulty']" in code, code
    if fault == "leak":
        return  # the script itself ends well
    # The written script repeats it: it fails by itself, as Python runs it.
    ran = Child(min(seconds, 4))
    try:
        assert ran.run(finding.script).kind == kind
    finally:
        ran.close()
    if fault not in ("hang", "order"):  # that one is planted in the other process only
        alone = subprocess.run([sys.executable, finding.path], capture_output=True, text=True, timeout=60)
        assert alone.returncode != 0
        assert kind == "crash" or kind in alone.stderr


def test_a_correct_device_raises_no_alarm(faulty):
    search = faulty("none", seed=5)
    for number in range(500):
        search.try_case(number)
    assert [f.script for f in search.findings] == []
    assert search.nodes > 1500
    assert not search.refused or max(search.refused.values()) < 100
    # Nearly all operations are drawn, and run where they should.
    # Operations that front ends define, which another test may have loaded, have no samples.
    never = [op for op in search.never_drawn() if "." not in op]
    assert set(never) <= {"recompute"} | set(never[:3])
    assert len({op for op, device in search.reached if device == "faulty"}) > 120


def test_a_seed_gives_the_same_examples():
    devices = [Separate("a", operations()), Separate("b", operations())]
    first = [script(draw(3, n, devices)) for n in range(40)]
    assert first == [script(draw(3, n, devices)) for n in range(40)]
    assert first[7] == script(draw(3, 7, devices))
    assert first != [script(draw(4, n, devices)) for n in range(40)]


def test_most_nodes_are_of_operations_that_a_device_has_kernels_for():
    device = ExampleDevice()
    device.name = "example"
    examples = [draw(3, number, [device, ow.device("host")], 2048) for number in range(30)]
    entries = [entry for example in examples for graph in example.graphs for entry in graph.entries]
    drawn = [entry.op for entry in entries if isinstance(entry, NodeEntry) and entry.op in operations()]
    drawn = [op for op in drawn if op not in ("cast", "contiguous")]  # they fit operands
    reached = [op for op in drawn if op in device.kernels.ops()]
    assert len(drawn) / 2 < len(reached) < len(drawn)


def test_examples_have_all_that_graphs_may_have():
    devices = [Separate(name, operations()) for name in "abc"]
    examples = [draw(0, n, devices) for n in range(400)]
    graphs = [graph for example in examples for graph in example.graphs]
    leaves = [e for g in graphs for e in g.entries if not isinstance(e, NodeEntry)]
    assert {leaf.kind for leaf in leaves} >= {"input", "weight", "constant", "state"}
    assert {"f32", "f16", "bf16", "f64", "i32", "i64", "bool", "q4_0", "q6_k"} <= {leaf.dtype for leaf in leaves}
    sizes = [int(np.prod(leaf.shape, dtype=int)) for leaf in leaves]
    assert min(sizes) == 0
    assert max(sizes) > 500_000
    assert any(len(leaf.shape) == 1 and leaf.shape[0] > 30_000 for leaf in leaves)
    assert {g.how for g in graphs} == {"run", "submit", "observe", "warm", "reserve", "on_device"}
    assert sum(bool(g.largest) for g in graphs) > 5
    assert {e.attrs["fn"].__name__ for g in graphs for e in g.entries if isinstance(e, NodeEntry) and e.op == "custom"}
    assert {g.precision for g in graphs} == {"exact", "bf16", "int8"}
    assert any(g.pins for g in graphs)
    assert max(len(g.outputs) for g in graphs) > 2
    assert {len(e.devices) for e in examples} >= {1, 2, 3, 4}
    assert {name for e in examples for name, _ in e.options} == {
        "parallel", "threads", "memory_limit", "repack", "op_offload",
    }  # fmt: skip
    # The same graph in other sizes, for programs that are planned by the template of another one.
    alike = [e for e in examples if len(e.graphs) > 1 and len({len(g.entries) for g in e.graphs}) == 1]
    assert len(alike) > 10


def test_operands_without_elements_are_no_reason_for_large_leaves():
    """Layouts make leaves with elements for operands without: a first axis of 0 repeats one of 1."""
    empty = 0
    for number in range(30):
        drawing = _Drawing(np.random.default_rng(number), 1000)
        for case in (case for cases in operations().values() for case in cases[:3]):
            operands = drawing._sized(case)
            empty += any(0 in o.shape for o in operands)
            if operands != list(case.operands):
                assert all(np.prod(np.maximum(o.shape, 1), dtype=float) <= 1000 for o in operands)
    assert empty > 100


def test_views_of_more_elements_than_fit_are_not_drawn():
    small, large = (ow.input("x", (1, 9), "f32").broadcast_to((n, 9)) for n in (4, LARGEST))
    assert affordable(small)
    assert not affordable(large)


# --- tracked errors -------------------------------------------------------------------------------------------------


def samples_of(build, **arrays):
    leaves = {name: ow.input(name, a.shape, ow.as_dtype(a.dtype)) for name, a in arrays.items()}
    out = build(**leaves)
    known = {leaves[name]: [a] for name, a in arrays.items()}
    evaluate(Graph(out).nodes, known, np.random.default_rng(0), {})
    return known[out]


def test_ill_conditioned_graphs_allow_what_they_have_to_and_no_more():
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    plain = samples_of(lambda x: ow.exp(x), x=x)
    assert differences(plain[0], plain) == ""
    assert differences(plain[0] * np.float32(1 + 1e-6), plain) == ""
    assert "elements are wrong" in differences(plain[0] * np.float32(1 + 1e-3), plain)
    # exp(x) - exp(x + 1e-4) has lost four digits: an error of 1e-3 may be right there.
    lost = samples_of(lambda x: (ow.exp(x) - ow.exp(x + 1e-4)) * 1.0, x=x)
    assert differences(lost[0] * np.float32(1 + 1e-3), lost) == ""
    assert differences(-lost[0] - 1, lost) != ""


def test_results_below_the_normal_numbers_of_f16_may_be_rounded_to_the_next_one():
    x = np.full(100_000, 0.5, np.float16)
    samples = samples_of(lambda x: ow.softmax(x), x=x)  # 1e-5, where f16 has steps of 6e-8
    step = np.finfo(np.float16).smallest_subnormal
    assert differences(samples[0] + step, samples) == ""
    assert differences(samples[0] * 2, samples) != ""


def test_sigmoids_may_be_0_below_the_last_place_of_1_in_their_type():
    for dtype, least in ((np.float32, -18.0), (np.float64, -38.0)):
        samples = samples_of(lambda x: ow.sigmoid(x), x=np.full(63, least, dtype))
        assert differences(np.zeros(63, dtype), samples) == ""
        assert differences(samples[0] + dtype(2.0**-12 if dtype is np.float32 else 2.0**-40), samples) != ""


def test_gelu_may_be_0_below_the_last_place_of_its_largest_values():
    for dtype, least in ((np.float32, -6.0), (np.float64, -9.0)):
        samples = samples_of(lambda x: ow.gelu(x), x=np.full(63, least, dtype))
        assert differences(np.zeros(63, dtype), samples) == ""
        assert differences(samples[0] + dtype(2.0**-12 if dtype is np.float32 else 2.0**-40), samples) != ""


def test_products_may_end_at_the_least_number_that_rounds_to_itself():
    samples = samples_of(lambda x: ow.cast(ow.prod(x), "f64"), x=np.full(100_000, 0.95, np.float32))
    assert differences(np.array(1.3e-44), samples) == ""
    assert differences(np.array(1e-36), samples) != ""


def test_exact_operations_allow_no_error():
    x = np.arange(8, dtype=np.float32)
    samples = samples_of(lambda x: ow.flip(x, 0), x=x)
    assert len(samples) == 1
    assert differences(samples[0], samples) == ""
    assert differences(np.nextafter(samples[0], np.float32(9)), samples) != ""


def test_choices_between_close_values_are_not_asked_for():
    close = np.array([[1.0, 1.0 + 1e-7, 0.0], [3.0, 1.0, 2.0]], np.float32)
    samples = samples_of(lambda x: ow.argmax(ow.exp(x), axis=1), x=close)
    assert differences(np.array([0, 0], samples[0].dtype), samples) == ""
    assert differences(np.array([1, 0], samples[0].dtype), samples) == ""
    assert "at [1] it is 1, not 0" in differences(np.array([0, 1], samples[0].dtype), samples)


def test_nan_and_infinities_have_to_be_where_the_reference_has_them():
    x = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    samples = samples_of(lambda x: ow.exp(x), x=x)
    assert differences(samples[0], samples) == ""
    for at, value in ((0, 1.0), (1, 1.0), (2, np.nan), (3, np.inf)):
        wrong = samples[0].copy()
        wrong[at] = value
        assert f"at [{at}]" in differences(wrong, samples)


def test_what_is_undefined_is_not_asked_for():
    x = np.array([np.nan, 1e30, 2.5], np.float32)
    assert samples_of(lambda x: ow.cast(x, "i32"), x=x) == []
    assert differences(np.zeros(3, np.int32), []) == ""


def test_sums_beyond_the_largest_number_may_be_anything_and_infinities_may_not():
    large = np.array([3e38, 3e38, -3e38], np.float32)
    samples = samples_of(lambda x: ow.sum(x[:2] * 1.0), x=large)
    assert samples[0] == np.inf
    assert differences(np.array(np.nan, np.float32), samples) == ""
    samples = samples_of(lambda x: ow.log(x * 0.0), x=large)
    assert "not -inf" in differences(np.full(3, np.nan, np.float32), samples)


@pytest.mark.parametrize(("padding", "asked"), [(0, True), (1, False)])
def test_weights_that_are_no_numbers_are_not_asked_for_over_padding(padding, asked):
    x, weight = np.ones((1, 1, 3, 3), np.float32), np.full((1, 1, 3, 3), np.nan, np.float32)
    assert bool(samples_of(lambda x, w: ow.conv2d(x, w, padding=padding), x=x, w=weight)) is asked
    finite = np.ones_like(weight)
    assert samples_of(lambda x, w: ow.conv2d(x, w, padding=padding), x=x * np.nan, w=finite)


def test_weights_that_are_no_numbers_are_not_asked_for_before_the_first_token():
    x, weight, state = (
        np.ones((1, 2, 4), np.float32),
        np.full((2, 3), np.nan, np.float32),
        np.ones((1, 2, 2), np.float32),
    )
    assert samples_of(lambda x, w: ow.causal_conv1d(x, w), x=x, w=weight) == []
    assert samples_of(lambda x, w, s: ow.causal_conv1d(x, w, initial_states=s), x=x, w=weight, s=state)


@pytest.mark.parametrize("size", [4.0, 0.25])
def test_products_whose_order_decides_are_not_asked_for(size):
    x = np.full((2, 200), 1 / size, np.float32)
    x[:, :100] = size  # 2**200 or 2**-200, and with the others 1
    samples = samples_of(lambda x: ow.prod(x, 1), x=x)
    assert not differences(np.array([np.inf, 0], np.float32), samples)
    small = samples_of(lambda x: ow.prod(x, 1), x=x[:, 80:120])
    assert "not 1.0" in differences(np.array([np.inf, 1], np.float32), small)


def test_wrong_shapes_and_dtypes_are_found():
    samples = samples_of(lambda x: ow.exp(x), x=np.ones(4, np.float32))
    assert "float32[2, 2], not float32[4]" in differences(samples[0].reshape(2, 2), samples)
    assert "float64" in differences(samples[0].astype(np.float64), samples)


# --- the command ----------------------------------------------------------------------------------------------------


def fuzz(tmp_path, fault, *arguments):
    path = tmp_path / "faulty.py"
    path.write_text(BACKEND, encoding="utf-8")
    environ = {**os.environ, "OPWEAVE_BACKEND_PATH": str(path), "OPWEAVE_BACKENDS": "faulty", "FUZZ_FAULT": fault}
    command = [sys.executable, "-m", "opweave", "fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ, cwd=tmp_path)


def test_the_command_tells_what_it_did(tmp_path):
    ran = fuzz(tmp_path, "none", "faulty", "--seconds", "0.5", "--seed", "2")
    assert ran.returncode == 0, ran.stderr
    assert "none failed" in ran.stdout
    assert "never drawn" in ran.stdout
    assert "operations reached: faulty" in ran.stdout


def test_the_command_writes_a_script_for_a_failure_and_exits_with_1(tmp_path, faulty):
    search = faulty("tail", seed=6)
    number = next(n for n in range(60) if search.try_case(n) is not None)
    asked = ("faulty", "--seed", "6", "--case", str(number), "--largest", "2048")
    seen = fuzz(tmp_path, "tail", *asked, "--out", "scripts", "--json")
    assert seen.returncode == 1, seen.stderr
    document = json.loads(seen.stdout)
    assert (document["devices"], document["cases"], document["seed"]) == (["faulty"], 1, 6)
    assert [f["number"] for f in document["findings"]] == [number]
    path = tmp_path / "scripts" / f"fuzz_6_{number}.py"
    assert path.read_text(encoding="utf-8") == document["findings"][0]["script"] == search.findings[0].script
    again = fuzz(tmp_path, "tail", *asked)
    assert again.returncode == 1
    assert f"failed: case {number}: Mismatch" in again.stderr
    assert "1 failed" in again.stdout


def test_a_device_that_is_not_there_is_an_error(tmp_path):
    ran = fuzz(tmp_path, "none", "fualty", "--seconds", "1")
    assert ran.returncode == 2
    assert "there is no device named 'fualty'" in ran.stderr
