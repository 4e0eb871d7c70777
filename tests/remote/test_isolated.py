"""A device in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from opweave.errors import DeviceLostError, ExecutionError, UnknownNameError
from opweave_remote.server import worker
from tests.support.remote import stop_process

F32 = np.float32


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def run_until_it_fails(program, values):
    for _ in range(1000):
        program.run(x=values)


def test_it_computes_there_and_its_process_ends_with_it():
    before = children()
    device = opweave_remote.isolated("cpu")
    (process,) = children() - before
    x = ow.input("x", (5,))
    with ow.Scheduler(device) as scheduler:
        np.testing.assert_array_equal(scheduler.build(x * 2).run(x=np.arange(5, dtype=F32)), np.arange(5) * 2)
    device.connection.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{process}").exists()
    with pytest.raises(DeviceLostError, match="was closed"):
        device.alloc(10)


def test_a_crash_there_is_an_error_here_that_names_the_signal():
    before = children()
    device = opweave_remote.isolated("cpu")
    (process,) = children() - before
    x = ow.input("x", (5,))
    with ow.Scheduler([device, "cpu"]) as scheduler:
        program = scheduler.build(x * 2)
        program.run(x=np.zeros(5, F32))
        os.kill(int(process), signal.SIGSEGV)
        with pytest.raises((DeviceLostError, ExecutionError), match="SIGSEGV"):
            run_until_it_fails(program, np.zeros(5, F32))
        rest = scheduler.without(device)
    with rest:
        np.testing.assert_array_equal(rest.build(x * 2).run(x=np.ones(5, F32)), np.full(5, 2))


def test_a_process_that_is_stopped_is_lost():
    before = children()
    device = opweave_remote.isolated("cpu", deadline=1)
    (process,) = children() - before
    stop_process(int(process))
    start = time.monotonic()
    with pytest.raises(DeviceLostError, match="stopped"):
        device.alloc(10)
    assert time.monotonic() - start < 5


def test_a_process_that_is_stopped_ends_with_the_one_that_started_it():
    program = """if True:
        import opweave_remote
        from tests.support.remote import stop_process
        from tests.remote.test_isolated import children

        before = children()
        device = opweave_remote.isolated("cpu")
        (process,) = children() - before
        stop_process(int(process))
        print(process)
    """
    said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=True).stdout
    assert not Path(f"/proc/{int(said)}").exists()


def test_files_of_the_current_folder_are_not_executed_there(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('this is not NumPy')")
    monkeypatch.chdir(tmp_path)
    device = opweave_remote.isolated("cpu")
    assert device.mem_info()[1] > 0
    device.connection.close()


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UnknownNameError, match="nope"):
        opweave_remote.isolated("nope")
    assert worker.shown_devices(["cpu", "cpu"]) == [ow.device("cpu")]
