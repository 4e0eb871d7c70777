"""The suite as people run it: selection, expectations, the command, pytest, and that both say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import opweave_conformance.hooks
from opweave import registry
from opweave.cli import main
from opweave.errors import UnknownNameError
from opweave.registry import Registry
from opweave_conformance.expectations import ConfigError, Expectations
from opweave_conformance.levels import CHECKS
from opweave_conformance.report import Cell, as_json, matrix, refusals
from opweave_conformance.result import Result
from opweave_conformance.suite import Suite
from tests.support.sound_device import SoundBackend, SoundDevice

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "tests/support/half_done_backend.py"
HANGING = ROOT / "tests/support/hanging_backend.py"
SELECTED = (
    "hygiene-mem-info",
    "memory-fill",
    "memory-host-buffer-type",
    "listed-add",
    "add-f32-3x5,3x5",
    "add-f16-3x5,3x5",
    "exp-f32-?",
    "tanh-f32-64",
    "async-order-plans",
    "worker-async-copy-order",
    "split-host-diamond",
    "overlap-separate-functions",
    "fault-raised",
)
"""Patterns of cases that pass, are refused, are skipped and fail."""


@pytest.fixture
def using() -> Registry:
    found = Registry(environ={}, search=[])
    found.register(SoundBackend)
    return found


def run(suite: Suite) -> Suite:
    for item in suite.items:
        suite.perform(item)
    return suite


# --- checks ---------------------------------------------------------------------------------------------------------


def test_ids_are_unique_and_say_what_has_to_hold() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert {check.level for check in CHECKS} == set(range(7))
    assert [c.id for c in CHECKS if not c.op and not c.about.endswith(".")] == []


class TestSelection:
    def test_all_of_it(self, using: Registry) -> None:
        suite = Suite("sound", using=using)
        assert [item.check for item in suite.items] == list(CHECKS)
        assert not suite.filtered

    def test_by_level(self, using: Registry) -> None:
        suite = Suite("sound", using=using, levels=[1])
        assert {item.check.level for item in suite.items} == {1}
        assert suite.filtered
        with pytest.raises(UnknownNameError, match="no level named '7'"):
            Suite("sound", using=using, levels=[7])

    def test_by_pattern(self, using: Registry) -> None:
        suite = Suite("sound", using=using, only=["exp-f32-*", "memory-f?ll"])
        names = [item.name for item in suite.items]
        assert names[0] == "memory-fill"
        assert len(names) > 2
        assert all(name.startswith("exp-f32-") for name in names[1:])
        with pytest.raises(UnknownNameError, match=r"did you mean .*'memory-fill'"):
            Suite("sound", using=using, only=["exp-f32-*", "memory-fil"])

    def test_several_devices(self) -> None:
        class Two(SoundBackend):
            def devices(self):
                return [SoundDevice(), SoundDevice()]

        using = Registry(environ={}, search=[])
        using.register(Two)
        suite = Suite("sound", using=using, only=["hygiene-names", "memory-fill"])
        assert [item.name for item in suite.items] == ["hygiene-names", "sound:0/memory-fill", "sound:1/memory-fill"]
        (item,) = Suite("sound:1", using=using, only=["memory-fill"]).items
        assert (item.name, item.device.name) == ("memory-fill", "sound:1")

    def test_a_second_device_adds_checks_and_stands_in_the_command_that_repeats(self, using: Registry) -> None:
        suite = Suite("sound", using=using, beside="host", only=["split-*-diamond"])
        assert [item.name for item in suite.items] == [
            "split-host-diamond", "split-separate-diamond", "split-beside-host-diamond",
        ]  # fmt: skip
        outcome = suite.perform(suite.items[-1])
        assert outcome.status == "passed"
        assert outcome.repeat.endswith(" --seed 0 --beside host")
        with pytest.raises(UnknownNameError, match="nosuch"):
            Suite("sound", using=using, beside="nosuch")

    def test_the_seed_decides_the_values_and_stands_in_the_command_that_repeats(self, using: Registry) -> None:
        (item,) = Suite("sound", using=using, only=["exp-f32-64"]).items
        found = Suite("sound", using=using, only=["exp-f32-64"], seed=7)
        assert found.perform(item).repeat == "opweave conformance sound --only exp-f32-64 --seed 7"


def test_a_run_in_which_nothing_was_run_is_a_problem(using: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = run(Suite("sound", using=using, levels=[1], only=["exp-f32-64"]))
    assert empty.problems() == ["nothing was run: no check of these levels is selected"]
    monkeypatch.setattr(SoundDevice, "_why_not", lambda self, step: "not today")
    refused = run(Suite("sound", using=using, only=["exp-f32-64", "exp-f32-7"]))
    assert refused.problems() == ["nothing was run: 2 checks selected, all refused or skipped"]


def test_a_sample_has_each_operation_in_each_type_before_any_twice(using: Registry) -> None:
    whole = Suite("sound", levels=[2, 4], using=using)
    drawn = Suite("sound", levels=[2, 4], using=using, sample=True)
    assert sorted(item.name for item in drawn.items) == sorted(item.name for item in whole.items)
    groups = [(item.check.op or item.check.id, item.check.dtype) for item in drawn.items]
    assert set(groups[: len(set(groups))]) == set(groups)
    again = Suite("sound", levels=[2, 4], using=using, sample=True)
    assert [item.name for item in again.items] == [item.name for item in drawn.items]
    other = Suite("sound", levels=[2, 4], using=using, sample=True, seed=1)
    assert [item.name for item in other.items] != [item.name for item in drawn.items]
    assert drawn.filtered, "patterns of checks that were not reached match nothing"


def test_numbers_for_people(using: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(self, step):
        return "no f16" if step.out.dtype.name == "f16" else "no tanh" if step.op == "tanh" else None

    monkeypatch.setattr(SoundDevice, "_why_not", why_not)
    suite = run(Suite("sound", using=using, only=["add-f[13]?-3x5,3x5", "tanh-f[13]?-64"]))
    rows = matrix(suite.results)
    assert rows == {
        "add": {"f32": Cell(1, 0, 0), "f16": Cell(0, 1, 0)},
        "tanh": {"f32": Cell(0, 1, 0), "f16": Cell(0, 1, 0)},
    }
    assert [tuple(r) for r in refusals(suite.results)] == [
        ("tanh", 2, 2, [("no tanh", 1), ("no f16", 1)]), ("add", 1, 2, [("no f16", 1)]),
    ]  # fmt: skip
    document = json.loads(json.dumps(as_json(suite, "0.1.0"), allow_nan=False))
    assert document["ok"] is True
    assert document["totals"] == {"passed": 1, "refused": 3}
    assert document["results"][0]["nmse"] == 0.0


# --- conformance.toml -----------------------------------------------------------------------------------------------


class TestExpectations:
    known = Expectations({"*-f64-*": "no doubles"}, {"exp-*": "driver bug"})

    @pytest.mark.parametrize(
        ("name", "status", "counts_as"),
        [
            ("add-f32-1", "passed", "passed"),
            ("add-f32-1", "refused", "refused"),
            ("add-f32-1", "failed", "failed"),
            ("add-f64-1", "refused", "unsupported"),
            ("add-f64-1", "skipped", "unsupported"),
            ("add-f64-1", "passed", "failed"),
            ("add-f64-1", "failed", "failed"),
            ("exp-f32-1", "failed", "xfailed"),
            ("exp-f32-1", "passed", "failed"),
            ("exp-f32-1", "refused", "failed"),
            ("exp-f64-1", "refused", "unsupported"),
        ],
    )
    def test_what_is_not_as_it_is_listed_fails(self, name: str, status, counts_as: str) -> None:
        assert self.known.judge([name], Result(status, "why")).status == counts_as

    def test_strict_wants_every_refusal_listed(self) -> None:
        strict = Expectations({"*-f64-*": "no doubles"}, strict=True)
        assert strict.judge(["add-f64-1"], Result("refused", "no")).status == "unsupported"
        assert strict.judge(["add-f32-1"], Result("refused", "no")).status == "failed"
        assert strict.judge(["memory-map"], Result("skipped", "no")).status == "skipped"

    def test_one_device_only(self) -> None:
        one = Expectations({"opencl:1/exp-*": "too old"})
        assert one.judge(("exp-f32-1", "opencl:0/exp-f32-1"), Result("refused", "no")).status == "refused"
        assert one.judge(("exp-f32-1", "opencl:1/exp-f32-1"), Result("refused", "no")).status == "unsupported"

    def test_a_pattern_that_matches_nothing_is_a_problem_of_a_whole_run(self, using: Registry) -> None:
        stale = Expectations({"nosuch-*": "gone"}, {"exp-*": "driver bug"})
        for name in ("exp-f32-1", "add-f32-1"):
            stale.judge([name], Result("failed", "wrong"))
        assert stale.unmatched() == ["nosuch-*"]
        part = run(Suite("sound", using=using, only=["add-f32-1,1"], expectations=stale))
        assert part.problems() == []
        assert part.problems(filtered=False) == []
        reported = Suite("sound", using=using, expectations=Expectations(stale.unsupported, stale.xfail))
        reported.note(Result("xfailed", "wrong", id="exp-f32-1", op="exp", device="sound"))
        assert reported.problems() == ["the pattern 'nosuch-*' matches nothing; remove it"], "as in the other process"
        whole = Suite("sound", using=using, expectations=stale)
        whole.results.extend(part.results)
        assert "the pattern 'nosuch-*' matches nothing; remove it" in whole.problems()
        assert whole.problems(filtered=True) == []

    def test_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert Expectations.read().unsupported == {}
        Path("conformance.toml").write_text('strict = true\n[unsupported]\n"*-f64-*" = "no doubles"\n')
        found = Expectations.read()
        assert (found.unsupported, found.xfail, found.strict) == ({"*-f64-*": "no doubles"}, {}, True)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[unsupported", "conformance.toml: "),
            ("[expected]", "there is no expected; there are strict, failing_call, unsupported, xfail"),
            ('failing_call = "nosuch:f"', "failing_call is the name of a function, as module:function: No module"),
            ("failing_call = 1", "failing_call is the name of a function"),
            ('failing_call = "math:pi"', "failing_call names math:pi, which is no function"),
            ('strict = "yes"', "strict is true or false"),
            ('[xfail]\n"a" = ""', "'a' needs a reason"),
            ('[xfail]\n"a" = 3', "'a' needs a reason"),
            ('xfail = "a"', r"\[xfail\] is a table"),
        ],
    )
    def test_file_that_makes_no_sense(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "conformance.toml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            Expectations.read(file)

    def test_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot read .*nosuch.*: No such file"):
            Expectations.read(tmp_path / "nosuch.toml")


def test_what_to_write_next_has_every_reason_and_not_what_the_core_packs() -> None:
    def refused(reason: str) -> Result:
        return Result("refused", reason, op="linear", dtype="f32")

    quantized = [refused(f"source 1 is {name}, not f32") for name in ("q4_0", "q8_0", "q4_k")]
    packed = [refused("source 0 is not dense"), refused("the rows of source 1 have gaps")]
    (found,) = refusals([*quantized, refused("a bias is not supported"), *packed, Result("passed", op="linear")])
    assert (found.refused, found.cases) == (4, 7)
    assert found.reason == "3: source 1 is not f32; 1: a bias is not supported"
    assert refusals(packed) == []
    (found,) = refusals([refused(f"reason {n}") for n in range(5)])
    assert found.reason == "1: reason 0; 1: reason 1; 1: reason 2; 2: others"


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(using: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """``command("exp*")`` gives exit code, standard output and standard error of the command on the sound device."""
    monkeypatch.setattr(registry, "REGISTRY", using)
    using.hooks.register(opweave_conformance.hooks, "conformance")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["opweave", "conformance", "sound", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def test_a_sample_takes_its_time_and_no_longer(command) -> None:
    code, out, _ = command("--level", "2", "--seconds", "0.3", "--json")
    found = json.loads(out)
    assert code == 0
    assert 0 < len(found["results"]) < found["checks"]


class TestCommand:
    def test_everything_right(self, command) -> None:
        code, out, err = command("--only", "exp-f[13]?-3x5", "--only", "memory-fill")
        assert (code, err) == (0, "")
        assert "level 1, memory: 1 passed" in out
        assert out.splitlines()[-1].startswith("3 passed in ")
        assert out.splitlines()[-1].endswith("seed 0")

    def test_something_wrong(self, command, monkeypatch: pytest.MonkeyPatch) -> None:
        right = SoundDevice.store

        def store(self, step, *sources):
            right(self, step, *sources)
            if step.op == "exp" and step.out.dtype.name == "f32":
                self.view(step.out)[...] *= 2

        monkeypatch.setattr(SoundDevice, "store", store)
        why_not = lambda self, step: "no tanh yet" if step.op == "tanh" else None  # noqa: E731
        monkeypatch.setattr(SoundDevice, "_why_not", why_not)
        code, out, _ = command("--only", "exp-f[13]?-3x5", "--only", "tanh-f[13]?-3x5", "--seed", "5")
        assert code == 1
        assert [line.split() for line in out.splitlines() if line.startswith(("exp  ", "tanh  "))] == [
            ["exp", "1F", "1"], ["tanh", "1r", "1r"], ["tanh", "all", "no", "tanh", "yet"],
        ]  # fmt: skip
        assert "exp-f32-3x5\n" in out
        assert "largest error" in out
        assert "    opweave conformance sound --only exp-f32-3x5 --seed 5\n" in out

    def test_json(self, command) -> None:
        code, out, err = command("--only", "exp-f32-3x5", "--json")
        document = json.loads(out)
        assert (code, err, document["ok"], document["seed"]) == (0, "", True, 0)
        assert [(r["id"], r["status"]) for r in document["results"]] == [("exp-f32-3x5", "passed")]

    def test_nothing_selected(self, command) -> None:
        code, out, _ = command("--only", "exp-f32-3x5", "--level", "1")
        assert code == 1
        assert "nothing was run: no check of these levels is selected" in out

    @pytest.mark.parametrize("wrong", [("--only", "nosuch"), ("--level", "9"), ("--beside", "nosuch")])
    def test_a_wrong_call_is_no_failure_of_the_backend(self, command, wrong: tuple[str, str]) -> None:
        code, out, err = command(*wrong)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")

    def test_only_levels_that_were_asked_for_have_lines(self, command) -> None:
        _, out, _ = command("--only", "exp-f32-3x5")
        assert [line for line in out.splitlines() if line.startswith("level")] == ["level 2, operations: 1 passed"]

    def test_configuration(self, command) -> None:
        Path("conformance.toml").write_text('[xfail]\n"exp-f32-*" = "a bug"\n')
        code, out, _ = command("--only", "exp-f32-3x5")
        assert code == 1
        assert "listed under [xfail] (a bug), but it passes" in out.replace("\n    ", " ")
        Path("other.toml").write_text("")
        assert command("--only", "exp-f32-3x5", "--config", "other.toml")[0] == 0

    def test_configuration_that_makes_no_sense(self, command) -> None:
        Path("conformance.toml").write_text("[nosuch]")
        code, out, err = command("--only", "exp-f32-3x5")
        assert (code, out) == (1, "")
        assert err.startswith("error: conformance.toml: there is no nosuch")


# --- pytest says the same -------------------------------------------------------------------------------------------


def environment(backend: Path = BACKEND) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {**clean, "OPWEAVE_BACKEND_PATH": str(backend), "PYTHONPATH": str(ROOT)}


def by_command(folder: Path, *options: str) -> tuple[int, dict[str, str]]:
    command = [sys.executable, "-m", "opweave", "conformance", "half_done_backend", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment())
    assert done.stdout, done.stderr
    return done.returncode, {r["name"]: r["status"] for r in json.loads(done.stdout)["results"]}


def by_pytest(folder: Path, *options: str) -> tuple[int, dict[str, str]]:
    command = [
        sys.executable, "-m", "pytest", "--pyargs", "opweave_conformance", "-p", "opweave_conformance.plugin",
        "-p", "no:cacheprovider", "--opweave-backend", "half_done_backend", "-rA", "-q", "--tb=no",
        f"--junitxml={folder / 'report.xml'}", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment())
    from xml.etree import ElementTree

    verdicts = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        name = case.attrib["name"].removeprefix("test_conformance[").removesuffix("]")
        skipped = case.find("skipped")
        xfailed = skipped is not None and skipped.attrib["type"] == "pytest.xfail"
        verdicts[name] = (
            "xfailed" if xfailed else "skipped" if skipped is not None
            else "failed" if case.find("failure") is not None else "passed"
        )  # fmt: skip
    assert verdicts or done.returncode, done.stdout
    return done.returncode, verdicts


def test_the_command_and_pytest_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "conformance.toml").write_text('[unsupported]\n"*-f16-*" = "no halves"\n[xfail]\n"exp-*" = "a bug"\n')
    with ThreadPoolExecutor() as pool:
        command = pool.submit(by_command, tmp_path, *[f"--only={pattern}" for pattern in SELECTED])
        told, tests = by_pytest(tmp_path, *[f"--opweave-only={pattern}" for pattern in SELECTED])
        said, verdicts = command.result()
    assert set(verdicts.values()) == {"passed", "refused", "skipped", "unsupported", "xfailed", "failed"}
    same = {
        name: status if status in ("passed", "failed", "xfailed") else "skipped" for name, status in verdicts.items()
    }
    assert tests == same
    assert (said, told) == (1, 1)


def test_pytest_without_anything_to_run_fails(tmp_path: Path) -> None:
    code, _ = by_pytest(tmp_path, "--opweave-only=tanh-f32-64")
    assert code == 1, "all that is selected is refused"


def test_pytest_in_several_processes_knows_what_they_ran(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pip install pytest-xdist")
    code, verdicts = by_pytest(tmp_path, "--opweave-only=add-f32-3x5,*", "-n2")
    assert (code, set(verdicts.values())) == (0, {"passed"})


def test_what_hangs_keeps_nobody_from_ending(tmp_path: Path) -> None:
    commands = (
        ["opweave", "conformance", "hanging_backend", "--timeout=2", "--only=async-abort-idle"],
        ["pytest", "--pyargs", "opweave_conformance", "-p", "opweave_conformance.plugin", "-p", "no:cacheprovider",
         "--opweave-backend=hanging_backend", "--opweave-timeout=2", "--opweave-only=async-abort-idle"],
    )  # fmt: skip

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=tmp_path,
            env=environment(HANGING), timeout=60,
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        for done in pool.map(run, commands):
            assert done.returncode == 1, done.stderr
            assert "it hangs: after 2 s it is still in _abort (hanging_backend.py, line 15)" in done.stdout
