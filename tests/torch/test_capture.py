"""`CapturedPlan`, with stand-ins for torch's graphs and queues: what is captured, where, and what happens instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opweave.contract import Step
from opweave_torch.capture import CapturedPlan
from opweave_torch.native import inference_mode


class Cuda:
    """What plans use of ``torch.cuda``. While a graph is captured, calls add their work to it and compute nothing."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "the stream's queue"
        self.captured: list[Callable[[], None]] | None = None
        self.fails_at_begin = False

    @contextmanager
    def stream(self, queue: str) -> Iterator[None]:
        before, self.current = self.current, queue
        yield
        self.current = before

    def launch(self, work: Callable[[], None]) -> None:
        if self.captured is None:
            work()
        else:
            self.captured.append(work)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            if found.fails_at_begin:
                raise RuntimeError("another thread captures")
            inference = torch.is_inference_mode_enabled()
            found.log.append(f"begin on {found.current}, {pool}, {capture_error_mode}, inference {inference}")
            self.work: list[Callable[[], None]] = []
            found.captured = self.work

        def capture_end(self) -> None:
            found.log.append(f"end on {found.current}")
            found.captured = None

        def replay(self) -> None:
            found.log.append(f"replay on {found.current}")
            for work in self.work:
                work()

    for name, value in {
        "CUDAGraph": Graph, "synchronize": lambda target: None, "graph_pool_handle": lambda: "the pool",
        "stream": found.stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return found


@pytest.fixture
def stream() -> Any:
    return SimpleNamespace(target="cuda:0", pool=None, capturing="a queue for capturing")


def step(op: str) -> Step:
    return Step(op, None, (), {}, True, op)  # type: ignore[arg-type]


def plan(cuda: Cuda, stream: Any, *ops: str) -> tuple[CapturedPlan, list[str], list[str]]:
    """The plan, the operations that were computed, and those that the host called."""
    computed: list[str] = []
    called: list[str] = []

    def call(op: str) -> Callable[[], None]:
        def run() -> None:
            called.append(op)
            cuda.launch(lambda: computed.append(op))

        return run

    return CapturedPlan(stream, [call(op) for op in ops], [step(op) for op in ops]), computed, called


def test_the_second_run_is_captured_and_each_run_computes_all_once(cuda, stream):
    captured, computed, called = plan(cuda, stream, "add", "tanh")
    with inference_mode():
        for _ in range(4):
            captured()
    assert computed == ["add", "tanh"] * 4
    assert called == ["add", "tanh"] * 2, "later runs are one launch"
    assert captured.remark == "runs as a CUDA graph"
    assert cuda.log == [
        "begin on a queue for capturing, the pool, thread_local, inference False",
        "end on a queue for capturing",
        *["replay on the stream's queue"] * 3,
    ]


def test_plans_of_a_stream_share_its_pool(cuda, stream, monkeypatch):
    for name in ("first", "second"):
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda name=name: f"the {name} pool")
        captured, _, _ = plan(cuda, stream, "add", "tanh")
        captured()
        captured()
    assert [line for line in cuda.log if "the second pool" in line] == []


@pytest.mark.parametrize("op", ["custom", "expert_linear"])
def test_what_waits_for_the_device_is_not_tried(cuda, stream, op):
    captured, computed, _ = plan(cuda, stream, "add", op)
    assert captured.remark == f"not a CUDA graph: {op} '{op}' waits for the device"
    for _ in range(3):
        captured()
    assert computed == ["add", op] * 3
    assert cuda.log == []


def test_a_thread_captures_what_it_ran_before(cuda, stream):
    """Libraries have a handle for each thread, which cannot be made while capturing."""
    captured, computed, _ = plan(cuda, stream, "add", "tanh")
    captured()
    other = threading.Thread(target=captured)
    other.start()
    other.join()
    assert cuda.log == []
    captured()
    assert cuda.log == []
    captured()
    assert cuda.log[-1] == "replay on the stream's queue"
    assert computed == ["add", "tanh"] * 4


def test_a_failed_capture_computes_nothing_and_is_not_tried_again(cuda, stream):
    computed: list[str] = []

    def refuses() -> None:
        if cuda.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        computed.append("sort")

    captured = CapturedPlan(stream, [lambda: cuda.launch(lambda: computed.append("add")), refuses],
                            [step("add"), step("sort")])  # fmt: skip
    for _ in range(4):
        captured()
    assert computed == ["add", "sort"] * 4
    assert cuda.log == [
        "begin on a queue for capturing, the pool, thread_local, inference False",
        "end on a queue for capturing",
    ]
    assert captured.remark == (
        "not a CUDA graph: sort 'sort' cannot be captured (operation not permitted when stream is capturing)"
    )
    assert stream.pool is None


def test_where_capturing_cannot_begin_calls_run_one_by_one(cuda, stream):
    cuda.fails_at_begin = True
    captured, computed, _ = plan(cuda, stream, "add", "tanh")
    for _ in range(3):
        captured()
    assert computed == ["add", "tanh"] * 3
    assert "another thread captures" in captured.remark
