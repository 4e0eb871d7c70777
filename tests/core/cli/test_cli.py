"""The ``opweave`` command: what it prints, to whom, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import opweave as ow
from opweave import registry
from opweave.cost.profile import Curve, OpCost, Profile
from opweave.packages import pip_install
from tests.support.plugins_for_tests import OLD, backend, probed
from tests.support.text import words

LONG = "a card that is not there, " * 8 + "the end of the message"
REMEDY = "see https://example.org/" + "a-very-long-path/" * 12 + "page"


class TestDevices:
    def test_table(self, folder, run):
        gpu = "Unit('cuda:0', kind=Kind.GPU, hardware_id='pci:1', description='Big [bold]Chip[/bold]')"
        folder.add(
            "acme", backend(f"[{gpu}, Unit('npu', mem_info=lambda: (3 << 29, 2 << 30))]", attributes="priority = 9")
        )
        folder.add("twin", backend("[Unit(kind=Kind.GPU, hardware_id='pci:1', mem_info=lambda: (0, 0))]"))
        code, out, err = run("devices", columns=120)
        assert (code, err) == (0, "")
        lines = [line.split() for line in out.splitlines() if line and not line.startswith("   ")]
        assert [line[:3] for line in lines[:4]] == [
            ["1", "acme:cuda:0", "GPU"],
            ["-", "twin", "GPU"],
            ["2", "acme:npu", "ACCEL"],
            ["3", "host", "HOST"],
        ]
        assert "Big [bold]Chip[/bold]" in out, "descriptions are no markup"
        assert lines[2][3:] == ["1.5", "GiB", "/", "2", "GiB", "acme:cuda:0,", "twin,", "host"]
        assert lines[1][3] == "?", "a device may not know its memory"
        assert "can  fill copy import_host map" in out
        assert [line.split() for line in out.splitlines() if "pci:1" in line] == [
            ["at", "pci:1"],
            ["at", "pci:1,", "used", "through", "acme:cuda:0"],
        ]
        assert out.rstrip().endswith("-: not used by default, since another device uses the same hardware")

    @pytest.mark.parametrize("columns", [40, 80, 120])
    def test_fits_the_terminal_and_cuts_nothing(self, folder, run, columns):
        description = (
            "An accelerator whose name is long enough that it cannot stand in one line of a terminal, revision 7"
        )
        folder.add("acme", backend(f"[Unit(str(i), description={description!r}) for i in range(12)]"))
        _, out, _ = run("devices", columns=columns)
        assert max(map(len, out.splitlines())) <= max(columns, 66), "or the width that the columns need"
        assert words(out).count(words(description)) == 12
        others = ", ".join(f"acme:{i}" for i in range(1, 12)) + ", host"
        assert words(others) in words(out), "all that share memory with acme:0"

    def test_json(self, folder, run):
        folder.add("acme", "print('loading')\n" + backend("[Unit(features=lambda: {'driver': {1}})]"))
        code, out, err = run("devices", "--json")
        document = json.loads(out)
        assert code == 0
        assert err == "loading\n", "what a plugin prints does not end up in the document"
        acme, host = document["devices"]
        assert list(acme) == list(host) == [
            "name", "backend", "kind", "description", "hardware_id", "default_order", "used_through",
            "memory_free", "memory_total", "memory_space", "shares_memory_with", "capabilities", "blas", "features",
            "problems",
        ]  # fmt: skip
        assert (acme["name"], acme["backend"], acme["kind"], acme["default_order"]) == ("acme", "acme", "ACCEL", 1)
        assert acme["shares_memory_with"] == ["host"]
        assert acme["capabilities"]["map"] is True
        assert acme["features"] is None, "unless asked for"

    def test_a_number_that_python_does_not_write(self, folder, run):
        folder.add("acme", backend("[Unit(features=lambda: {'seed': 10**5000, 'memory': 2**64})]"))
        features = json.loads(run("devices", "--features", "--json")[1])["devices"][0]["features"]
        assert features == {"seed": "an integer of 16,610 bits", "memory": 2**64}
        assert "16,610 bits" in run("devices", "--features")[1]

    def test_features(self, folder, run):
        folder.add("acme", backend("[Unit(features=lambda: {'driver': 7, 'sets': ('a', 'b')})]"))
        code, out, _ = run("devices", "--features")
        assert code == 0
        assert "driver  7" in out
        assert "sets    a b" in out
        assert json.loads(run("devices", "--features", "--json")[1])["devices"][0]["features"] == {
            "driver": 7,
            "sets": ["a", "b"],
        }

    def test_a_driver_that_answers_with_errors(self, folder, run):
        folder.add("acme", backend("[Unit(mem_info=lambda: 1 / 0, features=lambda: 1 / 0)]"))
        code, out, _ = run("devices", "--features")
        assert code == 0
        assert "memory: ZeroDivisionError: division by zero" in out
        acme = json.loads(run("devices", "--features", "--json")[1])["devices"][0]
        assert (acme["memory_free"], acme["memory_total"], acme["features"], len(acme["problems"])) == (None,) * 3 + (
            2,
        )

    def test_plugins_that_failed_are_named(self, folder, run):
        folder.add("boom", "1 / 0")
        code, out, _ = run("devices", columns=120)
        assert code == 0
        assert out.rstrip().endswith("without devices: boom (broken); opweave plugins tells why")
        assert "boom" not in run("devices", columns=120, OPWEAVE_DISABLE="boom")[1]

    def test_what_was_listed_and_fails_is_an_error(self, folder, run):
        folder.add("boom", "1 / 0")
        code, out, err = run("devices", OPWEAVE_BACKENDS="boom,nosuch")
        assert (code, out) == (1, "")
        assert "error: plugin 'boom' (opweave-boom 1.0): ZeroDivisionError: division by zero" in err
        assert "no plugin named 'nosuch'" in err


class TestPlugins:
    def test_table(self, folder, run):
        folder.add("acme", backend("[Unit(), Unit()]"))
        folder.add("boom", "def deep():\n    raise ValueError('[red]oh[/red]')\ndeep()", version="2.5")
        folder.add("later", requires=("opweave>=9",))
        folder.add("off")
        code, out, err = run("plugins", OPWEAVE_DISABLE="off")
        assert (code, err) == (0, "")
        rows = [line.split() for line in out.splitlines() if line and not line.startswith(" ")]
        assert rows == [
            ["plugin", "distribution", "state", "devices"],
            ["acme", "opweave-acme", "1.0", "ready", "2"],
            ["boom", "opweave-boom", "2.5", "broken", "-"],
            ["later", "opweave-later", "1.0", "incompatible", "-"],
            ["off", "opweave-off", "1.0", "disabled", "-"],
            ["host", "opweave", registry.REGISTRY.plugins()[-1].version, "ready", "1"],
        ]
        assert "cause   ValueError: [red]oh[/red]" in out
        assert "line 2, in deep" in out
        assert "remedy  report it to the authors of opweave-boom" in out
        assert "cause   it was made for opweave>=9" in out
        assert "cause   disabled by OPWEAVE_DISABLE" in out

    @pytest.mark.parametrize("columns", [40, 80, 120])
    def test_cause_and_remedy_are_shown_in_full(self, folder, run, columns):
        folder.add("acme", backend(body=f"raise Unavailable({LONG!r}, remedy={REMEDY!r})"))
        code, out, _ = run("plugins", columns=columns)
        assert code == 0
        assert words(LONG) in words(out)
        assert words(REMEDY) in words(out)
        assert "\u2026" not in out
        below = [line for line in out.splitlines() if line.startswith(" ")]
        assert max(map(len, below)) <= columns

    def test_json(self, folder, run):
        folder.add("acme")
        folder.add("boom", "1 / 0")
        code, out, _ = run("plugins", "--json")
        assert code == 0
        acme, boom, host = json.loads(out)["plugins"]
        keys = ["name", "distribution", "version", "state", "value", "devices", "error", "remedy", "traceback"]
        keys += ["unusable", "variant"]
        assert list(acme) == list(boom) == list(host) == keys
        assert acme == {
            "name": "acme", "distribution": "opweave-acme", "version": "1.0", "state": "ready",
            "value": "opweave_acme:Acme", "devices": ["acme"], "error": None, "remedy": None, "traceback": None,
            "unusable": [], "variant": None,
        }  # fmt: skip
        assert (boom["state"], boom["devices"], boom["error"]) == ("broken", [], "ZeroDivisionError: division by zero")
        assert "opweave_boom.py" in boom["traceback"]

    @pytest.mark.parametrize(
        ("source", "code"),
        [("1 / 0", 1), (backend(), 0), (backend("[]"), 0), ("import a_module_that_nobody_has", 0), ("import nunpy", 1)],
        ids=["broken", "ready", "no device", "no library", "typing error"],
    )
    def test_strict_fails_for_what_is_broken(self, folder, run, source, code):
        requires = ("a-module-that-nobody-has",) if "nobody" in source else ()
        folder.add("acme", source, requires=requires)
        assert run("plugins", "--strict")[0] == code
        assert run("plugins", "--strict", "--json")[0] == code
        assert run("plugins")[0] == 0

    def test_what_was_listed_and_fails_is_an_error_after_the_table(self, folder, run):
        folder.add("acme")
        code, out, err = run("plugins", OPWEAVE_BACKENDS="acme,nosuch")
        assert code == 1
        assert "opweave-acme 1.0" in out
        assert "no plugin named 'nosuch'" in err


HOOK = """
@hookimpl
def opweave_cli(app):
    @app.command()
    def {name}({parameters}):
        "Say hello."
        print("hello from {name}")
