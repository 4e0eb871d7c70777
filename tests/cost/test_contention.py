"""How long threads have waited for a processor."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from time import perf_counter

import pytest

from opweave_cost.contention import TASKS, seconds_waited


def test_the_threads_of_a_process_are_added_up(tmp_path: Path) -> None:
    for number, text in {"1": "5000 1500000000 7", "2": "1 500000000 2", "3": "", "4": "1 x 3"}.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "schedstat").write_text(text)
    (tmp_path / "5").mkdir()  # it has ended
    assert seconds_waited(tmp_path) == 2.0


def test_systems_that_do_not_say(tmp_path: Path) -> None:
    assert seconds_waited(tmp_path / "nothing") == 0.0


@pytest.mark.skipif(not list(TASKS.glob("*/schedstat")), reason="the system does not say")
def test_two_threads_on_one_processor_wait_for_each_other() -> None:
    processor = {min(os.sched_getaffinity(0))}
    end = perf_counter() + 0.5
    waited: list[float] = []

    def compute() -> None:
        os.sched_setaffinity(0, processor)  # of this thread
        data = bytes(1 << 20)
        while perf_counter() < end:
            hashlib.sha256(data).digest()  # without the interpreter's lock
        waited.append(seconds_waited())  # before the thread ends, which takes its figure with it

    before = seconds_waited()
    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(waited) - before > 0.1
