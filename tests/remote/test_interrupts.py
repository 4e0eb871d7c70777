"""Ctrl-C at any moment of a run loses no byte of a connection: the next run gives its result."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
import opweave_remote
from tests.support.interrupts import interrupted, interrupted_everywhere, needs_timer


@needs_timer
@pytest.mark.parametrize("parallel", [False, True])
def test_interrupted_runs_leave_the_connection_whole(parallel):
    device = opweave_remote.isolated("cpu")
    x = ow.input("x", (64,))
    values = np.arange(64, dtype=np.float32)
    try:
        with ow.Scheduler(device, parallel=parallel) as scheduler:
            program = scheduler.build(x * 3 + 1)

            def check() -> None:
                assert device.alive, device.connection.fate.error
                for _ in range(3):
                    np.testing.assert_array_equal(program.run(x=values), values * 3 + 1)

            check()
            interrupted(150, lambda: program.run(x=values), check, every=1, longest=4e-4)
    finally:
        device.connection.close()


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("size", [64, 1 << 15])  # the latter is sent by a thread
def test_an_interrupt_after_any_call_of_a_run_leaves_the_connection_whole(fetched, size):
    device = opweave_remote.isolated("cpu")
    x = ow.input("x", (size,))
    values = np.arange(size, dtype=np.float32)
    devices: list[ow.Device | str] = [device, "cpu"] if fetched else [device]
    pins: dict[ow.Tensor, ow.Device | str] = {x * 3: device, x * 3 + 1: "cpu"} if fetched else {}
    try:
        with ow.Scheduler(devices) as scheduler:
            program = scheduler.build(x * 3 + 1, pins=pins)

            def check() -> None:
                assert device.alive, device.connection.fate.error
                np.testing.assert_array_equal(program.submit(x=values).result(30), values * 3 + 1)

            check()
            assert (
                interrupted_everywhere(lambda: program.run(x=values), check) > 20
            )  # fewer where a thread takes the answer
    finally:
        device.connection.close()


@needs_timer
def test_interrupted_compressed_uploads_leave_the_connection_whole(monkeypatch):
    device = opweave_remote.isolated("cpu")
    monkeypatch.setattr(device.connection.packing, "rate", lambda: 1e4)
    x = ow.input("compressed", (1 << 18,))
    values = np.arange(1 << 18, dtype=np.float32)
    block = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8)
    try:
        with ow.Scheduler(device) as scheduler, device.alloc(block.nbytes) as buffer:
            program = scheduler.build(ow.max(x) + 1)

            def both() -> None:
                buffer.upload(0, block)
                program.run({x: values})

            def check() -> None:
                assert program.submit({x: values}).result(30) == 1 << 18
                buffer.upload(0, block)
                np.testing.assert_array_equal(buffer.read(), block)

            check()
            interrupted(60, both, check, every=5, longest=1e-2)
            assert device.connection.packing.packed > 0
    finally:
        device.connection.close()
