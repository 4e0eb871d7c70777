"""Locks, events, workers and futures: what they promise, and that no interrupt leaves another thread waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from opweave.concurrency import SPIN, Latch, Lock, Worker, start_thread
from opweave.futures import Future, Task
from tests.support.interrupts import interrupted, needs_timer

INTERRUPTS = 20_000

# One that arrives in a callback of a weak reference, or in a finaliser, gets no further.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("for a test")
    yield worker
    worker.close()
    assert worker.ended.wait(10)


def submit(worker: Worker, work: Callable[..., Any], *args: Any) -> Future[Any]:
    task = Task(work, *args)
    worker.put(task)
    return task.future


def in_another_thread(work: Callable[[], object]) -> bool:
    """Whether ``work`` returns there within some seconds."""
    ended = Latch()

    def do() -> None:
        work()
        ended.set()

    start_thread(do, name="another")
    return ended.wait(20)


# --- Latch ----------------------------------------------------------------------------------------------------------


def test_an_event_lets_all_go_on_who_wait_and_all_who_come_later():
    event = Latch()
    went = [Latch() for _ in range(5)]
    for each in went:
        start_thread(lambda each=each: event.wait() and each.set(), name="waits")
    assert not event.is_set()
    assert not event.wait(0.01)
    assert not event.wait(-1)
    event.set()
    event.set()
    assert all(each.wait(10) for each in went)
    assert event.is_set()
    assert event.wait()
    assert event.wait(0)


@needs_timer
def test_an_interrupt_while_waiting_for_an_event_holds_nobody_else_up(worker):
    event = Latch()

    def do() -> None:
        nonlocal event
        event = Latch()
        waits = event
        worker.put(waits.set)
        waits.wait()

    def check() -> None:
        last = event
        worker.put(last.set)
        assert in_another_thread(last.wait)

    assert interrupted(INTERRUPTS, do, check, every=1000)


# --- Lock -----------------------------------------------------------------------------------------------------------


def test_a_lock_keeps_other_threads_out_and_lets_its_own_in_again():
    lock = Lock()
    entered = Latch()

    def enter() -> None:
        with lock:
            entered.set()

    with lock:
        with lock:
            start_thread(enter, name="enters")
            assert not entered.wait(0.05)
        assert not entered.wait(0.05)
    assert entered.wait(10)


@needs_timer
def test_an_interrupt_leaves_no_lock_taken(worker):
    lock, count = Lock(), [0]

    def enter() -> None:
        with lock, lock:
            count[0] += 1

    def do() -> None:
        worker.put(enter)  # so that it is wanted by another thread too
        enter()
        enter()

    def check() -> None:
        assert in_another_thread(enter)

    assert interrupted(INTERRUPTS, do, check, every=200)


# --- Worker ---------------------------------------------------------------------------------------------------------


def test_a_worker_does_its_jobs_in_order_and_knows_those_that_have_not_ended(worker):
    done: list[int] = []
    go, begun, told = Latch(), Latch(), Latch()
    seen: list[int] = []

    def first() -> Callable[[], None]:
        begun.set()
        go.wait()
        assert worker.is_current

        def tell() -> None:
            seen.append(len(worker.jobs))
            told.set()

        return tell

    worker.put(first)
    assert begun.wait(10)
    assert len(worker.jobs) == 1
    worker.put(lambda: done.append(1))
    worker.put(lambda: done.append(2))
    assert len(worker.jobs) == 3
    assert not worker.is_current
    go.set()
    assert told.wait(10)
    assert seen == [2]
    submit(worker, int).result(10)
    assert done == [1, 2]
    assert not worker.jobs


def test_a_worker_that_nobody_has_any_more_ends_behind_its_jobs():
    done: list[int] = []
    go = Latch()
    worker = Worker("forgotten")
    ended = worker.ended

    def first() -> None:
        go.wait(10)
        done.append(1)

    worker.put(first)
    worker.put(lambda: done.append(2))
    del worker
    assert not ended.wait(0.05)
    go.set()
    assert ended.wait(10)
    assert done == [1, 2]


def test_a_worker_that_is_closed_does_what_it_was_given_and_ends():
    worker = Worker("ends")
    done: list[int] = []
    for i in range(100):
        worker.put(partial(done.append, i))
    worker.close()
    assert worker.ended.wait(10)
    assert done == list(range(100))


@needs_timer
def test_a_thread_that_an_interrupt_lets_start_begins_all_the_same():
    kept: list[tuple[Worker, Latch]] = []

    def do() -> None:
        worker = Worker("short")
        event = Latch()
        worker.put(event.set)
        kept.append((worker, event))
        worker.close()

    assert interrupted(1000, do, lambda: None, every=1000)
    for worker, event in kept:
        assert event.wait(10)
        worker.close()
        assert worker.ended.wait(10)


# --- Future ---------------------------------------------------------------------------------------------------------


def test_a_future_gives_what_its_work_returned_or_raised(worker):
    assert submit(worker, int, "7").result(10) == 7
    failing = submit(worker, int, "x")
    assert isinstance(failing.exception(10), ValueError)
    with pytest.raises(ValueError, match="x"):
        failing.result(10)
    assert failing.done()
    assert not failing.running()
    assert not failing.cancelled()


def test_a_future_that_has_not_begun_can_be_cancelled_and_others_not(worker):
    go, begun = Latch(), Latch()
    done: list[int] = []

    def wait() -> None:
        begun.set()
        go.wait()

    first, second = submit(worker, wait), submit(worker, done.append, 1)
    assert begun.wait(10)
    assert first.running()
    assert not first.cancel()
    called: list[Any] = []
    second.add_done_callback(called.append)
    assert second.cancel()
    assert second.cancel()
    assert second.cancelled()
    assert called == [second]
    with pytest.raises(concurrent.futures.CancelledError):
        second.result(0)
    with pytest.raises(TimeoutError):
        first.result(0.01)
    go.set()
    first.result(10)
    submit(worker, int).result(10)
    assert not done
    assert not first.cancel()
    with pytest.raises(concurrent.futures.InvalidStateError):
        first.set_result(None)


def test_callbacks_are_called_once_each_before_and_after_the_end_and_may_fail(worker, caplog):
    called: list[str] = []
    go = Latch()
    future = submit(worker, go.wait)

    def fail(_: Any) -> None:
        called.append("fails")
        raise ValueError("in a callback")

    future.add_done_callback(lambda _: called.append("first"))
    future.add_done_callback(fail)
    future.add_done_callback(lambda _: called.append("second"))
    go.set()
    future.result(10)
    submit(worker, int).result(10)
    future.add_done_callback(lambda _: called.append("after"))
    assert called == ["first", "fails", "second", "after"]
    assert "in a callback" in caplog.text


def test_the_functions_of_the_standard_library_take_such_futures(worker):
    go = Latch()
    futures = [submit(worker, int, str(i)) for i in range(3)]
    late = [submit(worker, go.wait), *(submit(worker, int, str(i)) for i in range(3, 6)), submit(worker, int, "x")]
    done, pending = concurrent.futures.wait(futures + late, return_when=concurrent.futures.FIRST_COMPLETED, timeout=10)
    assert done
    assert late[0] in pending
    assert late[-2].cancel()
    threading.Timer(0.05, go.set).start()
    ended = list(concurrent.futures.as_completed([*futures, *late], timeout=10))
    assert set(ended) == {*futures, *late}
    assert len(ended) == len(futures) + len(late)
    done, pending = concurrent.futures.wait(late, timeout=10)
    assert not pending

    async def wait_for_them() -> list[int]:
        return await asyncio.gather(*(asyncio.wrap_future(submit(worker, int, str(i))) for i in range(3)))

    assert asyncio.run(wait_for_them()) == [0, 1, 2]


def test_a_future_and_its_error_go_without_the_collector(worker):
    import gc
    import weakref

    gc.disable()
    try:
        future = submit(worker, int, "x")
        with suppress(ValueError):
            future.result(10)
        submit(worker, int).result(10)
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()


@needs_timer
@pytest.mark.parametrize("use", ["result", "wait", "cancel", "callback"])
def test_no_interrupt_of_who_uses_a_future_holds_its_worker_up(worker, use):
    def do() -> None:
        future = submit(worker, int)
        if use == "result" or len(worker.jobs) > 20:
            future.result(20)
        elif use == "wait":
            concurrent.futures.wait([future], timeout=20)
        elif use == "cancel":
            submit(worker, int).cancel()
        else:
            future.add_done_callback(lambda _: None)

    def check() -> None:
        assert submit(worker, int).result(20) == 0

    # The library's own functions may leave a future locked, which then ends a moment late, and turn the interrupt into
    # a RuntimeError about a lock of their own.
    times, others = (INTERRUPTS, ()) if use != "wait" else (500, (RuntimeError,))
    assert interrupted(times, do, check, every=250, unharmed=others)


def test_a_future_left_locked_by_the_standard_library_ends_all_the_same(worker):
    task = Task(int)
    with suppress(KeyboardInterrupt), left_locked(task.future):
        raise KeyboardInterrupt
    start = time.monotonic()
    assert in_another_thread(lambda: worker.put(task))
    assert task.future.result(10) == 0
    assert time.monotonic() - start < 5


@contextmanager
def left_locked(future: Future[Any]) -> Iterator[None]:
    ended = Latch()

    def lock() -> None:
        future._condition.acquire()
        ended.set()

    start_thread(lock, name="never gives it back")
    ended.wait(10)
    yield


@pytest.mark.parametrize("delay", [None, 0.0, SPIN / 2, 20 * SPIN])
def test_waiting_soon_ends_when_the_latch_is_set(delay):
    """Set before, while the thread looks, and while it sleeps."""
    latch, started, ended = Latch(), Latch(), Latch()

    def wait() -> None:
        started.set()
        latch.wait_soon()
        assert latch.is_set()
        ended.set()

    if delay is None:
        latch.set()
    start_thread(wait, name="waits")
    started.wait()
    if delay is not None:
        assert not ended.is_set()
        time.sleep(delay)
        latch.set()
    assert ended.wait(10)


def test_waiting_soon_looks_for_a_bounded_time():
    """A thread that waits long takes next to no processor time."""
    latch, ended, took = Latch(), Latch(), []

    def wait() -> None:
        begun = time.thread_time()
        latch.wait_soon()
        took.append(time.thread_time() - begun)
        ended.set()

    start_thread(wait, name="waits long")
    time.sleep(0.3)
    latch.set()
    assert ended.wait(10)
    assert took[0] < 0.1
