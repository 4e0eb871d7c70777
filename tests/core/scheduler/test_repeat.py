"""Running a program again and again: nothing that has changed in between is missed, and a failure is still blamed on
the step that it struck, whatever the calls were put together to."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Call, Stream
from opweave.contract.kernels import KernelTable
from opweave.tracing import TRACE, TraceEvent
from tests.support.devices import BASIC, Separate
from tests.support.interrupts import interrupted, needs_timer

F = np.float32
ONES = np.ones(4, F)


class Trouble:
    """A custom function that calls ``todo`` and adds one."""

    def __init__(self) -> None:
        self.todo: Callable[[], Any] = lambda: None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.todo()
        return x + F(1)


def fail() -> None:
    raise ArithmeticError("no luck")


@pytest.fixture
def x() -> ow.Tensor:
    return ow.input("x", (4,))


def chain(x: ow.Tensor, trouble: Trouble) -> tuple[ow.Scheduler, ow.Tensor, ow.Tensor]:
    """x -> neg on the first device -> trouble on the second -> neg on the first -> relu on the second."""
    scheduler = ow.Scheduler([Separate("a"), Separate("b", (*BASIC, "custom"))])
    node = ow.custom(trouble, -x, like=x)
    last = ow.relu(-node)
    for tensor, device in ((node.srcs[0], "a"), (node, "b"), (last.srcs[0], "a"), (last, "b")):
        scheduler.pin(tensor, device)
    return scheduler, node, last


def want(x: np.ndarray) -> np.ndarray:
    return np.maximum(x - 1, F(0))


# --- what is put together -----------------------------------------------------------------------------------------


def test_a_failure_in_any_run_names_its_node_and_device_and_the_next_run_is_right(x):
    trouble = Trouble()
    scheduler, node, last = chain(x, trouble)
    program = scheduler.build(last)
    for _ in range(3):
        np.testing.assert_array_equal(program.run(x=ONES), want(ONES))
        np.testing.assert_array_equal(program.run(x=2 * ONES), want(2 * ONES))
        trouble.todo = fail
        with pytest.raises(ow.ExecutionError, match="no luck") as caught:
            program.run(x=ONES)
        assert caught.value.node == node.describe()
        assert caught.value.device == "b"
        assert isinstance(caught.value.__cause__, ArithmeticError)
        with pytest.raises(ow.SchedulerError):
            program.read(last)  # of a run that failed
        trouble.todo = lambda: None


def test_every_step_of_a_split_is_blamed_for_itself(x):
    troubles = [Trouble() for _ in range(4)]
    scheduler = ow.Scheduler([Separate("a"), Separate("b", (*BASIC, "custom"))])
    at, nodes = -x, []
    for trouble in troubles:
        at = ow.custom(trouble, at, like=x)
        nodes.append(at)
    program = scheduler.build(-at, pins={at.srcs[0]: "b"})
    program.run(x=ONES)
    for trouble, node in zip(troubles, nodes, strict=True):
        trouble.todo = fail
        with pytest.raises(ow.ExecutionError) as caught:
            program.run(x=ONES)
        assert caught.value.node == node.describe()
        trouble.todo = lambda: None
        np.testing.assert_array_equal(program.run(x=ONES), -(4 - ONES))


def test_the_stream_of_any_split_ends_the_run(x):
    trouble = Trouble()
    scheduler, _, last = chain(x, trouble)
    program = scheduler.build(last)
    program.run(x=ONES)
    for stream in scheduler.streams:
        trouble.todo = stream.abort
        with pytest.raises(ow.Cancelled):
            program.run(x=ONES)
        trouble.todo = lambda: None
        np.testing.assert_array_equal(program.run(x=ONES), want(ONES))


def test_an_end_that_comes_too_late_ends_nothing(x):
    scheduler, _, last = chain(x, Trouble())
    program = scheduler.build(last)
    program.run(x=ONES)
    for stream in scheduler.streams:
        stream.abort()
    np.testing.assert_array_equal(program.run(x=ONES), want(ONES))


class Modal(Stream):
    """Needs a mode while its calls are made."""

    mode: str | None = None

    def _run(self, calls: Iterator[Call]) -> None:
        before, Modal.mode = Modal.mode, self.device.name
        try:
            super()._run(calls)
        finally:
            Modal.mode = before


class OfMode(Separate):
    stream_class = Modal


class Alike(Modal):
    def _inlines(self, other: Stream) -> bool:
        return isinstance(other, Alike)


class OfAnyMode(Separate):
    stream_class = Alike


@pytest.mark.parametrize(("kind", "seen"), [(OfMode, ["a", "b"]), (OfAnyMode, ["a", "a"])])
def test_streams_that_need_something_run_their_own_calls_unless_they_say_otherwise(x, kind, seen):
    scheduler = ow.Scheduler([kind("a", (*BASIC, "custom")), kind("b", (*BASIC, "custom"))])
    modes: list[str | None] = []

    def note(array: np.ndarray) -> np.ndarray:
        modes.append(Modal.mode)
        return array

    first = ow.custom(note, x, like=x)
    second = ow.custom(note, -first, like=x)
    program = scheduler.build(second, pins={first: "a", second: "b", second.srcs[0]: "a"})
    for _ in range(2):
        modes.clear()
        program.run(x=ONES)
        assert modes == seen


class Loud(Separate):
    """Overrides uploads, and counts their bytes."""

    received = 0

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        self.received += len(data)
        super()._upload(mem, offset, data)


def test_a_device_that_copies_differently_is_asked_at_every_boundary(x):
    loud = Loud("loud")
    y = -x
    program = ow.Scheduler([Separate("a"), loud]).build(ow.exp(y), pins={y: "a", ow.exp(y): "loud"})
    loud.received = 0
    program.run(x=ONES)
    program.run(x=ONES)
    assert loud.received == 2 * ONES.nbytes


def test_two_frames_lie_between_a_run_and_its_first_kernel(x):
    depths: list[int] = []

    def note(array: np.ndarray) -> np.ndarray:
        frame, depth = sys._getframe(1), 0
        while frame.f_code is not ow.Program.run.__code__:
            assert frame.f_back is not None
            frame, depth = frame.f_back, depth + 1
        depths.append(depth)
        return array

    class Direct(Separate):
        """Calls the function itself, without the kernel's own frames."""

    direct = Direct("direct")
    direct.kernels = KernelTable("f32")
    direct.kernels("custom")(lambda stream, op, out, *srcs, **attrs: partial(note, srcs[0].view))
    program = ow.Scheduler([direct, Separate("a")]).build(
        -ow.custom(note, x, like=x), pins={-ow.custom(note, x, like=x): "a"}
    )
    for _ in range(3):
        program.run(x=ONES)
    assert max(depths) <= 2, "the executor's, and the stream's"