"""


def with_command(name: str, parameters: str = "") -> str:
    return backend(extra=HOOK.format(name=name, parameters=parameters))


class TestCommandsOfPlugins:
    def test_a_command_of_a_package_that_is_not_installed_names_the_package(self, run):
        code, out, err = run("serve-devices", "--help")
        assert (code, out) == (2, "")
        assert "the command 'serve-devices' is one of opweave-remote" in err
        assert f"remedy: {pip_install('opweave-remote')}; `opweave plugins`" in err

    def test_are_added(self, folder, run):
        folder.add("greeter", with_command("greet"), value="opweave_greeter")
        folder.add("second", with_command("wave"), value="opweave_second")
        assert run("greet") == (0, "hello from greet\n", "")
        assert run("wave") == (0, "hello from wave\n", "")
        code, out, _ = run("--help")
        assert code == 0
        assert all(command in out for command in ("devices", "plugins", "greet", "wave"))

    @pytest.mark.parametrize(
        ("source", "why"),
        [
            (backend(extra="@hookimpl\ndef opweave_cli(app): 1 / 0"), "ZeroDivisionError"),
            (with_command("greet", "x: int | list[str]"), "AssertionError"),
            (with_command("devices"), "there is already a command devices"),
        ],
        ids=["hook raises", "parameter impossible", "name taken"],
    )
    def test_that_are_broken_are_left_out(self, folder, run, source, why):
        folder.add("bad", source, value="opweave_bad")
        folder.add("good", with_command("wave"), value="opweave_good")
        code, out, err = run("wave")
        assert (code, out) == (0, "hello from wave\n")
        assert "no commands from plugin 'bad'" in err
        assert why in err

    def test_do_not_touch_the_built_in_ones(self, folder, run):
        folder.add("bad", with_command("devices"), value="opweave_bad")
        code, out, err = run("plugins")
        assert (code, err) == (0, "")
        assert "opweave-bad" in out

    def test_a_plugin_whose_entry_point_is_a_class_is_not_imported_for_them(self, folder, run):
        folder.add("acme")
        assert run("--help")[0] == 0
        assert "opweave_acme" not in folder.imported()

    def test_errors_of_theirs_are_shown_without_a_traceback(self, folder, run):
        source = with_command("greet").replace('print("hello from greet")', 'raise Unavailable("no card")')
        folder.add("acme", source, value="opweave_acme")
        assert run("greet") == (1, "", "error: no card\n")

    def test_have_the_combinations_of_the_environment(self, folder, run, monkeypatch):
        folder.add("acme", with_command("greet"), value="opweave_acme")
        monkeypatch.setenv("OPWEAVE_COMBINE", "host+nosuch")
        code, out, err = run("greet")
        assert (code, out) == (1, "")
        assert "there is no device named 'nosuch'" in err


class TestUnusableDevices:
    def test_plugins_counts_the_usable_ones(self, folder, run):
        folder.add("acme", probed("Unit()", OLD, "Unit()"))
        code, out, _ = run("plugins", columns=120)
        assert code == 0
        assert "2 of 3 usable" in out
        details = words(out)
        assert words("unusable acme:1: Old card") in details
        assert words("cause no kernel image for sm_30") in details
        assert words("remedy install the build for it") in details

    def test_plugins_prints_each_cause_once(self, folder, run):
        folder.add("acme", probed(OLD))
        _, out, _ = run("plugins", columns=120)
        assert "0 of 1 usable" in out
        assert out.count("no kernel image for sm_30") == out.count("install the build for it") == 1

    def test_devices_shows_them_last(self, folder, run):
        folder.add("acme", probed(OLD, "Unit()"))
        code, out, _ = run("devices", columns=120)
        assert code == 0
        rows = [line.split()[:3] for line in out.splitlines()[1:] if line and not line.startswith("   ")]
        assert rows[:3] == [["1", "acme:1", "ACCEL"], ["2", "host", "HOST"], ["x", "acme:0", "unusable"]]
        assert out.rstrip().endswith("acme: 1 of 2 devices usable")
        assert words("Old card cause no kernel image for sm_30 remedy install the build for it") in words(out)

    @pytest.mark.parametrize("command", ["plugins", "devices"])
    def test_json(self, folder, run, command):
        folder.add("acme", probed("Unit()", OLD))
        _, out, _ = run(command, "--json")
        document = json.loads(out)
        shown = document if command == "devices" else document["plugins"][0]
        assert shown["unusable"] == [
            {
                "name": "acme:1",
                "description": "Old card",
                "error": "no kernel image for sm_30",
                "remedy": "install the build for it",
                "replaced_by": "",
            }
        ]


def test_version_asks_no_plugin(folder, run):
    folder.add("acme", "raise SystemExit", value="opweave_acme")
    code, out, err = run("--version")
    assert (code, err) == (0, "")
    assert out == f"opweave {registry.REGISTRY.plugins()[-1].version}\n"
    assert not folder.imported()


@pytest.mark.parametrize("arguments", [["nosuch"], ["devices", "--nosuch"], ["plugins", "extra"]])
def test_a_wrong_call(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_runs_as_a_module():
    for option in ("--version", "-V"):
        done = subprocess.run([sys.executable, "-m", "opweave", option], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("opweave ")


def test_help_has_a_short_option_everywhere(run):
    assert run("-h")[1] == run("--help")[1]
    assert "Usage: opweave devices" in run("devices", "-h")[1]


def test_shells_complete_commands(folder, monkeypatch, capfd):
    """Also those of plugins, in the middle of a line that Python has not been given as arguments."""
    folder.add("greeter", with_command("greet"), value="opweave_greeter")
    environ = {
        **os.environ, "OPWEAVE_BACKEND_PATH": str(folder.path), "OPWEAVE_DISABLE": "cpu,opencl,ort,remote,torch,onnx",
        "_OPWEAVE_COMPLETE": "complete_bash",
    }  # fmt: skip

    def complete(words: str, at: int) -> list[str]:
        done = subprocess.run(
            [Path(sys.executable).with_name("opweave")], capture_output=True, text=True, check=True,
            env={**environ, "COMP_WORDS": words, "COMP_CWORD": str(at)},
        )  # fmt: skip
        return done.stdout.split()

    assert complete("opweave gr", 1) == ["greet"]
    assert {"devices", "doctor"} <= set(complete("opweave ", 1))
    assert complete("opweave devices --feat", 2) == ["--features"]


def test_a_terminal_that_knows_ascii_only_gets_similar_characters(folder, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": np.zeros((2, 3), np.float32)}, path)
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "dumb", "COLUMNS": "20"}
    for arguments in (["weights", str(path)], ["--help"], ["devices"], ["nosuch"]):
        done = subprocess.run(
            [sys.executable, "-m", "opweave", *arguments], capture_output=True, env=environ, check=False
        )
        assert (done.stdout + done.stderr).isascii()
        assert b"Traceback" not in done.stderr
        if arguments[0] == "weights":
            assert b"2x3" in done.stdout
    from opweave.cli.output import _similar

    assert "5 µs × 2 ☃".encode("ascii", "backslashreplace") == b"5 \\xb5s \\xd7 2 \\u2603"
    assert _similar(UnicodeEncodeError("ascii", "5 µ×☃ s", 2, 5, "")) == ("ux\\u2603", 5)


class TestProfile:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch, tmp_path):
        """Measuring takes no time, and every profile is kept in a folder of the test's."""
        monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))
        self.measured: list[str] = []
        self.contention = 0.0

        def measure(device, progress=None):
            self.measured.append(device.name)
            if progress is not None:
                progress("add f32", 0, 1)
            line = Curve.line(2e-6, 4e9)
            return Profile(device.name, 1e-6, line, line, {
                "add": {"f32": OpCost(line)}, "linear": {"f32": OpCost(line, line), "f16": OpCost(line, line)},
            }, contention=self.contention)  # fmt: skip

        monkeypatch.setattr("opweave.cost.measure.measure", measure)

    def test_table(self, folder, run):
        folder.add("acme", backend())
        code, out, err = run("profile", columns=120)
        assert (code, err) == (0, "")
        assert self.measured == ["acme", "host"]
        lines = [line.split() for line in out.splitlines()]
        assert lines[1] == ["acme", "2", "µs", "1", "µs", "4", "GB/s", "4", "GB/s", "/", "4", "GB/s", "4", "Gflop/s"]
        assert "products  f16 4 Gflop/s" in out

    def test_combinations_are_made(self, run):
        code, _, err = run("profile", "combined:host+nosuch")
        assert (code, self.measured) == (1, [])
        assert "there is no device named 'nosuch'" in err

    def test_chosen_devices_are_measured_once_without_refresh(self, folder, run):
        folder.add("acme", backend())
        run("profile", "acme")
        run("profile", "acme")
        assert self.measured == ["acme"]
        run("profile", "acme", "--refresh")
        assert self.measured == ["acme", "acme"]

    def test_what_was_measured_beside_other_programs_is_doubtful(self, folder, run):
        folder.add("acme", backend())
        self.contention = 0.7
        assert "doubtful  other programs used the processors meanwhile" in run("profile", "acme", columns=120)[1]
        assert json.loads(run("profile", "acme", "--json")[1])["profiles"][0]["contention"] == 0.7
        said = " ".join(run("doctor")[1].split())
        assert "profile of acme" in said
        assert "opweave profile --refresh acme" in said
        self.contention = 0.01
        assert "doubtful" not in run("profile", "acme", "--refresh", columns=120)[1]
        assert "profile of acme" not in run("doctor")[1]

    def test_json(self, folder, run, tmp_path):
        folder.add("acme", "print('loading')\n" + backend())
        code, out, err = run("profile", "acme", "--json")
        document = json.loads(out)
        assert (code, err) == (0, "loading\n")
        assert document["folder"] == str(tmp_path / "profiles")
        (acme,) = document["profiles"]
        assert (acme["device"], acme["launch_seconds"], acme["flops"]["f16"]) == ("acme", 2e-6, pytest.approx(4e9))
        assert Profile.from_json(acme["profile"]).device == "acme"

    TUNED = """
        from opweave.contract import Tunable

        Unit.tunables = (Tunable("tile_bytes", 64, (32, 64), list), Tunable("rows", 8, (4, 8), list))
    """

    def test_tunables_are_measured_with_the_profile_and_shown(self, folder, run, monkeypatch):
        def measure(device, progress):
            device.tunables[0].value = 32

        monkeypatch.setattr("opweave.cost.tunables.measure_tunables", measure)
        folder.add("acme", backend(extra=self.TUNED))
        assert "tunables of acme" in run("doctor")[1]
        assert "2 at their defaults, not measured on this machine" in " ".join(run("doctor")[1].split())
        _, out, _ = run("profile", "acme", columns=120)
        assert "tunables  tile_bytes 32 (default 64), rows 8" in out
        run("profile", "acme")
        assert self.measured == ["acme"]
        (acme,) = json.loads(run("profile", "acme", "--json")[1])["profiles"]
        assert acme["tunables"] == {"tile_bytes": 32, "rows": 8}
        assert "measured: tile_bytes 32, rows 8" in " ".join(run("doctor")[1].split())

    def test_a_device_that_is_not_there(self, run):
        code, out, err = run("profile", "cuda:7")
        assert (code, out) == (1, "")
        assert err.startswith("error: there is no device named 'cuda:7'")


