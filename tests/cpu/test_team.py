"""Compiled kernels shared among threads that wait for their parts in compiled code."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.threads import ThreadPool
from opweave_cpu.threads import CURRENT, THREADS

pytest.importorskip("llvmlite")

from opweave_cpu.jit import sequence, team
from opweave_cpu.jit.walk import SHARED_WORK
from opweave_cpu.tunables import COMPILED_WORK

pytestmark = pytest.mark.usefixtures("compiling")

Array = np.ndarray[Any, Any]

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads wait for parts for ever: none leaves before a busy machine lets the caller hand it one."""
    monkeypatch.setattr(team, "_polls", lambda: 1 << 40)


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(3) as made:
        CURRENT.pool = made
        try:
            yield made
        finally:
            CURRENT.pool = None
            made.close()


class Recorded:
    """A kernel that notes which thread did which of its parts.

    Args:
        during: what a part does, by its number.
        work: as of `Parts`.
        parts: how many there are.
    """

    def __init__(
        self, during: Callable[[int], object] = lambda number: None, *, work: int = 1 << 30, parts: int = 3
    ) -> None:
        self.threads: dict[int, int] = {}
        self._during = during
        self._kernel = KERNEL(self._do)
        address = ctypes.cast(self._kernel, ctypes.c_void_p).value
        assert address is not None
        self.run = team.Parts(address, [number.to_bytes(8, "little") for number in range(parts)], work).run

    def _do(self, address: int) -> None:
        number = ctypes.c_int64.from_address(address).value
        assert number not in self.threads
        self._during(number)
        self.threads[number] = threading.get_ident()


def test_each_part_is_done_once_and_the_first_one_here(pool: ThreadPool) -> None:
    for _ in range(300):
        kernel = Recorded()
        kernel.run()
        assert sorted(kernel.threads) == [0, 1, 2]
        assert kernel.threads[0] == threading.get_ident()


def test_parts_are_done_by_different_threads_at_once(pool: ThreadPool, patient: None) -> None:
    together = threading.Barrier(3)

    def meet(number: int) -> None:
        # The caller waits, with the first part, until the threads of the pool are there.
        together.wait(timeout=30)

    kernel = Recorded(meet)
    kernel.run()
    assert len(set(kernel.threads.values())) == 3


def test_the_caller_does_what_no_thread_has_begun(pool: ThreadPool) -> None:
    release = threading.Event()
    for _ in range(2):  # the threads of the pool are busy
        pool.lend(partial(release.wait, 30), lambda: None)
    try:
        kernel = Recorded()
        kernel.run()
        assert set(kernel.threads.values()) == {threading.get_ident()}
    finally:
        release.set()


def test_a_closed_pool_leaves_all_parts_to_the_caller(pool: ThreadPool) -> None:
    pool.close()
    kernel = Recorded()
    kernel.run()
    assert set(kernel.threads.values()) == {threading.get_ident()}


def test_waiting_threads_leave_a_pool_that_is_closed(pool: ThreadPool, patient: None) -> None:
    together = threading.Barrier(3)
    Recorded(lambda number: together.wait(timeout=30)).run()  # now two threads wait for parts
    made = team.Team.current()
    assert states(made) == [1, 1]
    pool.close()
    deadline = time.monotonic() + 30
    while any(states(made)):
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_waiting_threads_leave_for_other_jobs(pool: ThreadPool, patient: None) -> None:
    together, again = threading.Barrier(3), threading.Barrier(3)
    Recorded(lambda number: together.wait(timeout=30)).run()  # now two threads wait for parts
    pool.spread([lambda: again.wait(timeout=30)] * 3)


def test_callers_that_meet_get_their_own_results() -> None:
    x = np.random.default_rng(0).standard_normal((512, 2048)).astype(np.float32)
    given = ow.input("team_x", x.shape)
    errors: list[BaseException] = []

    def run(factor: float) -> None:
        try:
            program = ow.Scheduler("cpu").build(ow.exp(given * factor))
            want = np.exp(x * np.float32(factor))
            for _ in range(20):
                np.testing.assert_allclose(program.run({given: x}), want, rtol=1e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(factor,)) for factor in (0.5, 0.25, 0.125)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")  # of Python, and of libraries that other tests loaded