def test_a_failed_run_leaves_no_outputs_of_other_programs_to_read(x):
    trouble = Trouble()
    scheduler, _, last = chain(x, trouble)
    program, other = scheduler.build(last), scheduler.build(ow.relu(-x))
    other.run(x=-ONES)
    np.testing.assert_array_equal(other.read(other.partition.graph.outputs[0]), ONES)
    trouble.todo = fail
    with pytest.raises(ow.ExecutionError, match="no luck"):
        program.run(x=ONES)  # in the same memory
    with pytest.raises(ow.SchedulerError, match="before another program"):
        other.read(other.partition.graph.outputs[0])


# --- what may have changed in between -----------------------------------------------------------------------------


def test_another_program_in_between_changes_nothing(x):
    scheduler = ow.Scheduler(Separate("a"))
    one, two = scheduler.build(ow.neg(x)), scheduler.build(ow.relu(ow.neg(x)))
    for _ in range(2):
        np.testing.assert_array_equal(one.run(x=ONES), -ONES)
        np.testing.assert_array_equal(one.run(x=ONES), -ONES)
        np.testing.assert_array_equal(two.run(x=-ONES), ONES)
        with pytest.raises(ow.SchedulerError):
            one.read(one.partition.graph.outputs[0])


def test_weights_freed_in_between_are_missed(x):
    weights = ow.weights({"w": ONES})
    scheduler, y = ow.Scheduler([Separate("a"), Separate("b")]), x + weights["w"]
    program = scheduler.build(-y, pins={y: "a", -y: "b"})
    program.run(x=ONES)
    program.run(x=ONES)
    leaf = weights["w"].leaf
    assert leaf is not None
    for copy in leaf.copies.values():
        copy.buffer.free()
    for _ in range(2):
        with pytest.raises(ow.LifetimeError, match="was freed"):
            program.run(x=ONES)


