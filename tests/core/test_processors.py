"""`Apart`: a thread that others wake computes on another processor than they."""

from __future__ import annotations

import os

import pytest

from opweave import processors
from opweave.processors import NOWHERE, Apart, current_processor


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system places threads itself")
def test_a_thread_moves_off_the_processor_of_the_one_that_woke_it(monkeypatch):
    apart, moves, usable = Apart(), [], {0, 1, 2}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: moves.append(set(given)))
    here = [1]
    monkeypatch.setattr(processors, "current_processor", lambda: here[0])
    for processor in (NOWHERE, 0, 2):
        apart.move_off(processor)
        assert moves == [], "it runs elsewhere"
    apart.move_off(1)
    assert moves == [{0, 2}, {0, 1, 2}]
    apart.move_off(1)
    assert len(moves) == 2, "not at every wake"
    apart._next, usable = 0.0, {1}
    apart.move_off(1)
    assert len(moves) == 2, "there is no other one"


def test_a_thread_may_use_the_same_processors_as_before():
    before = getattr(os, "sched_getaffinity", lambda _: None)(0)
    Apart().move_off(current_processor())
    assert getattr(os, "sched_getaffinity", lambda _: None)(0) == before
