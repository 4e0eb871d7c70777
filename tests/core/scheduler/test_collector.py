"""Python's garbage collector during builds, and what becomes of the objects that large builds make."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from opweave.scheduler.compile.collector import _Collector


class Node:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, as in a program; the objects of the test run are again afterwards."""
    gc.unfreeze()
    yield
    gc.collect()  # what is garbage now would stay for ever
    gc.freeze()


def build(collector: _Collector, objects: int) -> list[list[int]]:
    with collector.paused():
        assert not gc.isenabled()
        return [[] for _ in range(objects)]


@pytest.mark.usefixtures("thawed")
def test_objects_of_large_builds_are_parked_and_small_ones_are_not():
    collector = _Collector()
    build(collector, 100)
    assert collector.parked == 0
    build(collector, 2 * gc.get_threshold()[0])
    assert collector.parked >= 2 * gc.get_threshold()[0]
    assert gc.get_freeze_count() == 0
    assert gc.get_count()[0] < gc.get_threshold()[0]  # a collection of the young does not examine them
    assert gc.isenabled()


@pytest.mark.usefixtures("thawed")
def test_garbage_of_many_large_builds_is_collected_before_the_next():
    collector = _Collector()
    collector.parked = collector.MANY + 1
    node = Node()
    gone = weakref.ref(node)
    gc.collect()
    gc.freeze()
    gc.unfreeze()  # it is old now, where only a full collection finds it
    del node
    build(collector, 1)
    assert gone() is None
    assert collector.parked == 0


def test_what_a_program_has_frozen_or_switched_off_stays_so():
    collector = _Collector()
    gc.collect()
    gc.freeze()
    before = gc.get_freeze_count()
    build(collector, 2 * gc.get_threshold()[0])
    assert gc.get_freeze_count() >= before > 0
    assert collector.parked == 0
    gc.disable()
    try:
        build(collector, 1)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.usefixtures("thawed")
def test_frozen_objects_are_not_counted_in_each_build(monkeypatch):
    collector, counted, frozen = _Collector(), [], [1_000_000]

    def count() -> int:
        counted.append(frozen[-1])
        return frozen[-1]

    monkeypatch.setattr(gc, "get_freeze_count", count)
    for _ in range(1 + collector.UNASKED):
        build(collector, 2 * gc.get_threshold()[0])
    assert counted == [1_000_000]
    assert collector.parked == 0
    frozen.append(0)  # the program has unfrozen them
    build(collector, 2 * gc.get_threshold()[0])
    assert counted == [1_000_000, 0]
    assert collector.parked > 0


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(ZeroDivisionError), _Collector().paused():
        raise ZeroDivisionError
    assert gc.isenabled()
