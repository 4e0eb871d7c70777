"""Pages of the suite and of measurements: what they say, and what is refused before anything is written."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from opweave.cli.app import build_app
from opweave.contract import Backend, Device
from opweave.contract.kernels import KernelTable
from opweave.errors import FormatError, UnknownNameError, UnsupportedOpError
from opweave.graph.opdef import OPS
from opweave.registry import Registry
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.memory import HostMemory
from opweave_conformance.hooks import opweave_cli
from opweave_conformance.page import comparison_page, outcomes, read_report, report_page
from opweave_conformance.report import as_json
from opweave_conformance.suite import Suite
from opweave_conformance.throughput import throughput


class Halves(HostMemory):
    """Adds f32 rightly and f64 wrongly, and refuses everything else."""

    kernels = KernelTable("f32 f64", "strided")
    description = "a <device> for this test"

    def features(self) -> dict[str, Any]:
        return {"driver": "1.2", "units": (1, 2)}


@Halves.kernels("add")
def add(stream: Any, op: str, out: Any, a: Any, b: Any) -> Any:
    factor = 1 if out.dtype.name == "f32" else 2
    return lambda: np.add(a.view, factor * b.view, out.view)


class HalvesBackend(Backend):
    name = "halves"

    def devices(self) -> list[Device]:
        return [Halves()]


def document(*only: str, done: int | None = None, seed: int = 0) -> dict[str, Any]:
    registry = Registry(environ={}, search=[])
    registry.register(HalvesBackend)
    suite = Suite("halves", only=only, using=registry, seed=seed)
    for item in suite.items[:done]:
        suite.perform(item)
    return json.loads(json.dumps(as_json(suite, "0.1.0"), allow_nan=False))


class Cells(HTMLParser):
    """The cells of the matrix: title -> class; and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.titled: dict[str, str] = {}
        self.text = ""
        self.linked: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if title := given.get("title"):
            self.titled[title.partition(":")[0]] = given.get("class") or ""
        self.linked += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.text += data


ADDS = ("add-f32-64,64", "add-f64-64,64", "add-f16-64,64", "memory-fill", "add-i32-64,64")


def test_the_page_shows_what_is_right_wrong_refused_and_not_reached():
    found = Cells(report_page(document(*ADDS, done=-1)))
    shown = {title: kind for title, kind in found.titled.items() if title.startswith("add ")}
    assert sorted(shown.values()) == ["refused", "right", "unreached", "wrong"]
    assert shown["add f64"] == "wrong"
    assert shown["add f32"] == "right"
    assert "opweave conformance halves --only add-f64-64,64 --seed 0" in found.text
    assert found.linked == []  # one file, which needs nothing else


def test_the_page_says_what_it_ran_on():
    found = document("add-f32-64,64")
    text = Cells(report_page(found)).text
    for words in ("a <device> for this test", "driver: 1.2", "units: 1, 2", "NumPy " + np.__version__, "opweave 0.1.0"):
        assert words in text
    about = found["environment"]
    assert about["processor"] in text
    assert about["command"] in text
    assert about["date"] in text
    assert "all 1 checks: none failed" in text


def test_the_matrix_has_the_largest_error_of_right_cases():
    found = document("add-f32-*", "add-f64-64,64")
    cell = outcomes(found)["add"]["f32"]
    errors = [r["error"] for r in found["results"] if r["dtype"] == "f32" and r["status"] == "passed"]
    assert cell.right == len(errors) > 1
    assert cell.error == (max(errors) or None)
    assert cell.kind == ("partly" if cell.refused else "right")


def test_runs_side_by_side_show_what_changed():
    before, after = document("add-f32-64,64", "add-f64-64,64"), document("add-f32-64,64", "add-f64-64,64")
    wrong = next(r for r in before["results"] if r["id"] == "add-f64-64,64")
    wrong["status"] = "passed"
    found = Cells(comparison_page([before, after]))
    assert "1 failed" in found.text
    assert "add-f64-64,64" in found.text
    assert "None." in Cells(comparison_page([after, after])).text