def test_a_state_that_was_spoilt_in_between_is_refused(x):
    state = ow.state("s", (4,))
    program = ow.Scheduler("host").build(state + x)
    program.write(state, ONES)
    for _ in range(2):
        np.testing.assert_array_equal(program.run(x=ONES), 2 * ONES)
    assert state.leaf is not None
    state.leaf.damaged = "state 's' may be half written"  # as a failed run of any scheduler leaves it
    for _ in range(2):
        with pytest.raises(ow.ExecutionError, match="half written"):
            program.run(x=ONES)
    program.write(state, 2 * ONES)
    np.testing.assert_array_equal(program.run(x=ONES), 3 * ONES)


def test_observers_and_listeners_that_come_in_between_hear_of_everything(x):
    scheduler, _, last = chain(x, Trouble())
    program = scheduler.build(last)
    program.run(x=ONES)
    shown: list[ow.Tensor] = []
    with program.observe(lambda tensor, value: shown.append(tensor)):
        program.run(x=ONES)
        program.run(x=ONES)
    assert len(shown) == 2 * 4
    program.run(x=ONES)
    heard: list[TraceEvent] = []
    with TRACE.listen(heard.append):
        program.run(x=ONES)
    assert [h.kind for h in heard if h.kind != "sync"] == ["plan", "copy", "plan", "copy", "plan", "copy", "plan"]
    np.testing.assert_array_equal(program.run(x=ONES), want(ONES))


def test_closing_in_between_is_noticed(x):
    with ow.Scheduler(Separate("a")) as scheduler:
        program = scheduler.build(-x)
        program.run(x=ONES)
        program.close()
        with pytest.raises(ow.LifetimeError):
            program.run(x=ONES)
        other = scheduler.build(ow.exp(x))
        other.run(x=ONES)
    with pytest.raises(ow.LifetimeError):
        other.run(x=ONES)


def test_a_program_is_not_run_from_within_its_later_runs_either(x):
    trouble = Trouble()
    scheduler, _, last = chain(x, trouble)
    program = scheduler.build(last)
    program.run(x=ONES)
    trouble.todo = lambda: program.run(x=ONES)
    with pytest.raises(ow.ExecutionError, match="from within a run"):
        program.run(x=ONES)


def test_cancelling_ends_a_later_run_within_one_plan(x):
    trouble = Trouble()
    scheduler, _, last = chain(x, trouble)
    program = scheduler.build(last)
    program.run(x=ONES)

    def cancel() -> None:
        thread = threading.Thread(target=scheduler.cancel)
        thread.start()
        thread.join()

    trouble.todo = cancel
    with pytest.raises(ow.Cancelled):
        program.run(x=ONES)
    trouble.todo = lambda: None
    np.testing.assert_array_equal(program.run(x=ONES), want(ONES))


def test_what_is_counted_is_counted_in_every_run(x):
    scheduler, _, last = chain(x, Trouble())
    program = scheduler.build(last)
    for _ in range(3):
        program.run(x=ONES)
    assert scheduler.stats.runs == 3
    assert scheduler.stats.copied == 3 * 3 * ONES.nbytes


REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


@pytest.mark.parametrize("devices", ["cpu", "host"])
def test_custom_functions_see_and_keep_the_context_variables_of_the_caller(x, devices):
    seen: list[str] = []

    def note(array: np.ndarray) -> np.ndarray:
        seen.append(REQUEST.get())
        return array

    program = ow.Scheduler(devices).build(ow.custom(note, -x, like=x))
    for name in ("first", "second"):
        token = REQUEST.set(name)
        program.run(x=ONES)
        REQUEST.reset(token)
    assert seen == ["first", "second"]


@pytest.mark.parametrize("setting", ["warn", "raise"])
def test_the_error_state_of_the_caller_neither_matters_nor_changes(x, setting):
    program = ow.Scheduler("cpu").build(ow.exp(x))
    with np.errstate(all=setting):
        for _ in range(2):
            assert np.isinf(program.run(x=ONES * 1000)).all()
        assert set(np.geterr().values()) == {setting}


