"""Devices on which a driver builds or runs no kernel are detected once, with the driver's message as the reason."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
import pytest

from opweave.errors import Unavailable
from opweave.packages import pip_install
from opweave.registry import Registry
from opweave_opencl import OpenCLBackend, health, probe
from opweave_opencl.caching import BinaryCache
from opweave_opencl.health import RETRY, why_unusable
from opweave_opencl.probe import TIMEOUT, Verdict
from opweave_opencl.properties import identity, remedy_for
from tests.support.opencl import anew

LOG = "clBuildProgram failed: BUILD_PROGRAM_FAILURE\n\nBuild on <pyopencl.Device 'x'>:\n\nerror: unknown target CPU\n\n"


@pytest.fixture
def answers(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "_KNOWN", {})
    monkeypatch.setenv(TIMEOUT, "0")  # in this process, where the tests stand in for the driver
    return BinaryCache(tmp_path / "cache")


@pytest.fixture
def tries(monkeypatch):
    """Counts how often kernels are built from here on; set ``error`` to have the compiler fail."""
    counted = SimpleNamespace(count=0, error=None)
    real: Any = vars(probe)["compiled"]

    def compiled(*args: Any) -> cl.Program:
        counted.count += 1
        if counted.error:
            raise counted.error
        return real(*args)

    monkeypatch.setattr(probe, "compiled", compiled)
    return counted


def forget(monkeypatch):
    """As another process would begin."""
    monkeypatch.setattr(health, "_KNOWN", {})


def entries(answers):
    return [path for path in answers.folder.iterdir() if not path.name.startswith(".")]


def test_a_device_that_works_is_tried_once_for_all_processes(device, answers, tries, monkeypatch):
    for _ in range(3):
        assert why_unusable(device.cl_device, answers) is None
        forget(monkeypatch)
    assert tries.count == 1


def test_what_is_remembered_costs_a_few_milliseconds(device, answers, monkeypatch):
    why_unusable(device.cl_device, answers)
    times = []
    for _ in range(5):
        forget(monkeypatch)
        start = time.perf_counter()
        why_unusable(device.cl_device, answers)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01


def test_a_compiler_that_fails_slowly_is_quoted_and_tried_again_after_an_hour(device, answers, tries, monkeypatch):
    monkeypatch.setattr(health, "SLOW", 0)
    tries.error = cl.RuntimeError(LOG)
    for _ in range(2):
        assert why_unusable(device.cl_device, answers) == "it builds no kernel: error: unknown target CPU"
        forget(monkeypatch)
    assert tries.count == 1
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + RETRY + 1)
    tries.error = None
    assert why_unusable(device.cl_device, answers) is None
    assert tries.count == 2


def test_a_compiler_that_fails_quickly_is_tried_by_each_process(device, answers, tries, monkeypatch):
    monkeypatch.setattr(health, "SLOW", 1000)
    tries.error = cl.RuntimeError(LOG)
    assert why_unusable(device.cl_device, answers) == "it builds no kernel: error: unknown target CPU"
    tries.error = None
    assert why_unusable(device.cl_device, answers) is None


def test_other_failures_may_pass_and_are_not_remembered(device, answers, tries, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cl, "Context", lambda devices: (_ for _ in ()).throw(cl.RuntimeError("clCreateContext: busy")))
        assert why_unusable(device.cl_device, answers) == "it opens no context: clCreateContext: busy"
    assert why_unusable(device.cl_device, answers) is None


def test_a_device_that_computes_nonsense(device, answers, monkeypatch):
    monkeypatch.setattr(cl, "enqueue_copy", lambda queue, out, mem: out.fill(0))
    why = why_unusable(device.cl_device, answers)
    assert why == ("it computes wrong results: 1020 of 1024 of the kernel 'conversions', first 0 instead of -110")


@pytest.mark.parametrize("answer", [b"", b"nonsense", b"[]", b'{"why": "old"}', b'{"why": 1, "time": "x"}', b"\xff"])
def test_damaged_answers_are_as_good_as_none(device, answers, tries, answer):
    why_unusable(device.cl_device, answers)
    (entry,) = entries(answers)
    answers.store(entry.name, answer)
    health._KNOWN.clear()
    assert why_unusable(device.cl_device, answers) is None
    assert tries.count == 2


def test_another_driver_version_or_processor_is_asked_anew(device, answers, tries, monkeypatch):
    why_unusable(device.cl_device, answers)
    monkeypatch.setattr(health, "identity", lambda device: (*identity(device)[:-1], "another version"))
    why_unusable(device.cl_device, answers)
    monkeypatch.setattr(health, "processor", lambda: ("model: another",))
    why_unusable(device.cl_device, answers)
    assert tries.count == 3
    assert len([json.loads(answers.load(path.name) or b"") for path in entries(answers)]) == 3


def test_remedies_name_another_driver(monkeypatch):
    def on(platform: str, kind: Any) -> Any:
        return SimpleNamespace(
            platform=SimpleNamespace(name=platform, vendor="Acme Inc."), type=kind, host_unified_memory=False
        )

    monkeypatch.setattr("opweave_opencl.properties.packaged", list)
    assert pip_install("opweave-opencl[intel]") in remedy_for(on("Portable Computing Language", cl.device_type.CPU))
    monkeypatch.setattr("opweave_opencl.properties.packaged", lambda: ["libintelocl.so"])
    assert "installed too" in remedy_for(on("Portable Computing Language", cl.device_type.CPU))
    assert pip_install("opweave-opencl[pocl]") in remedy_for(on("Intel(R) OpenCL", cl.device_type.CPU))
    assert remedy_for(on("Acme CL", cl.device_type.GPU)) == "update the driver of Acme Inc."


def test_such_devices_are_listed_and_the_others_go_on(device, monkeypatch):
    bad, good = anew(device), anew(device)
    bad.id, good.id = "0", "1"
    why = "it builds no kernel: error: unknown target CPU"
    monkeypatch.setattr("opweave_opencl.device.why_unusable", lambda found: why if found is bad.cl_device else None)

    class Both(OpenCLBackend):
        name = "opencl"

        def devices(self):
            return [bad, good]

    registry = Registry(environ={}, search=[])
    registry.register(Both)
    assert [d.name for d in registry.devices()] == ["opencl:1", "host"]
    with pytest.raises(Unavailable, match=f"opencl:0 does not work: {why}"):
        registry.device("opencl:0")
    assert registry.device("opencl") is good


def test_the_context_of_the_platform_is_made_without_it(device, monkeypatch):
    bad = anew(device)
    monkeypatch.setattr("opweave_opencl.device.why_unusable", lambda device: "no")
    with pytest.raises(Unavailable):
        bad.probe()
    assert bad.cl_device not in bad._contexts._devices


# --- at the same time -------------------------------------------------------------------------------------------------


def test_of_threads_that_ask_at_the_same_time_one_tries(device, answers, monkeypatch):
    tried: list[Any] = []

    def slowly(found: Any, trial: Any) -> Verdict:
        tried.append(found)
        time.sleep(0.2)
        return Verdict("", True)

    monkeypatch.setattr(health, "probe", slowly)
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda _: why_unusable(device.cl_device, answers), range(8))] == [None] * 8
    assert len(tried) == 1


ASK = """
import sys, time
from pathlib import Path
from opweave_opencl import health
from opweave_opencl.caching import BinaryCache
from opweave_opencl.discovery import find_devices
from opweave_opencl.probe import Verdict

def slowly(device, trial):
    with open(sys.argv[1] + "/tried", "a") as file:
        file.write("x")
    time.sleep(3)
    return Verdict("it hangs", True)

health.probe = slowly
print(health.why_unusable(find_devices()[0].device, BinaryCache(Path(sys.argv[1]) / "cache")))
"""


def test_of_processes_that_ask_at_the_same_time_one_tries(tmp_path):
    command = [sys.executable, "-c", ASK, str(tmp_path)]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0].strip() for process in asking] == ["it hangs"] * 3
    assert (tmp_path / "tried").read_text() == "x"


def test_whoever_tries_for_too_long_is_not_waited_for(device, answers, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "0.1")
    monkeypatch.setattr(health, "probe", lambda device, trial: Verdict("", True))
    with health._alone(answers.folder):
        assert why_unusable(device.cl_device, answers) is None


def test_a_folder_that_cannot_be_written_does_not_matter(device, answers, tmp_path):
    (tmp_path / "file").write_text("")
    assert why_unusable(device.cl_device, BinaryCache(tmp_path / "file" / "cache")) is None
