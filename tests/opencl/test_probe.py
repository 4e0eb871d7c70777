"""A device is tried with kernels whose results are compared with NumPy's, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pyopencl as cl
import pytest

from opweave.errors import Unavailable
from opweave_opencl import health, probe
from opweave_opencl.probe import SOURCE, TIMEOUT, WORKS, in_process
from opweave_opencl.program import source
from tests.support.opencl import anew


def child(monkeypatch, doing: str) -> None:
    """Have the process that tries a device do this instead of running kernels."""
    start = "import json, os, signal, sys, time; sys.stdin.read()"
    start += "; say = lambda **told: os.write(1, json.dumps(told).encode() + bytes([10]))"
    monkeypatch.setattr(probe, "_START", f"{start}\n{doing}")


@pytest.fixture
def never_here(monkeypatch):
    """Fails where the device is tried in this process."""
    monkeypatch.setattr(probe, "in_process", lambda device: pytest.fail("it was tried in this process"))


# --- what is tried ----------------------------------------------------------------------------------------------------


def test_drivers_that_work_give_the_right_results(device):
    assert in_process(device.cl_device) == WORKS


def test_there_as_here(device, never_here):
    assert probe.probe(device.cl_device) == WORKS


# One change for each kernel, as a compiler might get it wrong.
FAULTS = {
    "conversions": ("convert_char16(vload16(i, x))", "(char16)(0)"),
    "comparisons": ("> (float16)(0)", ">= (float16)(-3)"),
    "choices": ("a < convert_float16(b)", "a.s0123456701234567 < convert_float16(b)"),
    "functions": ("exp(a * 0.125f)", "exp(a * 0.13f)"),
    "sums": ("barrier(CLK_LOCAL_MEM_FENCE);\n        if (me < left)", "if (me + 1 < left)"),
}


@pytest.mark.parametrize("kernel", FAULTS)
def test_each_wrong_result_is_told_with_its_kernel(device, monkeypatch, kernel):
    right, wrong = FAULTS[kernel]
    text = source(SOURCE)
    assert right in text
    monkeypatch.setattr(probe, "source", lambda file: text.replace(right, wrong))
    why, lasting = in_process(device.cl_device)
    assert why.startswith("it computes wrong results: ")
    assert f"of the kernel '{kernel}', first " in why
    assert lasting


# --- what happens to the process --------------------------------------------------------------------------------------

BUILDING = "say(doing='building kernels')"


def test_a_crash_is_told_with_the_signal_and_what_the_driver_said(device, monkeypatch, never_here):
    words = (
        "print('2 warnings generated', 'LLVM ERROR: no such operand', 'bye', sep=chr(10), file=sys.stderr, flush=True)"
    )
    child(monkeypatch, f"{BUILDING}; {words}; os.kill(os.getpid(), signal.SIGSEGV)")
    why, lasting = probe.probe(device.cl_device)
    assert why == "its driver crashes (SIGSEGV) when building kernels: LLVM ERROR: no such operand"
    assert lasting


def test_an_exit_is_told_with_its_status(device, monkeypatch, never_here):
    child(monkeypatch, f"{BUILDING}; os._exit(3)")
    assert probe.probe(device.cl_device).why == "its driver ends the process with exit status 3 when building kernels"


def test_a_hang_ends_after_the_time_limit(device, monkeypatch, never_here):
    monkeypatch.setenv(TIMEOUT, "1")
    child(monkeypatch, f"{BUILDING}; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)")
    start = time.monotonic()
    why, lasting = probe.probe(device.cl_device)
    assert why == "it hangs: building kernels did not end within 1 s (OPWEAVE_OPENCL_PROBE_TIMEOUT)"
    assert lasting
    assert time.monotonic() - start < 10


def test_what_drivers_print_is_not_taken_for_an_answer(device, monkeypatch, never_here):
    child(monkeypatch, f"{BUILDING}; os.write(1, b'warning: ...' + bytes([10])); os.kill(os.getpid(), signal.SIGABRT)")
    assert probe.probe(device.cl_device).why == "its driver crashes (SIGABRT) when building kernels"


@pytest.mark.parametrize(
    "doing",
    [
        "raise SystemExit(1)",  # it lacks a package, or finds no such device
        "pass",
        "say(doing='opening a context'); say(why='it opens no context: in use', lasting=False)",
    ],
)
def test_a_process_that_could_not_try_leaves_it_to_this_one(device, monkeypatch, doing):
    child(monkeypatch, doing)
    assert probe.probe(device.cl_device) == WORKS


@pytest.mark.parametrize("executable", ["", "/opt/blender/blender", "/nowhere/python3"])
def test_where_python_cannot_be_started_it_is_tried_here(device, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert probe.probe(device.cl_device) == WORKS


def test_a_frozen_program_is_not_started_again(device, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: pytest.fail("it was started"))
    assert probe.probe(device.cl_device) == WORKS


def test_the_limit_is_a_number_of_seconds(monkeypatch):
    for value, seconds in [("", 120), ("5", 5), ("0", 0), ("-1", 0), ("soon", 120), ("nan", 120), ("inf", 120)]:
        monkeypatch.setenv(TIMEOUT, value)
        assert probe.limit() == seconds


# --- what users see ---------------------------------------------------------------------------------------------------


def test_such_a_device_is_refused_with_a_remedy_and_remembered(device, monkeypatch, tmp_path):
    monkeypatch.setattr(health, "_KNOWN", {})
    monkeypatch.setattr(health, "SLOW", 0.0)  # a quick machine has started and lost the child sooner
    monkeypatch.setenv("OPWEAVE_OPENCL_CACHE", str(tmp_path))
    child(monkeypatch, f"{BUILDING}; os.kill(os.getpid(), signal.SIGILL)")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"its driver crashes \(SIGILL\) when building kernels") as told:
            anew(device).probe()
        assert told.value.remedy.startswith("update the driver")
        monkeypatch.setattr(health, "_KNOWN", {})
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: pytest.fail("it was tried again"))


def test_errors_of_the_driver_do_not_name_pyopencl(device, monkeypatch):
    error = cl.RuntimeError(
        "clBuildProgram failed: X\n\nBuild on <pyopencl.Device 'x'>:\n\nerror: a  b\n\n(options: -I)"
    )
    monkeypatch.setattr(probe, "compiled", lambda *args: (_ for _ in ()).throw(error))
    assert in_process(device.cl_device) == ("it builds no kernel: error: a b", True)


def test_signals_have_names_or_numbers():
    assert probe._how(-signal.SIGSEGV) == "crashes (SIGSEGV)"
    assert probe._how(-200) == "crashes (signal 200)"
