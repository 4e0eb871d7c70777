"""Running: the mode of torch, queues, events, transfers, and plans that are captured."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.contract import Arg, Step, Stream
from opweave.errors import DeviceLostError, ExecutionError
from opweave.graph.dtypes import as_dtype
from opweave_torch.accelerator import SeparateCpuDevice
from opweave_torch.capture import CapturedPlan
from opweave_torch.options import Options
from opweave_torch.queues import QueueStream

F32 = as_dtype("f32")


def vector(device: Any, *values: float) -> Any:
    buffer = device.alloc(4 * len(values))
    buffer.upload(0, np.array(values, np.float32))
    return Arg(buffer, 0, F32, (len(values),), (4,))


def read(arg: Arg) -> list[float]:
    assert arg.buffer is not None
    return arg.buffer.read().view(np.float32).tolist()


# --- in the calling thread ------------------------------------------------------------------------------------------


def test_calls_run_in_inference_mode_and_leave_the_callers_mode_alone(device):
    modes: list[bool] = []
    stream = device.open()
    stream._run(iter([lambda: modes.append(torch.is_inference_mode_enabled())]))
    assert modes == [True]
    assert not torch.is_inference_mode_enabled()
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()  # gradients of others go on working
    assert x.grad is not None


def test_a_run_inside_of_a_run_of_the_same_stream(device):
    stream, depth = device.open(), []

    def inner() -> None:
        depth.append(torch.is_inference_mode_enabled())

    stream._run(iter([lambda: stream._run(iter([inner])), inner]))
    assert depth == [True, True]
    assert not torch.is_inference_mode_enabled()


def test_a_failing_call_is_named_and_the_mode_ends(device):
    def fail(x: Any) -> Any:
        raise ZeroDivisionError("not like this")

    x = ow.input("x", 3)
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(ow.custom(fail, x + x, like=x).named("mine"))
        with pytest.raises(ExecutionError, match=r"(?s)'mine'.*not like this"):
            program.run(x=np.ones(3, np.float32))
    assert not torch.is_inference_mode_enabled()


# --- queues ---------------------------------------------------------------------------------------------------------


def test_work_transfers_and_events_of_a_queue(separate):
    a, out = vector(separate, 1, 2, 3), vector(separate, 0, 0, 0)
    with separate.open() as stream, separate.open() as other:
        assert isinstance(stream, QueueStream)
        fed, got = np.array([4, 5, 6], np.float32), np.zeros(3, np.float32)
        stream.upload(a.buffer, 0, fed)
        stream.run([Step("add", out, (a, a), {})])
        mark = stream.record()
        other.wait(mark)
        other.download(out.buffer, 0, got)
        other.synchronize()
        assert got.tolist() == [8, 10, 12]
        assert mark.done
        mark.synchronize()
        assert stream.copy_from(a.buffer, 0, out.buffer, 4, 8)
        stream.synchronize()
        assert read(a) == [10, 12, 6]


def test_overlapping_and_foreign_copies_go_by_way_of_the_host(separate, device):
    a, far = vector(separate, 1, 2, 3), vector(device, 7, 8, 9)
    with separate.open() as stream:
        assert not stream.copy_from(a.buffer, 4, a.buffer, 0, 8)
        assert read(a) == [1, 1, 2]
        assert not stream.copy_from(a.buffer, 0, far.buffer, 0, 8)
        assert read(a) == [7, 8, 2]


def test_the_queue_does_not_wait_for_events_of_other_backends(separate):
    stream = separate.open()
    assert not stream._wait(object())
    stream.close()


def test_a_lost_device_and_a_full_one_are_distinguished_from_other_failures(separate):
    with separate.open() as stream:
        for said in ("CUDA error: an illegal memory access was encountered\nmore", "CUDA error: device-side assert"):
            told = stream._translate(RuntimeError(said))
            assert type(told) is DeviceLostError
            assert "start the process anew" in str(told)
            assert "\n" not in str(told)
        full = stream._translate(torch.OutOfMemoryError("no room\nand much advice"))
        assert (type(full), str(full)) == (MemoryError, "no room")
        other = RuntimeError("something else")
        assert stream._translate(other) is other


def test_a_device_that_is_lost_while_it_works_fails_later_events(separate, monkeypatch):
    stream, a = separate.open(), vector(separate, 1, 2)
    mark = stream.record()

    def lose() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(torch.cpu.Event, "synchronize", lambda self: lose())
    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        mark.synchronize()
    assert isinstance(stream.failure, DeviceLostError)
    with pytest.raises(ExecutionError, match="unspecified launch failure"):
        stream.synchronize()
    stream.recover()
    stream.run([Step("add", a, (a, a), {})])
    stream.close()
    assert read(a) == [2, 4]


# --- captured plans, with a graph that is played ----------------------------------------------------------------------


class PlayedGraph:
    """Stands for `torch.cuda.CUDAGraph`, without its magic: calls that it captures are made."""

    made: ClassVar[list[PlayedGraph]] = []

    def __init__(self) -> None:
        self.replays = 0
        self.capturing = False
        PlayedGraph.made.append(self)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.capturing = True

    def capture_end(self) -> None:
        self.capturing = False

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[PlayedGraph]:
    PlayedGraph.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return PlayedGraph.made


def steps(device: Any, count: int) -> list[Step]:
    a = vector(device, 1, 1)
    return [Step("add", a, (a, a), {}, label=f"s{i}") for i in range(count)]


def test_the_second_run_captures_and_all_later_ones_replay(separate, played):
    made: list[int] = []
    stream = QueueStream(separate, Options())
    plan = CapturedPlan(stream, [lambda: made.append(0), lambda: made.append(1)], steps(separate, 2))
    assert "second run" in plan.remark
    plan()
    assert (made, played) == ([0, 1], [])
    plan()
    assert made == [0, 1, 0, 1]  # while capturing; a real graph only notes them
    (graph,) = played
    assert (graph.replays, graph.capturing) == (1, False)
    plan()
    assert (len(made), graph.replays, len(played)) == (4, 2, 1)
    assert plan.remark == "runs as a CUDA graph"


def test_what_cannot_be_captured_runs_call_by_call_and_says_why(separate, played):
    made: list[int] = []

    def waits() -> None:
        if played and played[-1].capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        made.append(1)

    stream = QueueStream(separate, Options())
    plan = CapturedPlan(stream, [lambda: None, waits], steps(separate, 2))
    for _ in range(4):
        plan()
    assert made == [1, 1, 1, 1]  # once a run, the second one included
    assert len(played) == 1
    assert played[0].replays == 0
    assert (
        plan.remark
        == "not a CUDA graph: add 's1' cannot be captured (operation not permitted when stream is capturing)"
    )


def test_a_call_that_fails_names_its_step(separate):
    def fail() -> None:
        raise RuntimeError("no")

    plan = CapturedPlan(QueueStream(separate, Options()), [lambda: None, fail], steps(separate, 2))
    with pytest.raises(RuntimeError) as caught:
        plan()
    assert caught.value.__notes__ == ["in add 's1'"]


def test_the_explanation_says_what_became_of_a_plan(monkeypatch, played):
    class Card(SeparateCpuDevice):
        """Runs on the CPU, but its plans are captured."""

    class CapturingStream(QueueStream):
        def _compile(self, groups):
            return [CapturedPlan(self, super()._compile(groups), [group.steps[-1] for group in groups])]

    card = Card()
    x = ow.input("x", 4)
    with ow.Scheduler(CapturingStream(card, Options())) as scheduler:
        program = scheduler.build(ow.tanh(x + x))
        assert "2 steps; will be captured as a CUDA graph by its second run" in program.explain()
        for _ in range(2):
            program.run(x=np.ones(4, np.float32))
        assert "2 steps; runs as a CUDA graph" in program.explain()
        assert played[0].replays == 1


def test_devices_without_graphs_make_one_call_a_step(separate):
    stream: Stream = separate.open()
    assert len(stream.compile(steps(separate, 3)).calls) == 3
    stream.close()