def test_a_forked_child_has_threads_of_its_own(pool: ThreadPool, patient: None) -> None:
    Recorded().run()
    child = os.fork()
    if child == 0:
        try:
            together = threading.Barrier(3)
            kernel = Recorded(lambda number: together.wait(timeout=30))
            kernel.run()
            os._exit(len(set(kernel.threads.values())))
        finally:
            os._exit(99)
    deadline = time.monotonic() + 60
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 3


def test_the_pool_of_the_process_serves_runs_without_one() -> None:
    assert CURRENT.pool is None
    kernel = Recorded()
    kernel.run()
    assert sorted(kernel.threads) == [0, 1, 2]
    assert THREADS.pool().size >= 2


def test_a_small_kernel_calls_nobody_and_shares_with_those_who_wait(pool: ThreadPool, patient: None) -> None:
    alone = Recorded(work=0)
    alone.run()
    assert set(alone.threads.values()) == {threading.get_ident()}
    together, again = threading.Barrier(3), threading.Barrier(3)
    Recorded(lambda number: together.wait(timeout=30)).run()
    kernel = Recorded(lambda number: again.wait(timeout=30), work=0)
    kernel.run()
    assert len(set(kernel.threads.values())) == 3
    pool.spread([lambda: None] * 3)


# --- kernels in a row ------------------------------------------------------------------------------------------------


def chain(x: ow.Tensor) -> ow.Tensor:
    """Kernels that are compiled and not fused, an addition of NumPy among them."""
    y = ow.rms_norm(x, eps=1e-6)
    for _ in range(3):
        y = ow.softmax(ow.layer_norm(ow.rms_norm(y, eps=1e-6), eps=1e-6)) * 3 + x
    return y


