"""`opweave_cost.trace`: a timeline for each stream in Chrome's format."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.runtime.host.device import HostDevice
from opweave.tracing import TRACE
from tests.support.devices import Separate

F = np.float32


def build(scheduler: ow.Scheduler) -> ow.Program:
    x = ow.input("x", (256,))
    first = ow.neg(x)
    return scheduler.build(ow.exp(first), pins={first: "a", ow.exp(first): "hostdevice"})


@pytest.mark.parametrize("parallel", [False, True])
def test_every_stream_has_a_track_with_its_splits_and_copies(tmp_path, parallel):
    path = tmp_path / "t.json"
    with ow.Scheduler([HostDevice(), Separate("a")], parallel=parallel) as scheduler:
        program = build(scheduler)
        with opweave_cost.trace(path):
            for future in [program.submit(x=np.ones(256, F)) for _ in range(3)]:
                future.result(10)
            scheduler.synchronize()
    rows = json.loads(path.read_text())["traceEvents"]
    tracks = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert set(tracks.values()) >= {"hostdevice", "a"}
    spans = [row for row in rows if row["ph"] == "X"]
    assert all(row["ts"] >= 0 and row["dur"] >= 0 and row["tid"] in tracks for row in spans)
    plans = [row for row in spans if row["cat"] == "plan"]
    assert sorted(tracks[row["tid"]] for row in plans) == ["a"] * 3 + ["hostdevice"] * 3
    copies = [row for row in spans if row["cat"] == "copy" and "cause" in row["args"]]
    assert {row["args"]["bytes"] for row in copies} == {1024}
    for track in tracks:
        own = sorted((r["ts"], r["ts"] + r["dur"]) for r in plans if r["tid"] == track)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(own)), "a queue"


def test_steps_are_recorded_when_asked_for():
    with ow.Scheduler(HostDevice()) as scheduler:
        x = ow.input("x", (256,))
        program = scheduler.build(ow.exp(ow.neg(x)))
        with opweave_cost.trace(steps=True) as timeline:
            program.run(x=np.ones(256, F))
        assert [e.data["op"] for e in timeline.events if e.kind == "step"] == ["neg", "exp"]
        with opweave_cost.trace() as timeline:
            program.run(x=np.ones(256, F))
        assert [e.kind for e in timeline.events] == ["plan"]
        assert not TRACE.listening
        assert not TRACE.detailed


def test_memory_is_counted():
    with opweave_cost.trace() as timeline:
        buffer = HostDevice().alloc(4096)
        buffer.free()
    counters = [row for row in timeline.to_json()["traceEvents"] if row["ph"] == "C"]
    assert [row["args"]["bytes"] for row in counters] == [4096, 0]


def test_what_was_recorded_is_written_also_when_the_block_fails(tmp_path):
    path = tmp_path / "t.json"

    def fail() -> None:
        HostDevice().alloc(64).free()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), opweave_cost.trace(path):
        fail()
    assert len(json.loads(path.read_text())["traceEvents"]) >= 2


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    ran = []
    with (
        pytest.raises(ow.PathError, match=r"no folder .*nowhere; make it first"),
        opweave_cost.trace(tmp_path / "nowhere" / "t.json"),
    ):
        ran.append(1)
    with pytest.raises(ow.PathError, match="is a folder"), opweave_cost.trace(tmp_path):
        ran.append(1)
    with pytest.raises(ow.PathError, match="path of a file"), opweave_cost.trace(3):  # type: ignore[arg-type]
        ran.append(1)
    assert not list(tmp_path.iterdir())
    assert ran == []
