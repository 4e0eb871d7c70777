"""Commands beside plugins that crash, exit, hang or write to standard output: each is named, the others are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.plugins_for_tests import backend, write_distribution

DEATHS = {
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
    "aborts": ("import os\nos.abort()", "crashed with SIGABRT"),
    "exits": ("import os\nos._exit(0)", "ended the process with exit status 0"),
    "hangs": ("import time\ntime.sleep(1000)", "did not answer within 4 s"),
}
CLUSTER = """
[[group]]
name = "npu"
flops = 1e12
bandwidth = 1e11
"""
NOISE = """
import atexit, os
print("printed")
os.write(1, b"written\\n")
atexit.register(os.write, 1, b"at exit\\n")
"""


def run_in(site, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, beside the plugins in the folder ``site`` and no others."""
    environ = {
        **os.environ,
        "OPWEAVE_BACKEND_PATH": str(site),
        "OPWEAVE_DISABLE": "combine,cpu,models,onnx,opencl,ort,remote,torch,training",
        "COLUMNS": "120",
    }
    return subprocess.run(
        [sys.executable, "-m", "opweave", *arguments],
        capture_output=True, text=True, timeout=100, env=environ, check=False,
    )  # fmt: skip


@pytest.fixture
def opweave(tmp_path):
    """`run_in` the folder ``tmp_path / "site"``."""
    return partial(run_in, tmp_path / "site")


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("source", "why"), DEATHS.values(), ids=DEATHS)
def test_a_plugin_that_takes_its_process_down_is_named(tmp_path, source, why):
    def run(where: str) -> subprocess.CompletedProcess[str]:
        site = tmp_path / where
        bad = source if where == "import" else backend(body=source.replace("\n", "; "))
        write_distribution(site, "bad", bad)
        write_distribution(site, "good", backend("[Unit(), Unit()]"))
        return run_in(site, "plugins", "--json", *(["--timeout", "4"] if "4 s" in why else []))

    with ThreadPoolExecutor() as pool:
        for done in pool.map(run, ("import", "devices")):
            plugins = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
            assert done.returncode == 0
            assert plugins["good"]["devices"] == ["good:0", "good:1"]
            assert plugins["bad"]["state"] == "broken"
            assert why in plugins["bad"]["error"]
            assert "OPWEAVE_DISABLE=bad" in plugins["bad"]["remedy"]
            assert "each plugin is asked in a process of its own" in done.stderr


@pytest.mark.timeout(200)
def test_devices_and_doctor_go_on_too(opweave, tmp_path):
    write_distribution(tmp_path / "site", "bad", DEATHS["exits"][0])
    write_distribution(tmp_path / "site", "good")
    devices = opweave("devices", "--isolated")
    assert devices.returncode == 0
    assert "good" in devices.stdout
    assert "without devices: bad (broken)" in devices.stdout
    assert "each plugin" not in devices.stderr, "it was asked for"
    doctor = opweave("doctor", "--json")
    assert doctor.returncode == 1
    wrong = [d for d in json.loads(doctor.stdout)["diagnoses"] if d["status"] == "wrong"]
    assert [d["about"] for d in wrong] == ["plugin bad"]
    assert "exit status 0" in wrong[0]["message"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", [("plugins",), ("devices",), ("doctor",), ("profile", "noisy")])
def test_what_plugins_print_is_not_in_the_document(opweave, tmp_path, command, monkeypatch):
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))
    write_distribution(tmp_path / "site", "noisy", NOISE + backend())
    done = opweave(*command, "--json")
    assert json.loads(done.stdout)["opweave"]
    assert done.stderr.count("printed") == done.stderr.count("written") == 1


@pytest.mark.timeout(200)
def test_what_dies_only_together_is_said(opweave, tmp_path):
    source = "import os, sys\nif 'opweave_one' in sys.modules: os._exit(3)\n" + backend()
    write_distribution(tmp_path / "site", "one")
    write_distribution(tmp_path / "site", "two", source)
    done = opweave("plugins")
    assert done.returncode == 1
    assert "exit status 3, and no plugin does so alone" in done.stderr


@pytest.mark.timeout(200)
def test_the_help_goes_on_too(opweave, tmp_path):
    hello = "@hookimpl\ndef opweave_cli(app):\n    @app.command()\n    def hello(): 'Greet.'\n"
    write_distribution(tmp_path / "site", "bad", DEATHS["exits"][0], value="opweave_bad")
    write_distribution(tmp_path / "site", "good", backend(extra=hello), value="opweave_good")
    done = opweave("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "hello" in done.stdout
    assert "no commands from plugin 'bad': it ended the process with exit status 0" in done.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("where", ["import", "devices"])
def test_commands_that_use_devices_themselves_go_on_too(opweave, tmp_path, monkeypatch, where):
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path / "profiles"))
    exits = DEATHS["exits"][0]
    write_distribution(
        tmp_path / "site", "bad", backend(body=exits.replace("\n", "; ")) if where == "devices" else exits
    )
    write_distribution(tmp_path / "site", "good")
    why = "without plugin 'bad': it ended the process with exit status 0"
    graph = tmp_path / "graph.py"
    graph.write_text("import opweave as ow\ndef outputs():\n    ow.devices()\n    return ow.exp(ow.input('x', (4,)))\n")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    done = opweave("what-if", f"{graph}:outputs", str(cluster), "--json")
    assert json.loads(done.stdout)["seconds"] > 0
    assert why in done.stderr
    for command in (("profile", "bad"), ("conformance", "bad", "--level", "0")):
        done = opweave(*command)
        assert done.returncode == 1
        assert why in done.stderr
        assert "OPWEAVE_DISABLE=bad" in done.stderr, "the error of asking for it"


@pytest.mark.timeout(200)
def test_the_commands_of_plugins_go_on_too(opweave, tmp_path):
    hello = "@hookimpl\ndef opweave_cli(app):\n    @app.command()\n    def hello(): print('Greetings')\n"
    write_distribution(tmp_path / "site", "bad", DEATHS["exits"][0], value="opweave_bad")
    write_distribution(tmp_path / "site", "good", backend(extra=hello), value="opweave_good")
    done = opweave("hello")
    assert done.stdout.splitlines() == ["Greetings"]
    assert "no commands from plugin 'bad': it ended the process with exit status 0" in done.stderr


@pytest.mark.timeout(200)
def test_weights_are_listed_too_and_no_devices_are_looked_for(opweave, tmp_path):
    write_distribution(tmp_path / "site", "bad", DEATHS["exits"][0], value="opweave_bad")
    write_distribution(tmp_path / "site", "deadly", backend(body=DEATHS["exits"][0].replace("\n", "; ")))
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "w.safetensors")
    done = opweave("weights", str(tmp_path / "w.safetensors"), "--json")
    assert [tensor["name"] for tensor in json.loads(done.stdout)["tensors"]] == ["w"]
    assert "without plugin 'bad': it ended the process with exit status 0" in done.stderr
    assert "deadly" not in done.stderr