@pytest.mark.parametrize("work", [1, 1 << 30], ids=["shared", "alone"])
@pytest.mark.parametrize("most", [2, 64])
def test_kernels_in_a_row_give_what_each_by_itself_gives(work: int, most: int) -> None:
    value = np.random.default_rng(2).standard_normal((40, 96)).astype(np.float32)
    results = []
    with SHARED_WORK.at(work), COMPILED_WORK.at(work):
        for merged in (1, most):
            with sequence.MERGED_CALLS.at(merged), ow.Scheduler("cpu") as scheduler:
                program = scheduler.build(chain(ow.input("row_x", value.shape)))
                (plan,), made = program.run_lists[0].plans, program.run_lists[0].calls
                assert made.numbers is not None
                assert made.numbers[-1] == plan.n_calls
                assert (len(made.calls) < plan.n_calls) == (merged > 1)
                results += [program.run(row_x=value) for _ in range(3)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    host = ow.Scheduler("host").build(chain(ow.input("row_x", value.shape)))
    np.testing.assert_allclose(results[0], host.run(row_x=value), rtol=1e-4, atol=1e-5)


def test_threads_that_left_are_called_again(pool: ThreadPool, patient: None) -> None:
    there = threading.Barrier(3)
    kernels = [Recorded(lambda number: there.wait(timeout=30)) for _ in range(4)]
    leaving = [Recorded(lambda number: send_away(pool), parts=1) for _ in range(4)]
    pairs = zip(kernels, leaving, strict=True)
    ((call, count),) = sequence.merge([kernel.run for pair in pairs for kernel in pair])
    assert count == 8
    call()
    assert [len(set(kernel.threads.values())) for kernel in kernels] == [3] * 4


@pytest.mark.parametrize("enough", [True, False])
def test_small_kernels_in_a_row_call_threads_where_all_together_are_worth_it(
    pool: ThreadPool, patient: None, enough: bool
) -> None:
    there = threading.Barrier(3 if enough else 1)
    few = COMPILED_WORK.value // 4
    kernels = [Recorded(lambda number: there.wait(timeout=30), work=few if enough else few - 1) for _ in range(4)]
    ((call, _),) = sequence.merge([kernel.run for kernel in kernels])
    call()
    assert [len(set(kernel.threads.values())) for kernel in kernels] == [3 if enough else 1] * 4


def states(made: team.Team) -> list[int]:
    """Of the slots of a team: 0 where no thread is, nor will one come."""
    return (ctypes.c_int64 * (team._WORDS * made.count)).from_address(made.address)[:: team._WORDS]


def send_away(pool: ThreadPool) -> None:
    """Have the threads of the pool that wait for parts leave, and wait until they have."""
    made = team.Team.current()
    deadline = time.monotonic() + 30
    while any(states(made)):
        assert time.monotonic() < deadline
        pool.recall()
        time.sleep(1e-4)


@pytest.mark.parametrize("index", ["i32", "i64"])
def test_indices_are_checked_between_kernels_and_failures_name_their_node(index: str) -> None:
    table, log = ow.state("rows_in_turn", (8, 96), fill=0), ow.state("rows_behind", (8, 96), fill=0)
    x, ids = ow.input("turn_x", (2, 96)), ow.input("turn_ids", (2,), index)
    with ow.scope("before"):
        y = ow.softmax(ow.rms_norm(x, eps=1e-6))
    with ow.scope("writing"):
        written = ow.index_copy(table, ids, y)
    with ow.scope("behind"):
        z = ow.index_copy(log, ids, ow.softmax(ow.rms_norm(written[:2], eps=1e-6)))
    dtype: Any = {"i32": np.int32, "i64": np.int64}[index]
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build(z)
        merged = [call for call in program.run_lists[0].calls.calls if isinstance(call, sequence.KernelSequence)]
        assert len(merged) == 1
        value = np.ones((2, 96), np.float32)
        first = program.run(turn_x=value, turn_ids=np.array([1, 2], dtype))
        for outside in (8, -1, np.iinfo(dtype).min):
            with pytest.raises(ow.ExecutionError, match=f"index {outside} ") as failure:
                program.run(turn_x=2 * value, turn_ids=np.array([3, outside], dtype))
            assert "writing" in failure.value.node
            assert isinstance(failure.value.__cause__, ow.BoundsError)
            for state in (table, log):  # they may be half written
                ow.write(state, np.zeros(state.shape, np.float32))
        np.testing.assert_array_equal(program.run(turn_x=value, turn_ids=np.array([1, 2], dtype)), first)


def test_sums_between_products_are_merged_with_them() -> None:
    y = ow.input("sum_x", (1, 64))
    values = np.random.default_rng(5).standard_normal((4, 64, 64), np.float32)
    weights = ow.weights({f"w{i}": value for i, value in enumerate(values)})
    for i in range(4):
        y = y + ow.linear(ow.rms_norm(y, eps=1e-6), weights[f"w{i}"])
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build(y)
        (call,) = program.run_lists[0].calls.calls
        assert isinstance(call, sequence.KernelSequence)
        found = program.run(sum_x=values[0, :1])
    with ow.Scheduler("host") as scheduler:
        np.testing.assert_allclose(found, scheduler.build(y).run(sum_x=values[0, :1]), rtol=1e-4, atol=1e-5)


def test_a_function_that_was_warmed_prepares_nothing_in_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    w = ow.weights({"w": np.random.default_rng(6).standard_normal((64, 64), np.float32)})["w"]

    def step(x: ow.Tensor) -> ow.Tensor:
        for _ in range(4):
            x = x + ow.linear(ow.rms_norm(x, eps=3e-6), w)
        return x

    f = ow.compile(step, devices="cpu")
    f.warm([(ow.Spec((1, 64), "f32"),)])
    x = np.ones((1, 64), np.float32)
    (call,) = f.program(x).run_lists[0].calls.calls
    assert isinstance(call, sequence.KernelSequence)
    monkeypatch.setattr(sequence.KernelSequence, "_write", None)
    assert f(x).shape == (1, 64)
    f.close()