GRAPH = """
import opweave as ow
print("making the graph")

def layers(n=40):
    w = ow.weights({str(i): ow.Spec((1024, 1024)) for i in range(n)})
    h = ow.input("x", (16, 1024))
    for i in range(n):
        h = ow.relu(ow.linear(h, w[str(i)]))
    return h
"""

CLUSTER = """
[[group]]
name = "gpu"
count = {count}
flops = 2e13
bandwidth = 2e12
memory = "20 MiB"
"""


class TestWhatIf:
    @pytest.fixture
    def files(self, tmp_path):
        (tmp_path / "graph.py").write_text(GRAPH)

        def files(count: int = 1000) -> tuple[str, str]:
            (tmp_path / "cluster.toml").write_text(CLUSTER.format(count=count))
            return f"{tmp_path / 'graph.py'}:layers", str(tmp_path / "cluster.toml")

        return files

    def test_table(self, run, files):
        code, out, err = run("what-if", *files(), columns=100)
        assert (code, err) == (0, "making the graph\n")
        lines = out.splitlines()
        assert lines[0].split() == ["device", "steps", "busy", "utilization", "memory", "used", "/", "total"]
        assert lines[1].split()[:2] == ["gpu:0", "8"]
        assert lines[1].endswith("16.1 MiB / 20 MiB")
        assert "... 2 more" in out
        assert "one run: " in out
        assert "for 9 copies, inputs and results" in out
        assert "not used: 990 of gpu" in out

    def test_json(self, run, files):
        code, out, _ = run("what-if", *files(), "--json")
        document = json.loads(out)
        assert code == 0
        assert document["groups"] == [{"name": "gpu", "count": 1000}]
        assert [d["name"] for d in document["devices"]] == [f"gpu:{i}" for i in range(10)]
        assert document["seconds"] == pytest.approx(
            sum(d["busy_seconds"] for d in document["devices"]) + document["copy_seconds"]
        )
        assert document["devices"][0]["memory"]["weights"] == 16 << 20

    def test_pipelining_spreads_the_graph(self, run, files):
        plain = json.loads(run("what-if", *files(), "--json")[1])
        spread = json.loads(run("what-if", *files(), "--json", "--pipeline")[1])
        assert len(spread["devices"]) > len(plain["devices"])
        assert spread["interval_seconds"] < plain["interval_seconds"]

    @pytest.mark.parametrize(
        ("code", "says"),
        [
            ("def layers(:", r"graph\.py: SyntaxError: invalid syntax"),
            ("import nosuch_module", r"graph\.py, line 1: ModuleNotFoundError: No module named 'nosuch_module'"),
            ("def layers():\n    raise ValueError('no')", r"graph\.py, line 2: ValueError: no$"),
            ("def layers():\n    return 3", "outputs are a tensor, a sequence or a mapping of tensors, not 3"),
        ],
    )
    def test_a_graph_that_cannot_be_made_is_an_error_that_says_where(
        self, run, files, tmp_path, monkeypatch, code, says
    ):
        _, cluster = files()
        (tmp_path / "graph.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        code, out, err = run("what-if", "graph.py:layers", cluster)
        assert (code, out) == (1, "")
        assert re.search(says, err.strip())
        assert err.startswith("error: ")

    @pytest.mark.parametrize("combined", [False, True])
    def test_steps_are_measured_on_devices_that_groups_are_like(self, run, files, monkeypatch, combined):
        measured: list[tuple[str, set[tuple[int, ...]]]] = []

        def measure(nodes: Iterable[ow.Tensor], device: ow.Device) -> None:
            measured.append((device.name, {node.shape for node in nodes}))
            raise ow.AllocationError("memory of cpu", 1, 0)

        monkeypatch.setattr("opweave.cli.what_if.measure_nodes", measure)
        graph, cluster = files()
        both = f"count = 2\ncombined = {str(combined).lower()}\n"
        Path(cluster).write_text(f'[[group]]\nname = "here"\nlike = "cpu"\n{both}')
        code, _, err = run("what-if", graph, cluster, "--json")
        assert (code, "not measured on cpu, predicted by its profile" in err) == (0, True)
        assert {name for name, _ in measured} == {"cpu"}
        whole, *parts = [shapes for _, shapes in measured]
        assert bool(parts) == combined, "of weights that are split, their parts too"
        assert all(shapes != whole for shapes in parts)
        measured.clear()
        assert run("what-if", graph, cluster, "--json", "--no-measure")[0] == 0
        assert not measured

    def test_too_little_memory_is_said_and_fails(self, run, files):
        code, out, _ = run("what-if", *files(2))
        assert code == 1
        assert "out of memory: 1 of 2 devices" in out
        assert "lacks" in out

    @pytest.mark.parametrize(
        ("graph", "message"),
        [
            ("graph.py", "a graph is given as FILE.py:FUNCTION, not 'graph.py'"),
            ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ],
    )
    def test_graphs_that_are_not_there(self, run, files, graph, message):
        code, out, err = run("what-if", graph, files()[1])
        assert (code, out) == (1, "")
        assert message in err

    def test_functions_and_clusters_that_are_not_there(self, run, files):
        graph, cluster = files()
        assert "did you mean 'layers'?" in run("what-if", graph[:-1], cluster)[2]
        assert "cannot read the cluster file" in run("what-if", graph, cluster + "x")[2]
