"""`Card`: what it asks of ``torch.cuda``, with a stand-in that notes the calls and keeps torch's signatures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("opweave_torch")

import torch

from benchmarks.card.hardware import Card, StandIn, hardware


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    clock, queues = iter(range(100)), iter(range(100))

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing, "events without timing have no times"

        def record(self, stream: Any) -> None:
            self.at = next(clock)
            found.append(f"record on {stream}")

        def synchronize(self) -> None:
            found.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert found[-1] == "wait", "times are known when the second event was reached"
            return 2.0 * (end.at - self.at)  # milliseconds

    class CUDAGraph:
        def replay(self) -> None:
            found.append("replay")

    @contextmanager
    def stream(queue: Any) -> Iterator[None]:
        found.append(f"on {queue}")
        yield
        found.append("off")

    @contextmanager
    def graph(cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        found.append(f"capture on {stream}")
        yield
        found.append("captured")

    memory = iter([1000, 1000, 5000])
    doubles: dict[str, Any] = {
        "Event": Event, "CUDAGraph": CUDAGraph, "stream": stream, "graph": graph,
        "Stream": lambda device: f"queue {next(queues)} of {device}",
        "current_stream": lambda device: "the current queue",
        "synchronize": lambda device: found.append("synchronize"),
        "memory_allocated": lambda device: next(memory),
        "reset_peak_memory_stats": lambda device: found.append("reset"),
        "max_memory_allocated": lambda device: 9000,
        "memory_stats": lambda device: {"allocation.all.allocated": 17},
        "get_device_properties": lambda device: SimpleNamespace(
            name="a card", total_memory=80, multi_processor_count=132, major=9, minor=0
        ),
    }  # fmt: skip
    for name, double in doubles.items():
        if inspect.isfunction(double) and inspect.isfunction(getattr(torch.cuda, name)):
            theirs = inspect.signature(getattr(torch.cuda, name)).parameters
            assert list(inspect.signature(double).parameters)[:1] == list(theirs)[:1] or name == "stream"
        monkeypatch.setattr(torch.cuda, name, double)
    return found


def test_seconds_are_those_between_two_events_on_a_queue(log):
    card = Card("cuda:0")
    assert card.seconds(lambda: log.append("run"), "a queue") == 2e-3
    assert log == ["record on a queue", "run", "record on a queue", "wait"]
    del log[:]
    card.seconds(lambda: None)
    assert log[0] == "record on the current queue"


def test_a_graph_is_captured_on_another_queue_than_it_is_warmed_up_on(log):
    """So that the workspaces of libraries are memory of the graph."""
    replay = Card("cuda:0").captured(lambda: log.append("work"))
    assert log == [
        "on queue 0 of cuda:0", *["work"] * 3, "off", "synchronize", "capture on queue 1 of cuda:0", "work", "captured",
    ]  # fmt: skip
    replay()
    assert log[-1] == "replay"


def test_memory_is_that_above_what_was_there(log):
    card = Card("cuda:0")
    assert card.taken() == 1000
    assert card.peak(lambda: log.append("run")) == 8000
    assert log == ["synchronize", "reset", "run", "synchronize"]
    assert card.allocations() == 17


def test_facts_name_the_card(log):
    facts = Card("cuda:0").facts()
    assert facts["card"] == "a card"
    assert facts["capability"] == "9.0"


def test_other_devices_have_a_stand_in():
    assert isinstance(hardware("torch:cpu"), StandIn)
    assert isinstance(hardware("torch:cuda:0"), Card)
    with torch.inference_mode():
        assert hardware("torch:cpu").launches(lambda: torch.ones(3) + 1)["functions of torch"] > 0
