"""How many threads work, and that work in several threads is the same work."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import opweave as ow
from opweave.errors import PluginError
from opweave_cpu import CpuBackend, CpuDevice
from opweave_cpu.stream import CpuStream
from opweave_cpu.threads import THREADS
from tests.support.interrupts import interrupted, needs_timer

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(THREADS, "_runs", 0)  # other tests may have left threads within runs that hang
    seen_in_run(cast(CpuStream, CpuDevice().open()))
    yield
    THREADS.default = None


def blas_threads() -> int:
    """Threads that NumPy's BLAS may use. SciPy has one of its own, which no kernel calls."""
    libraries = [info for info in threadpool_info() if info["user_api"] == "blas"]
    return max(
        [info["num_threads"] for info in libraries if "numpy" in info["filepath"]] or [libraries[0]["num_threads"]]
    )


def seen_in_run(stream: CpuStream) -> int:
    """How many threads BLAS may use within a run."""
    seen: list[int] = []
    stream._run(iter([lambda: seen.append(blas_threads())]))
    return seen[0]


def test_blas_has_one_thread_within_runs_and_all_of_them_behind(device: CpuDevice) -> None:
    found = blas_threads()
    each: list[dict[str, Any]] = [{}, {"threads": 1}, {"threads": 2}]
    for options in each:
        stream = device.open(**options)
        assert isinstance(stream, CpuStream)
        with ThreadPoolExecutor(1) as executor:
            elsewhere = [executor.submit(seen_in_run, stream).result() for _ in range(2)]
        assert [*elsewhere, seen_in_run(stream)] == [1, 1, 1]
        assert blas_threads() == found


def test_blas_has_one_thread_until_the_last_run_has_ended(device: CpuDevice) -> None:
    found = blas_threads()
    begun, ended = threading.Event(), threading.Event()
    seen: list[int] = []

    def wait() -> None:
        begun.set()
        assert ended.wait(30)
        seen.append(blas_threads())

    first, second = device.open(), device.open()
    assert isinstance(first, CpuStream)
    assert isinstance(second, CpuStream)
    thread = threading.Thread(target=first._run, args=(iter([wait]),))
    thread.start()
    assert begun.wait(30)
    seen += [seen_in_run(second), blas_threads()]
    ended.set()
    thread.join()
    assert seen == [1, 1, 1]
    assert blas_threads() == found


def test_blas_has_all_threads_behind_a_run_that_fails(device: CpuDevice) -> None:
    found, stream = blas_threads(), device.open()
    assert isinstance(stream, CpuStream)
    with pytest.raises(ZeroDivisionError):
        stream._run(iter([lambda: 1 // 0]))
    assert blas_threads() == found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_forked_within_a_run_has_no_run(device: CpuDevice) -> None:
    found, stream = blas_threads(), device.open()
    assert isinstance(stream, CpuStream)

    def fork() -> None:
        child = os.fork()
        if child == 0:
            seen_in_run(stream)
            os._exit(int(blas_threads() != found))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    stream._run(iter([fork]))
    assert blas_threads() == found


def test_backend_sets_the_threads_of_streams_without_their_own(device: CpuDevice) -> None:
    plain, own = device.open(), device.open(threads=2)
    assert isinstance(plain, CpuStream)
    assert isinstance(own, CpuStream)
    CpuBackend().set_threads(1)
    assert (plain.threads, own.threads) == (1, 2)
    CpuBackend().set_threads(None)
    assert plain.threads == THREADS.cores


def test_parameters_may_come_out_of_a_name(device: CpuDevice) -> None:
    stream = device.open(threads="2")
    assert isinstance(stream, CpuStream)
    assert stream.threads == 2


@pytest.mark.parametrize("threads", [0, -1, 1.5, "many", True])
def test_bad_numbers_of_threads_are_refused(device: CpuDevice, threads: Any) -> None:
    with pytest.raises(PluginError, match="positive whole number"):
        device.open(threads=threads)
    with pytest.raises(PluginError, match="positive whole number"):
        CpuBackend().set_threads(threads)


def test_unknown_parameters_are_refused(device: CpuDevice) -> None:
    with pytest.raises(TypeError, match="colour"):
        device.open(colour="red")


@pytest.mark.parametrize("op", ["add", "relu", "exp"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_big_passes_give_the_same_in_any_number_of_threads(
    device: CpuDevice, apply: Callable[..., Array], monkeypatch: pytest.MonkeyPatch, op: str, dtype: Any
) -> None:
    monkeypatch.setattr(THREADS, "cores", 3)
    x = np.random.default_rng(0).standard_normal((2100, 2101)).astype(dtype)
    srcs = [x, x] if op == "add" else [x]
    one, three = (apply(op, x, *srcs, stream=device.open(threads=n)) for n in (1, 3))
    np.testing.assert_array_equal(one, three)


def test_an_error_in_a_worker_reaches_the_caller_after_all_have_ended() -> None:
    ended = []

    def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        THREADS.spread([lambda: ended.append(0), fail, lambda: ended.append(2)])
    assert ended == [0, 2]


def test_a_run_is_ended_from_another_thread(device: CpuDevice) -> None:
    begun, ended = threading.Event(), threading.Event()
    made: list[Array] = []

    def wait(array: Array) -> Array:
        begun.set()
        assert ended.wait(10)
        return array

    def note(array: Array) -> Array:
        made.append(array)
        return array

    x = ow.input("x", (4,))
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(ow.custom(note, ow.custom(wait, x, like=x), like=x))
        future = program.submit(x=np.ones(4, np.float32))
        assert begun.wait(10)
        scheduler.cancel()
        ended.set()
        with pytest.raises(ow.Cancelled):
            future.result(10)
        assert made == [], "the step under way is the last one"
        np.testing.assert_array_equal(program.run(x=np.ones(4, np.float32)), np.ones(4))


def test_workers_do_not_warn() -> None:
    x, out = np.zeros(4, np.float32), np.empty(4, np.float32)
    with np.errstate(all="ignore"):
        THREADS.spread([lambda: None, lambda: np.divide(x, x, out)])
    assert np.isnan(out).all()


@needs_timer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_ends_no_worker_and_leaves_no_job_at_work() -> None:
    at_work = 0
    done = 0

    def job() -> None:
        nonlocal at_work, done
        at_work += 1
        done += 1
        at_work -= 1

    def here() -> None:  # ends nothing that another thread has begun
        pass

    def check() -> None:
        nonlocal done
        assert at_work == 0
        done = 0
        THREADS.spread([here] + [job] * 3)
        assert done == 3

    interrupted(3000, lambda: THREADS.spread([here, job]), check, every=50)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_with_workers_of_its_own() -> None:
    code = """
import os
from opweave_cpu.threads import THREADS
THREADS.spread([lambda: None] * 2)
if (child := os.fork()) == 0:
    THREADS.spread([lambda: None] * 2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "7"
