"""`ThreadPool`: how many threads compute, where, and when not."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import WorkerStream
from opweave.errors import PluginError
from opweave.runtime.host.cores import usable_cores
from opweave.runtime.host.threads import node_processors

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be placed here")


def test_its_size_is_that_of_the_process_unless_given() -> None:
    assert ow.ThreadPool().size == usable_cores().usable
    assert ow.ThreadPool(3).size == 3


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "many"])
def test_wrong_sizes(size: Any) -> None:
    with pytest.raises(PluginError, match="positive whole number"):
        ow.ThreadPool(size)


def test_its_threads_move_off_the_processor_of_the_thread_that_gives_them_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves: list[int] = []
    done = threading.Event()
    monkeypatch.setattr("opweave.runtime.host.threads.current_processor", lambda: 5)
    monkeypatch.setattr("opweave.processors.Apart.move_off", lambda apart, processor: moves.append(processor))
    pool = ow.ThreadPool(2)
    pool.spread([list, list])
    assert moves == [5]
    pool.lend(done.set, lambda: None)
    assert done.wait(20)
    assert moves == [5, 5]


def test_jobs_run_at_once_in_its_threads_and_none_beside_them() -> None:
    pool, meet = ow.ThreadPool(2), threading.Barrier(2, timeout=20)
    seen: list[int] = []

    def job() -> None:
        seen.append(threading.get_ident())
        meet.wait()

    pool.spread([job, job])
    pool.spread([job, job])
    assert seen[0] == threading.get_ident() or seen[1] == threading.get_ident()
    assert len(set(seen)) == 2
    pool.close()
    counted: list[int] = []
    pool.spread([lambda: counted.append(threading.get_ident())] * 3)
    assert counted == [threading.get_ident()] * 3


def test_the_first_error_comes_out_when_all_jobs_have_ended() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ow.ThreadPool(2).spread([lambda: time.sleep(0.01), fail, lambda: done.append(1)])
    assert done == [1]


@needs_affinity
def test_runs_and_jobs_are_on_its_processors_and_leave_them_again() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    pool = ow.ThreadPool(2, affinity=[one])
    found: list[set[int]] = []
    with pool, pool:
        pool.spread([lambda: found.append(os.sched_getaffinity(0)), lambda: found.append(os.sched_getaffinity(0))])
    assert found == [{one}, {one}]
    assert os.sched_getaffinity(0) == before
    assert ow.ThreadPool(affinity=[one]).size == 1


@needs_affinity
@pytest.mark.parametrize("affinity", [[10_000], [], ["a"], 5, "socket:0", "node:99"])
def test_wrong_processors(affinity: Any) -> None:
    with pytest.raises(PluginError):
        ow.ThreadPool(affinity=affinity)


@needs_affinity
def test_the_processors_of_numa_nodes(tmp_path: Path) -> None:
    for node, text in ((0, "0-2,6\n"), (1, "3-5,7\n"), (2, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    assert node_processors(0, tmp_path) == {0, 1, 2, 6}
    assert node_processors(1, tmp_path) == {3, 4, 5, 7}
    assert node_processors(2, tmp_path) == set()
    with pytest.raises(PluginError, match=r"no NUMA node 3.*\n?.*0, 1, 2"):
        node_processors(3, tmp_path)


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="no nice values here")
def test_its_threads_have_its_priority_and_the_caller_keeps_its_own() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    pool = ow.ThreadPool(2, priority=own + 7)
    found: list[tuple[bool, int]] = []
    main = threading.get_ident()

    def job() -> None:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found.append((threading.get_ident() == main, nice))
        time.sleep(0.01)

    pool.spread([job, job])
    assert (False, own + 7) in found
    assert all(nice == own for here, nice in found if here)
    with pytest.raises(PluginError, match="nice value"):
        ow.ThreadPool(priority=20)


def test_no_run_begins_while_it_is_paused() -> None:
    pool, began = ow.ThreadPool(2), threading.Event()

    def run() -> None:
        with pool:
            began.set()

    pool.pause()
    pool.pause()
    assert pool.paused
    thread = threading.Thread(target=run)
    thread.start()
    assert not began.wait(0.1)
    pool.resume()
    thread.join(20)
    assert began.is_set()
    assert not pool.paused
    pool.resume()


@pytest.mark.parametrize("name", ["cpu", "torch:cpu", "ort:cpu"])
def test_programs_and_schedulers_share_it(name: str) -> None:
    try:
        device = ow.device(name)
    except (ow.PluginError, ow.UnknownNameError):
        pytest.skip(f"{name} is not here")
    pool = ow.ThreadPool(2, affinity=os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None)
    x, w = ow.input("x", (64, 512)), ow.weights({"w": np.ones((256, 512), np.float32)})["w"]
    fed = np.ones((64, 512), np.float32)
    with ow.Scheduler([device, "host"], threads=pool) as one, ow.Scheduler([device, "host"], threads=pool) as other:
        programs = [scheduler.build(ow.linear(x, w)) for scheduler in (one, other)]
        assert all(scheduler.streams[0].threads == 2 for scheduler in (one, other))  # type: ignore[attr-defined]
        for program in programs:
            np.testing.assert_array_equal(program.run(x=fed), np.full((64, 256), 512, np.float32))
        pool.pause()
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(programs[1].run(x=fed)))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert results == []
        pool.resume()
        thread.join(20)
        np.testing.assert_array_equal(results[0], np.full((64, 256), 512, np.float32))


def test_devices_that_compute_at_once_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for name in ("cpu", "torch:cpu", "ort:cpu"):
        try:
            names.append(ow.device(name).name)
        except (ow.PluginError, ow.UnknownNameError):
            continue
    if len(names) < 2:
        pytest.skip("one device that computes in threads")
    cores = usable_cores()._replace(machine=12, affinity=12, quota=None)
    monkeypatch.setattr("opweave.runtime.host.cores.usable_cores", lambda: cores)
    with ow.Scheduler(names, parallel=True) as scheduler:
        inner = [stream.inner for stream in scheduler.streams if isinstance(stream, WorkerStream)]
        assert [stream.opened_with["threads"] for stream in inner] == [12 // len(names)] * len(names)
    with ow.Scheduler(names) as scheduler:
        assert all(stream.opened_with == {} for stream in scheduler.streams)


def test_lent_threads_are_recalled_for_other_jobs() -> None:
    recalled, begun, done = threading.Event(), threading.Event(), threading.Event()

    def wait_for_recall() -> None:
        begun.set()
        recalled.wait(30)
        done.set()

    pool = ow.ThreadPool(2)
    pool.lend(wait_for_recall, recalled.set)
    assert begun.wait(30)
    assert not done.wait(0.01)
    found: list[int] = []
    pool.spread([lambda: found.append(1), lambda: found.append(2)])
    assert done.is_set()
    assert sorted(found) == [1, 2]
    pool.close()
    recalled.clear()
    begun.clear()
    pool.lend(wait_for_recall, recalled.set)
    assert not begun.wait(0.05)
