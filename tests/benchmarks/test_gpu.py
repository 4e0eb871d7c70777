"""``benchmarks/gpu.py``: whatever a part does, the others run, all ends in time, and the results say what happened."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("opweave_torch")

from benchmarks import gpu
from benchmarks.card.part import Part
from benchmarks.card.run import Outcome

DOUBLES = "tests.support.card_parts"


def part(name: str, seconds: float = 20, **more: Any) -> Part:
    return Part(name, f"The {name} one", f"{DOUBLES}:{name}", seconds, **more)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Runs parts; returns the exit status and the parts of the document by name."""
    for name in ("OMP_NUM_THREADS", "OPWEAVE_TORCH_SEPARATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def run(*parts: Part, minutes: float = 1, arguments: tuple[str, ...] = ("--short",)) -> tuple[int, dict[str, Any]]:
        given = ["--out", str(tmp_path), "--device", "torch:cpu", "--minutes", str(minutes), *arguments]
        status = gpu.main(given, parts or gpu.PARTS)
        document = json.loads((tmp_path / "results.json").read_text())
        assert document["ended"]
        return status, {found["name"]: found for found in document["parts"]}

    return run


def test_a_part_is_a_process_that_is_told_what_to_try(results, tmp_path):
    status, found = results(part("right"), arguments=("--short", "--seed", "7"))
    assert status == 0
    assert found["right"]["status"] == "passed"
    assert found["right"]["rows"] == [{"table": "figures", "device": "torch:cpu", "worker": 0, "seed": 7}]
    page = (tmp_path / "index.html").read_text()
    assert "The right one" in page
    assert "http" not in page.replace("http-equiv", ""), "the page needs nothing else"


def test_wrong_results_fail_and_are_named(results, tmp_path):
    status, found = results(part("wrong"), part("right"))
    assert status == 1
    assert found["wrong"]["status"] == "failed"
    assert found["wrong"]["failures"] == [{"what": "the sum", "why": "is 1, not 2"}]
    assert found["right"]["status"] == "passed"
    assert "is 1, not 2" in (tmp_path / "index.html").read_text()


def test_an_exception_keeps_the_rows_and_shows_where(results):
    status, found = results(part("raises"))
    assert (status, found["raises"]["status"]) == (1, "failed")
    assert found["raises"]["rows"] == [{"table": "figures", "got": 1}]
    assert "ArithmeticError: the driver said no" in found["raises"]["failures"][0]["why"]
    assert "in raises" in found["raises"]["log"]


def test_a_part_that_says_nothing_does_not_pass(results):
    status, found = results(part("silent"))
    assert (status, found["silent"]["status"]) == (1, "failed")
    assert found["silent"]["why"] == "it reported nothing"


def test_what_is_not_there_is_no_failure(results):
    status, found = results(part("missing"))
    assert (status, found["missing"]["status"], found["missing"]["why"]) == (0, "not here", "no such card")


@pytest.mark.skipif(os.name != "posix", reason="groups of processes are those of POSIX")
def test_a_part_that_hangs_is_ended_with_its_children_and_the_next_one_runs(results):
    start = time.monotonic()
    status, found = results(part("hangs", seconds=4), part("right"))
    assert time.monotonic() - start < 30
    assert (status, found["hangs"]["status"]) == (1, "timed out")
    assert "at the third product" in found["hangs"]["why"]
    assert "time.sleep(600)" in found["hangs"]["log"] or "in hangs" in found["hangs"]["log"], "where it hangs is shown"
    pid = next(row["pid"] for row in found["hangs"]["rows"] if row["table"] == "child")
    assert not _is_alive(pid)
    assert found["right"]["status"] == "passed"


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_part_that_crashes_is_named_with_its_signal(results):
    status, found = results(part("crashes"), part("right"))
    assert (status, found["crashes"]["status"]) == (1, "crashed")
    assert "SIGSEGV at a kernel" in found["crashes"]["why"]
    assert found["crashes"]["rows"] == [{"table": "figures", "got": 1}]
    assert found["right"]["status"] == "passed"


def test_a_part_that_resumes_goes_on_behind_what_ended_its_process(results):
    status, found = results(part("crashes_once", resumes=True))
    assert (status, found["crashes_once"]["status"]) == (1, "failed")
    assert [row["what"] for row in found["crashes_once"]["rows"]] == ["first", "third"]
    assert found["crashes_once"]["failures"] == [{"what": "second", "why": "the process ended with exit status 9"}]


def test_what_is_not_reached_is_told(results, tmp_path):
    start = time.monotonic()
    status, found = results(part("hangs", seconds=4000), part("right"), minutes=0.1, arguments=())
    assert time.monotonic() - start < 20
    assert (status, found["right"]["status"]) == (1, "not reached")
    assert "not reached" in (tmp_path / "index.html").read_text()


def test_workers_share_a_part_and_parts_run_beside_others(results):
    status, found = results(
        part("crashes_once", resumes=True, beside=True), part("right", workers=2), part("wrong", alone=True),
        minutes=8, arguments=(),
    )  # fmt: skip
    assert status == 1
    assert sorted(row["worker"] for row in found["right"]["rows"]) == [0, 1]
    assert [found[name]["status"] for name in ("crashes_once", "right", "wrong")] == ["failed", "passed", "failed"]


def test_results_are_written_as_parts_go(tmp_path, monkeypatch):
    seen: list[list[str]] = []
    write = gpu._Record.write

    def noting(self: Any, outcomes: list[Outcome]) -> None:
        write(self, outcomes)
        document = json.loads((tmp_path / "results.json").read_text())
        seen.append([found["status"] for found in document["parts"]])

    monkeypatch.setattr(gpu._Record, "write", noting)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    gpu.main(["--out", str(tmp_path), "--device", "torch:cpu"], [part("right", 40), part("wrong", 40)])
    assert ["passed", "waiting"] in seen or ["passed", "running"] in seen


def test_limits_are_those_of_a_run_of_eight_minutes():
    """So that the last part, which takes what is left over, has some of it in any case."""
    assert sum(one.seconds for one in gpu.PARTS if not (one.beside or one.fills)) <= 7.5 * 60
    assert gpu.PARTS[-1].fills


def test_a_sample_of_the_suite_takes_the_time_that_is_left(results):
    """It ends by itself, in the middle of a check if need be, and says how far it came."""
    sample = next(one for one in gpu.PARTS if one.name == "sample")
    status, found = results(sample._replace(workers=2), minutes=0.25, arguments=())
    assert (status, found["sample"]["status"]) == (0, "passed")
    rows = [row for row in found["sample"]["rows"] if row["level"] == 2]
    assert len(rows) == 2
    assert all(0 <= row["performed"] < row["checks"] for row in rows)


@pytest.mark.timeout(250)
def test_the_stand_in_goes_the_whole_way(results):
    """Every part in its shortest form, in as many processes: nothing is run for the first time on a card."""
    status, found = results(minutes=4)
    failures = {name: (one["why"], one["failures"], one["log"]) for name, one in found.items()
                if one["status"] not in ("passed", "not here")}  # fmt: skip
    assert (status, failures) == (0, {})
    speed = next(row for row in found["encoder"]["rows"] if row["table"] == "MiniLM-L6")
    assert speed["over_eager"] > 0
    assert speed["events_over_graph"] > 0
    assert any(row["table"] == "a training step" and row["over_graph"] > 0 for row in found["training"]["rows"])
