"""Synchronous programs over devices that work asynchronously: every transfer waits for the work that it depends on."""

from __future__ import annotations

import gc
import random
import re
import weakref
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Call, MemorySpace
from opweave.contract.kernels import KernelTable
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from tests.core.scheduler.test_random import run_case
from tests.support.async_device import AsyncDevice, Boom, ThreadStream, array
from tests.support.devices import BASIC, Separate
from tests.support.lazy_device import LazyDevice
from tests.support.random_graphs import ALL_OPS

F = np.float32


def reference_later(stream: Any, op: str, out: Arg, *srcs: Arg, **attrs: Any) -> Call:
    """The op's reference, run by the stream's thread."""
    definition, target, arrays = OPS[op], array(out), list(map(array, srcs))

    def work() -> None:
        if stream.device.fails == op:
            raise Boom(f"planted in {op}")
        if definition.writes:
            definition.reference(target, *arrays, **attrs)
        else:
            target[...] = definition.reference(*arrays, **attrs)

    call: Call = stream.later(work)
    return call


class Reference(AsyncDevice):
    """Every basic op, asynchronously, in memory of its own."""

    fails = ""

    def __init__(self, name: str, ops: tuple[str, ...] = BASIC, delay: float = 0.0) -> None:
        self.name = name
        self.space = MemorySpace(name)
        self.delay = delay
        self.kernels = KernelTable("f32", "strided")
        self.kernels(*ops, inplace=True)(reference_later)

    def _open(self, **params: Any) -> ThreadStream:
        return ThreadStream(self, self.delay)


def asynchronous_devices(rng: random.Random) -> list[ow.Device]:
    devices = [
        Reference(f"d{i}", tuple(op for op in ALL_OPS if rng.random() < 0.8), rng.choice([0.0, 0.0005]))
        for i in range(rng.randint(1, 3))
    ]
    return [*devices, HostDevice()]


@pytest.mark.parametrize("block", range(4))
def test_random_graphs_over_asynchronous_devices_equal_the_references(block):
    seen = [run_case(90_000 + block * 20 + i, asynchronous_devices) for i in range(20)]
    assert seen.count("checked") >= 15


def test_memory_is_not_reused_before_a_slow_stream_has_read_it():
    slow = Reference("slow", delay=0.02)
    x = ow.input("x", (64,))
    a = ow.neg(x)  # on the host
    b = ow.exp(a)  # on the slow device, which reads a's bytes late
    c = ow.neg(ow.scale(x, 3.0))  # on the host again, where a's memory is free by now
    s = ow.Scheduler([slow, HostDevice()])
    program = s.build([b, c], dict.fromkeys([a, c, c.srcs[0]], "hostdevice") | {b: slow})
    v = np.linspace(-1, 1, 64, dtype=F)
    for _ in range(3):
        got_b, got_c = program.run(x=v)
        np.testing.assert_allclose(got_b, np.exp(-v), rtol=1e-6)
        np.testing.assert_allclose(got_c, -3 * v, rtol=1e-6)
    s.close()


@pytest.mark.parametrize("parallel", [False, True])
def test_a_late_failure_names_the_work_that_may_have_failed_not_what_waited_for_it(parallel):
    device, x = Reference("late", ("exp", "neg")), ow.input("x", (16,))
    device.fails = "exp"
    y = ow.exp(x)
    named = {
        y.describe(): ow.tanh(y),
        "split 0": ow.tanh(ow.neg(y)),
        "split 0 or split 2": ow.neg(ow.tanh(y)),
    }
    if not parallel:  # the host waits before the second one is submitted
        named[y.describe()] = named.pop("split 0 or split 2")
    for node, output in named.items():
        with ow.Scheduler([device, HostDevice()], parallel=parallel) as s:
            with pytest.raises(
                ow.ExecutionError, match="^" + re.escape(f"{node} failed on late: Boom: planted")
            ) as caught:
                s.build(output).run(x=np.ones(16, F))
            assert (caught.value.node, caught.value.device) == (node, "late")


