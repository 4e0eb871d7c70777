"""`explain`: the same facts as text, as rows and as a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Explanation
from opweave.units import human_time
from tests.support.devices import BASIC, Separate

F = np.float32


class Page(HTMLParser):
    """Checks that every element is closed, and collects the text."""

    VOID = frozenset(["meta", "input", "line", "polygon", "br"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: dict[str, list[str]] = {}
        self.links: list[str] = []
        self.ids: set[str] = set()
        self._kind = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert not (tag in ("script", "img", "link") and ("src" in given or "href" in given)), "self-contained"
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self._kind = given.get("class") or ""
            self.rows.setdefault(self._kind, []).append("")
        if tag == "a":
            self.links.append(given["href"] or "")
        if given.get("id"):
            self.ids.add(f"#{given['id']}")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tr" in self.open and self._kind:
            self.rows[self._kind][-1] += " " + data.strip()


@pytest.fixture
def explanation() -> Explanation:
    x, total = ow.input("x", (4, 4)), ow.state("total", (4, 4))
    first = ow.exp(x)
    middle = ow.neg(first)
    last = ow.assign(total, middle)
    devices = [Separate("a", [op for op in BASIC if op != "neg"]), Separate("<b>"), HostDevice()]
    with ow.Scheduler(devices) as scheduler:
        return scheduler.build([last, first], pins={first: "a", middle: "<b>", last: "<b>"}).explain()


def test_the_text_is_a_string_and_the_rows_say_the_same(explanation):
    assert explanation.text.startswith("3 steps in ")
    assert str(explanation) == repr(explanation) == explanation.text
    assert [row.op for row in explanation.nodes] == ["exp", "neg", "assign"]
    for row in explanation.nodes:
        assert re.search(rf"{row.op} .*\[{row.cause}\]", explanation.text)
    neg = explanation.nodes[1]
    assert neg.refusals == {"a": "no kernel for neg"}
    assert [(c.source, c.target, c.nbytes, c.cause) for c in explanation.copies] == [("a", "<b>", 64, "transfer")]
    assert explanation.memory["a"].temporaries > 0


def test_the_page_shows_every_node_copy_and_refusal_and_needs_nothing_else(explanation, tmp_path):
    explanation.save(tmp_path / "why.html")
    text = (tmp_path / "why.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert len(page.rows["node"]) == len(explanation.nodes)
    for shown, row in zip(page.rows["node"], explanation.nodes, strict=True):
        assert row.op in shown
        assert row.cause in shown
    assert len(page.rows["copy"]) == 1
    assert page.rows["refused"] == [" not on a: no kernel for neg"]
    assert set(page.links) <= page.ids
    assert "&lt;b&gt;" in text
    assert "<b>" not in text, "names are escaped"


def test_steps_that_the_page_does_not_show_are_counted(monkeypatch):
    monkeypatch.setattr("opweave.scheduler.explain.report.MOST_NODES", 2)
    x = ow.input("x", (4,))
    y = ow.exp(ow.exp(ow.exp(x)))
    text = ow.Scheduler([Separate("a"), Separate("b")]).partition(-y, pins={y: "a", -y: "b"}).explain().html()
    assert re.findall(r"(\d+ steps?), 1 copy<", text) == ["1 step"]
    assert re.findall(r"(\d+ steps?)<", text) == ["3 steps"]
    assert "2 further steps are not shown" in text


def test_the_page_shows_predicted_times_where_there_are_some():
    x = ow.input("x", (64, 64))
    devices = [opweave_cost.simulate(name, flops=1e9, bandwidth=1e9) for name in ("first", "second")]
    program = ow.Scheduler(devices).partition(ow.relu(x @ x))
    assert "redicted" not in program.explain().html()
    predicted = program.predicted
    explained = program.explain()
    assert explained.predicted is predicted
    page = Page()
    page.feed(explained.html())
    assert page.open == []
    assert f"Predicted to take {human_time(predicted.seconds)}" in explained.html()
    for shown, row in zip(page.rows["node"], explained.nodes, strict=True):
        assert row.seconds is not None
        assert shown.endswith(human_time(row.seconds))


def test_curves_of_all_devices_have_one_axis_of_time():
    x = ow.input("x", (4, 4))
    first, second = Separate("a"), Separate("b")
    y = -x
    explained = (
        ow.Scheduler([first, second]).partition(ow.relu(-ow.exp(y)), pins={y: first, ow.exp(y): second}).explain()
    )
    early, late = explained.curves
    assert early.moments[-1][0] < late.moments[-1][0]
    polygons = [re.findall(r"([\d.]+),([\d.]+)", points) for points in re.findall(r'points="(.*?)"', explained.html())]
    ends = [max(float(x) for x, y in points if float(y) < 120) for points in polygons]
    assert ends[0] / ends[1] == pytest.approx(early.moments[-1][0] / late.moments[-1][0], rel=1e-3)


def test_notebooks_show_the_page_in_a_frame_of_its_own(explanation):
    shown = explanation._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "<style>" not in shown


def test_memory_over_the_run_ends_with_what_is_handed_out_and_never_exceeds_the_plan(explanation):
    curves = {curve.device: curve for curve in explanation.curves}
    assert max(size for _, size in curves["a"].moments) <= curves["a"].planned
    assert all(size >= 0 for curve in explanation.curves for _, size in curve.moments)


def test_what_was_split_without_memory_explains_too():
    with ow.Scheduler(HostDevice()) as scheduler:
        explained = scheduler.partition(ow.exp(ow.input("x", (4,)))).explain()
    assert explained.memory == {}
    assert "hostdevice" in explained.html()


def test_long_programs_have_short_pages():
    x = ow.input("x", (4,))
    for i in range(6000):
        x = x + float(i)
    with ow.Scheduler(HostDevice()) as scheduler:
        html = scheduler.partition(x).explain().html()
    assert html.count('<tr class="node">') == 5000
    assert "1000 further steps are not shown" in html


# --- scopes ---------------------------------------------------------------------------------------------------------


def test_scopes_are_lines_of_a_table_and_parts_of_the_page():
    x = ow.input("scoped", (4,))  # of this test alone: a node that lives elsewhere keeps its scope
    for i in range(2):
        with ow.scope(f"layer{i}"):
            with ow.scope("mlp"):
                x = ow.tanh(ow.exp(x))
            x = ow.sin(x)
    explained = ow.Scheduler(["cpu", "host"]).partition(ow.cos(x)).explain()
    assert [row.scope for row in explained.nodes] == [*["layer0/mlp"] * 2, "layer0", *["layer1/mlp"] * 2, "layer1", ""]
    assert "layer1/mlp/tanh" in explained
    assert [line.split() for line in explained.by_scope().splitlines()] == [
        ["layer0/mlp", "2", "steps", "cpu"], ["layer0", "1", "step", "cpu"],
        ["layer1/mlp", "2", "steps", "cpu"], ["layer1", "1", "step", "cpu"], ["-", "1", "step", "cpu"],
    ]  # fmt: skip
    assert [line.split()[:2] for line in explained.by_scope(1).splitlines()] == [
        ["layer0", "3"],
        ["layer1", "3"],
        ["-", "1"],
    ]
    html = explained.html()
    page = Page()
    page.feed(html)
    assert page.open == []
    assert len(page.rows["node"]) == 7
    titles = re.findall(
        r'<details class="scope"><summary><span class="code">(.*?)</span> <span class="note">(.*?)</span>', html
    )
    assert titles == [("layer0", "3 steps"), ("mlp", "2 steps"), ("layer1", "3 steps"), ("mlp", "2 steps")]
