"""Devices of other processes: a run takes its inputs and results along, and is waited for once."""

from __future__ import annotations

from typing import Any

import pytest

import opweave as ow
from opweave.graph.opdef import OPS
from opweave_cost import measure as measuring
from tests.support.async_device import AsyncDevice, ThreadStream

TRIP, RATE, START = 1e-4, 1e9, 2e-4


class Clock:
    now = 0.0


class DistantStream(ThreadStream):
    """Waiting takes a round trip, and each byte its time, by `Clock`."""

    reads_ahead = True

    def __init__(self, device: Any, delay: float = 0.0) -> None:
        super().__init__(device, delay)

    def _synchronize(self) -> None:
        Clock.now += TRIP
        super()._synchronize()

    def _upload(self, buffer: Any, offset: int, data: memoryview) -> None:
        Clock.now += len(data) / RATE
        super()._upload(buffer, offset, data)

    def _download(self, buffer: Any, offset: int, out: memoryview) -> None:
        Clock.now += len(out) / RATE
        super()._download(buffer, offset, out)


class DistantDevice(AsyncDevice):
    stream_class = DistantStream

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        Clock.now += TRIP + len(out) / RATE
        super()._download(mem, offset, out)


def test_inputs_and_results_of_a_run_are_predicted_without_round_trips_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(measuring, "OPS", {"add": OPS["add"]})
    monkeypatch.setattr(measuring, "RUNS", (1, 1))
    monkeypatch.setattr(measuring, "seconds_of_step", lambda stream, bound, count=1: START + count * 1e-5)
    device = DistantDevice()
    profile = measuring.measure(device)
    assert profile.ahead == pytest.approx(TRIP)
    size = 1 << 20
    assert profile.upload(size) == pytest.approx(size / RATE)
    assert profile.download(size) == pytest.approx(TRIP + size / RATE)  # of copies to other devices, in mid-run
    device.declared = lambda: profile  # type: ignore[attr-defined]
    x = ow.input("x", (size // 4,))
    with ow.Scheduler(device) as scheduler:
        prediction = scheduler.partition(x + x).predicted
    assert prediction.copies == pytest.approx(2 * size / RATE)
