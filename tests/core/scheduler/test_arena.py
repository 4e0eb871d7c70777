"""Memory of temporaries: shared by programs, never moved under one, given back with the last that uses it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from weakref import WeakValueDictionary

import numpy as np
import pytest

import opweave as ow
from opweave.contract import BufferType, Usage
from opweave.graph import tensor
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.compile.arena import Arena, Lease
from opweave.scheduler.place.target import Target
from opweave.scheduler.plan.chunks import Block, plan_chunks
from tests.support.devices import Plain, Separate

F = np.float32


@pytest.fixture
def traced(monkeypatch) -> Iterator[None]:
    # Tables of its own: those of the process are as large as what other tests keep, and grow by megabytes at a time.
    for table in ("_NODES", "_SIGNATURES"):
        monkeypatch.setattr(tensor, table, WeakValueDictionary())
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def net(n: int) -> ow.Tensor:
    x = ow.input(f"x{n}", (n, 64))
    return ow.exp(ow.neg(ow.exp(x))) + x


def fresh(n: int) -> int:
    """What a new scheduler takes for the largest graph alone."""
    with ow.Scheduler(Plain()) as scheduler:
        scheduler.build(net(n))
        return scheduler.buffer_size(scheduler.devices[0])


def test_programs_that_are_closed_give_their_memory_back(traced):
    scheduler = ow.Scheduler(Plain())
    (device,) = scheduler.devices
    most, before = fresh(600), held()
    tracemalloc.reset_peak()
    for n in range(1, 600):
        program = scheduler.build(net(n))
        assert program.run({f"x{n}": np.zeros((n, 64), F)}).shape == (n, 64)
        program.close()
        assert scheduler.buffer_size(device) == 0
    assert tracemalloc.get_traced_memory()[1] - before < 8 * most  # kernels have temporaries of their own
    del program
    assert held() - before < 0.5 * most


def test_programs_that_each_need_a_little_more_do_not_add_up(traced):
    scheduler = ow.Scheduler(Plain())
    (device,) = scheduler.devices
    before = held()
    for n in range(1, 600):
        scheduler.build(net(n)).run({f"x{n}": np.zeros((n, 64), F)})
    most = fresh(600)
    assert scheduler.buffer_size(device) < 4 * most
    assert held() - before < 4 * most + (2 << 20)  # 64 programs themselves
    scheduler.close()


@pytest.mark.parametrize("kept", ["all of it", "only the latest"])
def test_a_compiled_function_holds_what_its_programs_need(traced, kept):
    function = ow.compile(lambda x: ow.exp(ow.neg(ow.exp(x))) + x, devices=Plain())
    (device,) = function.scheduler.devices
    function(np.zeros((1, 64), F))
    before = held()
    for n in range(2, 600):
        function(np.zeros((n, 64), F))
        if kept == "only the latest":
            function.program(np.zeros((n, 64), F)).close()
    assert function.scheduler.buffer_size(device) < 4 * fresh(600)
    assert held() - before < 4 * fresh(600) + (2 << 20)


def test_a_thousand_shapes_of_one_size_leave_nothing_behind(traced):
    weights = ow.weights({"w": np.ones((64, 64), F)})
    function = ow.compile(lambda x: ow.exp(ow.linear(x, weights["w"])), devices=Plain())
    shapes = [(a, b, c, 64) for a in range(1, 13) for b in range(1, 13) for c in range(1, 13)]
    for shape in shapes[:200]:
        function(np.zeros(shape, F))
    before = held() - function.scheduler.buffer_size("plain")
    for shape in shapes[200:1200]:
        function(np.zeros(shape, F))
    assert held() - function.scheduler.buffer_size("plain") - before < 400_000


def test_memory_in_use_neither_moves_nor_goes():
    scheduler = ow.Scheduler([Separate("g"), HostDevice()])
    programs = {n: scheduler.build(net(n)) for n in (5, 300, 20, 400)}
    values = {n: np.random.default_rng(n).standard_normal((n, 64)).astype(F) for n in programs}
    regions = {n: program.memory_map().places for n, program in programs.items()}
    while programs:
        for n, program in programs.items():
            expected = np.exp(-np.exp(values[n])) + values[n]
            np.testing.assert_allclose(program.run({f"x{n}": values[n]}), expected, rtol=1e-5, atol=1e-6)
            assert program.memory_map().places == regions[n]
        programs.popitem()[1].close()
    assert scheduler.buffer_size("g") == 0


def test_programs_of_like_sizes_lie_over_each_other():
    scheduler = ow.Scheduler(Plain())
    sizes = [400, 440, 380, 420]
    programs = [scheduler.build(net(n)) for n in sizes]
    assert scheduler.buffer_size("plain") < 2 * max(p.memory["plain"].temporaries for p in programs)


def test_what_was_reserved_stays_until_the_scheduler_is_reset():
    scheduler = ow.Scheduler(Plain())
    size = scheduler.reserve(net(300))["plain"]
    scheduler.build(net(300)).close()
    for n in range(1, 100):
        scheduler.build(net(n)).close()
    assert scheduler.buffer_size("plain") == size
    scheduler.reset()
    assert scheduler.buffer_size("plain") == 0


def test_max_shapes_stay_reserved_when_many_shapes_come():
    function = ow.compile(lambda x: ow.exp(ow.neg(x)) + x, devices=Plain(), max_shapes={"x": (300, 64)})
    function(np.zeros((1, 64), F))
    size = function.scheduler.buffer_size("plain")
    for n in range(2, 200):
        function(np.zeros((n, 64), F))
        function.program(np.zeros((n, 64), F)).close()
    assert function.scheduler.buffer_size("plain") == size


def test_a_build_fills_up_short_memory_before_it_gives_up():
    device = Plain()
    kind = Scarce(device)
    kind.left = 100_000
    scheduler = ow.Scheduler(device, buffer_types={device: kind})
    first = scheduler.build(net(100))
    taken = scheduler.buffer_size(device)
    assert 2.3 * taken > 100_000 > 1.7 * taken, "a second plan of its own would not fit"
    second = scheduler.build(net(180))
    assert scheduler.buffer_size(device) <= 100_000
    for n, program in ((100, first), (180, second)):
        np.testing.assert_allclose(program.run({f"x{n}": np.zeros((n, 64), F)}), np.exp(F(-1)), rtol=1e-5)


# --- arenas by themselves ---------------------------------------------------------------------------------------------


class Scarce(BufferType):
    """Gives at most so many bytes in all."""

    left = 10_000

    def _alloc(self, size, usage):
        if size > self.left:
            raise MemoryError(f"{self.left} left")
        self.left -= size
        return super()._alloc(size, usage)

    def _free(self, mem):
        self.left += len(mem)


@pytest.fixture
def arena() -> Arena:
    device = Plain()
    device.alignment = 1
    return Arena(Target(0, device.open(), Scarce(device), owned=True))


def take(arena: Arena, *sizes: int, tight: bool = False) -> Lease:
    plan = plan_chunks([Block(size, 0, 9) for size in sizes], 1, arena.capacities(), tight=tight)
    lease = arena.take(plan, tight=tight)
    assert set(lease.chunks) == set(plan.chunks)
    assert all(chunk.size >= plan.sizes[number] for number, chunk in lease.chunks.items())
    assert all(chunk.usage is Usage.COMPUTE for chunk in lease.chunks.values())
    return lease


def test_a_chunk_goes_with_its_last_lease(arena):
    first, second = take(arena, 1000), take(arena, 900)
    assert first.chunks == second.chunks
    (chunk,) = first.chunks.values()
    first.release()
    first.release()
    assert not chunk.freed
    second.release()
    assert chunk.freed
    assert (arena.nbytes, arena.allocated) == (0, 1000)


def test_a_lease_that_is_dropped_counts_no_longer(arena):
    first = take(arena, 1000)
    (chunk,) = first.chunks.values()
    del first
    assert not chunk.freed, "in whatever thread that was, it only left word"
    arena.reclaim()
    assert chunk.freed


def test_a_lease_whose_making_was_interrupted_is_dropped_without_complaint():
    Lease.__new__(Lease).__del__()


def test_only_what_is_filled_is_leased(arena):
    first = take(arena, 1000)
    second = take(arena, 3000)
    (chunk,) = second.chunks.values()
    first.release()
    assert arena.nbytes == chunk.size == 3750
    assert list(take(arena, 3700).chunks.values()) == [chunk]


def test_short_memory_is_filled_up(arena):
    first = take(arena, 4000, 2000)
    with pytest.raises(ow.AllocationError):
        take(arena, 4000, 2000, 4000)  # once more beside the first
    assert arena.nbytes == 6000
    second = take(arena, 4000, 2000, 4000, tight=True)
    assert arena.nbytes == 10_000
    assert first.chunks[0] in second.chunks.values()
    for tight in (False, True):
        with pytest.raises(ow.AllocationError):
            take(arena, 10_001, tight=tight)
    assert arena.nbytes == 10_000
    second.release()
    assert arena.nbytes == 6000