def test_the_command_writes_pages_of_files(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(document("add-f32-64,64")))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    result = call("conformance", "--compare", *files, "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    assert "side by side" in (tmp_path / "page.html").read_text()
    assert call("conformance", "--compare", files[0], "--html", str(tmp_path / "p.html")).exit_code == 2
    assert call("conformance", "--compare", *files).exit_code == 2
    result = call("conformance", "host", "--only", "add-f32-64,64", "--html", str(tmp_path / "host.html"))
    assert result.exit_code == 0, result.output
    assert "Conformance of host" in (tmp_path / "host.html").read_text()


def test_what_is_no_report_is_refused_before_anything_is_written(tmp_path: Path):
    for content, words in (("{", "is no report"), ("[]", "lacks"), ('{"name": "acme"}', "lacks devices")):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(FormatError, match=words):
            read_report(tmp_path / "a.json")
    with pytest.raises(FormatError, match=r"no\.json cannot be read"):
        read_report(tmp_path / "no.json")


@pytest.mark.parametrize(
    "command",
    [
        "conformance host",
        "conformance host --gaps a.json",
        "conformance --compare a.json a.json",
        "bench host",
        "fuzz",
        "new-backend acme",
    ],
)
def test_a_result_that_could_not_be_written_is_a_wrong_call(tmp_path: Path, monkeypatch, command: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    option = {"fuzz": "--out", "new-backend acme": "--into"}.get(command, "--html")
    result = call(*command.split(), option, "a.json/b")
    assert result.exit_code == 2
    assert "be written" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# --- opweave bench ---------------------------------------------------------------------------------------------------


def test_rates_are_those_of_the_nodes_and_limits_are_the_best_of_them():
    found = throughput(HostDevice(), Halves(), ["add", "softmax"], ["f32"])
    adding, normalizing = found.rows
    assert (adding.op, normalizing.op) == ("add", "softmax")
    n = int(adding.shapes.split("]")[0].strip("[").split(",")[0])
    assert adding.nbytes % (3 * 4 * n) == 0  # two sources and a result of one shape
    assert adding.bytes_per_second == adding.nbytes / adding.seconds <= found.bandwidth
    assert adding.of_limit == pytest.approx(adding.bytes_per_second / found.bandwidth)
    assert adding.times == (adding.beside or 0) / adding.seconds
    assert normalizing.times is None  # the second device has no kernel for it
    page = Cells(found.html(devices=[], processor="p", system="s", python="3", numpy="2", command="c", date="d"))
    assert "softmax" in page.text
    assert page.linked == []


def test_products_have_a_limit_of_operations():
    found = throughput(HostDevice(), None, ["linear"], ["f32"])
    assert found.peaks.keys() == {"f32"}
    assert found.peaks["f32"] == max(row.flops_per_second for row in found.rows)
    assert len(found.rows) == 2  # one that bytes limit, and one that operations limit
    assert "GFLOP/s in products of f32" in found.summary


def test_limits_do_not_depend_on_what_is_selected(monkeypatch: pytest.MonkeyPatch):
    measured: list[str] = []

    def seconds(device: Device, signature: Any) -> float:
        measured.append(signature.op.name)
        return {"add": 1e-3, "linear": 1e-2, "softmax": 1e-5, "mul": 2e-3}[signature.op.name]

    monkeypatch.setattr("opweave_conformance.throughput.seconds_of_step", seconds)
    slow = throughput(HostDevice(), None, ["mul"], ["f32"])
    assert [row.op for row in slow.rows] == ["mul"]
    assert {"add", "linear"} < set(measured)
    assert slow.rows[0].of_limit == pytest.approx(0.5)  # of `add`, which moves as many bytes
    assert slow.peaks["f32"] > 0
    fast = throughput(HostDevice(), None, ["softmax"], ["f32"])
    assert fast.rows[0].of_limit == pytest.approx(1)  # it is faster than `add`: that is the limit then
    assert fast.bandwidth > slow.bandwidth


def test_every_operation_that_the_device_runs_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("opweave_conformance.throughput.seconds_of_step", lambda device, signature: 1e-3)
    found = throughput(HostDevice())
    assert {row.op for row in found.rows} >= {
        op.name for op in OPS.values() if op.family != "third-party" and not op.is_view
    }
    mul = next(row for row in found.rows if row.op == "mul")
    assert (mul.dtype, mul.shapes) == ("f32", "[1048576] [1048576] [1048576]")
    assert "strided" in next(row for row in found.rows if row.op == "contiguous").shapes
    assert [row.dtype for row in throughput(HostDevice(), None, ["mul"], ["f16", "i32"]).rows] == ["f16", "i32"]


def test_names_that_do_not_exist_are_refused_with_suggestions():
    with pytest.raises(UnknownNameError, match=r"did you mean .*'linear'"):
        throughput(HostDevice(), None, ["add", "linaer"])
    with pytest.raises(UnknownNameError, match="did you mean 'f32'"):
        throughput(HostDevice(), None, (), ["f33"])


def test_a_device_that_runs_nothing_of_it_is_refused():
    device = Halves()
    device.name = "halves"
    with pytest.raises(UnsupportedOpError, match="halves runs none"):
        throughput(device, None, ["softmax"])


def call(*arguments: str) -> Any:
    app = build_app()
    opweave_cli(app)
    return CliRunner().invoke(app, list(arguments))