def test_another_thread_that_submits_during_a_run_is_refused_and_does_no_harm(x):
    trouble = Trouble()
    scheduler, _, last = chain(x, trouble)
    program = scheduler.build(last)
    program.run(x=ONES)
    refused: list[BaseException] = []

    def elsewhere() -> None:
        try:
            scheduler.streams[0].record()
        except ow.LifetimeError as error:
            refused.append(error)

    def meanwhile() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    trouble.todo = meanwhile
    np.testing.assert_array_equal(program.run(x=ONES), want(ONES))
    assert "another thread" in str(refused[0])
    trouble.todo = lambda: None
    elsewhere()  # between runs it may
    assert len(refused) == 1
    np.testing.assert_array_equal(program.run(x=2 * ONES), want(2 * ONES))


def test_a_cancelled_run_leaves_no_trace_in_the_next_one(x):
    trouble = Trouble()
    scheduler, _, last = chain(x, trouble)
    program, other = scheduler.build(last), scheduler.build(-x)
    for _ in range(2):
        trouble.todo = scheduler.cancel
        with pytest.raises(ow.Cancelled, match=r"cancel\(\)"):
            program.run(x=ONES)
        trouble.todo = lambda: None
        np.testing.assert_array_equal(other.run(x=ONES), -ONES)
        np.testing.assert_array_equal(program.run(x=ONES), want(ONES))


# --- one thread at a time on its streams -----------------------------------------------------------------------------


def test_cancel_ends_runs_of_its_own_scheduler_only(x):
    trouble = Trouble()
    first = ow.Scheduler([Separate("a", (*BASIC, "custom"))])
    second = ow.Scheduler(first.streams[0])  # which it does not own
    program = second.build(-ow.custom(trouble, x, like=x))
    program.run(x=ONES)
    trouble.todo = first.cancel
    np.testing.assert_array_equal(program.run(x=ONES), -(1 + ONES))
    trouble.todo = second.cancel
    with pytest.raises(ow.Cancelled):
        program.run(x=ONES)


def test_a_stream_can_be_used_while_its_scheduler_is_only_locked(x):
    scheduler, _, last = chain(x, Trouble())
    stream = scheduler.streams[0]
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(stream.record()))
    with scheduler._executor.lock:  # as while building, reading or waiting
        thread.start()
        thread.join()
    assert len(seen) == 1
    np.testing.assert_array_equal(scheduler.build(last).run(x=ONES), want(ONES))


def test_a_run_within_a_plan_does_not_shield_the_plan_from_its_end(x):
    device = Separate("a")
    scheduler = ow.Scheduler([device])
    program = scheduler.build(-x)
    program.run(x=ONES)
    plan = program.run_lists[0].plans[0]

    def around(index: int, call: Call) -> Call:
        def inside() -> None:
            program.run(x=ONES)
            scheduler.streams[0].abort()
            call()

        return inside

    with pytest.raises(ow.Cancelled, match=r"abort\(\)"):
        plan.run(around)
    scheduler.streams[0].recover()
    np.testing.assert_array_equal(program.run(x=2 * ONES), -2 * ONES)


def test_a_stream_that_is_kept_keeps_no_scheduler_alive(x):
    scheduler = ow.Scheduler([Separate("a")])
    scheduler.build(-x).run(x=ONES)
    stream, gone = scheduler.streams[0], weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert gone() is None
    assert stream.device.name == "a"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer it ends there
@needs_timer
@pytest.mark.parametrize("joined", [True, False])
def test_an_interrupt_at_any_moment_leaves_nothing_taken(x, joined):
    scheduler = ow.Scheduler([Separate("a"), Separate("b")])
    if not joined:
        scheduler = ow.Scheduler([Separate("a").open(), Separate("b").open()])
    middle = -x
    program = scheduler.build(ow.relu(-middle), pins={middle: "b"})
    checks = itertools.count()

    def run() -> None:
        np.testing.assert_array_equal(program.run(x=ONES), ONES)

    def run_elsewhere(done: Future[None]) -> None:
        run()
        done.set_result(None)

    def check() -> None:
        run()  # here
        if next(checks) % 20 == 0:
            done = Future[None]()  # and elsewhere
            threading.Thread(target=run_elsewhere, args=(done,), daemon=True).start()
            done.result(timeout=20)

    assert interrupted(200, lambda: program.run(x=ONES), check, every=1) == 200
