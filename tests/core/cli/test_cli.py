"""The ``opweave`` command: what it prints, to whom, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from opweave import registry
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
        folder.add("hooks", with_command("greet"), value="opweave_hooks")
        (row,) = [line.split() for line in run("plugins")[1].splitlines() if line.startswith("hooks ")]
        assert row[-2:] == ["ready", "-"], "a plugin of commands is no backend without devices"
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

    @pytest.mark.parametrize(
        ("command", "package"),
        [
            ("conformance", "opweave-conformance"), ("fuzz", "opweave-conformance"), ("profile", "opweave-cost"),
            ("what-if", "opweave-cost"),
        ],
    )  # fmt: skip
    def test_commands_that_became_packages_name_them(self, run, command, package):
        code, out, err = run(command, "cpu")
        assert (code, out) == (2, "")
        assert f"remedy: {pip_install(package)};" in err

    def test_are_added(self, folder, run):
        folder.add("greeter", with_command("greet"), value="opweave_greeter")
        folder.add("second", with_command("wave"), value="opweave_second")
        assert run("greet") == (0, "hello from greet\n", "")
        assert run("wave") == (0, "hello from wave\n", "")
        code, out, _ = run("--help")
        assert code == 0
        assert all(command in out for command in ("devices", "plugins", "greet", "wave"))

    def test_of_the_group_of_hooks_stay_where_backends_are_selected(self, folder, run):
        points = "[opweave.hooks]\n{0} = opweave_{0}\n"
        folder.add("greeter", with_command("greet"), value="opweave_greeter")
        folder.add("tool", with_command("wave"), entry_points=points.format("tool"))
        folder.add("acme")
        assert run("wave", OPWEAVE_BACKENDS="acme") == (0, "hello from wave\n", "")
        assert run("greet", OPWEAVE_BACKENDS="acme")[0] == 2
        assert run("wave", OPWEAVE_DISABLE="tool")[0] == 2

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

    def test_have_the_devices_that_plugins_make(self, folder, run):
        made = "@hookimpl\ndef opweave_make_devices(names):\n    opweave.device('nosuch')\n"
        folder.add("acme", f"import opweave\n{with_command('greet')}{made}", value="opweave_acme")
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