def test_a_late_failure_names_the_device_and_the_states_that_its_split_writes():
    device = Reference("late")
    x = ow.input("x", (16,))
    cache, other = ow.state("cache", (16,), device=device), ow.state("other", (16,))
    written = ow.assign(cache, ow.exp(x))
    kept = ow.assign(other, x)
    s = ow.Scheduler([device, HostDevice()])
    program = s.build([ow.neg(written), kept], {kept: "hostdevice"})
    v = np.ones(16, F)
    program.run(x=v)
    device.fails = "exp"
    with pytest.raises(ow.ExecutionError, match=r"late.*planted in exp.*half written: cache") as caught:
        program.run(x=v)
    assert caught.value.device == "late"
    assert caught.value.states == ("cache",)
    with pytest.raises(ow.ExecutionError, match="write it anew"):
        ow.read(cache)
    device.fails = ""
    program.write(cache, np.zeros(16, F))
    result, _ = program.run(x=v)
    np.testing.assert_allclose(result, -np.exp(v), rtol=1e-6)
    s.close()


class WatchedStream(ThreadStream):
    def recover(self) -> None:
        device: Any = self.device
        device.recovering()
        super().recover()


class Watched(Reference):
    """Tells when its stream recovers."""

    recovering: Any

    def _open(self, **params: Any) -> ThreadStream:
        return WatchedStream(self, self.delay)


def test_no_stream_recovers_while_another_one_still_works_on_the_run_that_failed():
    first, slow = Watched("first"), Reference("slow", delay=0.05)
    ended: list[bool] = []
    end: ow.Event
    first.recovering = lambda: ended.append(end.done)
    with ow.Scheduler([first, slow], parallel=True) as scheduler:
        x = ow.input("x", (4,))
        fails, works = ow.neg(x), ow.exp(x)
        program = scheduler.build([fails, works], pins={fails: first, works: slow})
        program.run(x=np.zeros(4, F))
        ended.clear()
        first.fails = "neg"
        future = program.submit(x=np.zeros(4, F))
        end = scheduler.streams[1].record()
        with pytest.raises(ow.ExecutionError, match="planted in neg"):
            future.result(60)
        assert ended
        assert all(ended)
        first.fails = ""
        assert program.run(x=np.ones(4, F))[0].tolist() == [-1] * 4


def test_fed_arrays_may_change_as_soon_as_run_returns():
    device = Reference("slow", delay=0.01)
    x = ow.input("x", (16,))
    s = ow.Scheduler([device, HostDevice()])
    program = s.build(ow.neg(ow.neg(x)))
    v = np.arange(16, dtype=F)
    result = program.run(x=v)
    v[:] = 0
    np.testing.assert_array_equal(result, np.arange(16, dtype=F))
    s.close()


def test_a_run_waits_for_uploads_to_devices_that_run_no_step():
    """Inputs that are outputs, or that no node reads, are fed on the last device, where nothing else runs."""
    x, y = ow.input("x", (16,)), ow.input("y", (16,))
    with ow.Scheduler([Separate("a"), LazyDevice()]) as s:
        program = s.build([x, ow.neg(y)])
        assert len(program.splits) == 1
        for value in range(1, 4):
            fed = np.full(16, value, F)
            passed, computed = program.run(x=fed, y=fed)
            fed[:] = 0  # read before `run` returned
            np.testing.assert_array_equal(passed, np.full(16, value, F))
            np.testing.assert_array_equal(program.read(x), np.full(16, value, F))
            np.testing.assert_array_equal(computed, np.full(16, -value, F))


def test_fed_arrays_are_let_go_when_their_run_has_ended():
    x = ow.input("x", (4,))
    with ow.Scheduler([Reference("g"), HostDevice()]) as scheduler:
        program = scheduler.build(ow.neg(x))
        alive = []
        for _ in range(3):
            fed = np.ones(4, F)
            alive.append(weakref.ref(fed))
            assert program.run(x=fed).tolist() == [-1] * 4
            del fed
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3
