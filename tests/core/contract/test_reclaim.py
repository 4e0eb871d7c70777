"""Buffers without references: finalisers never wait; the memory is freed after the work that may use it."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from functools import partial

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Device, Step, Stream
from opweave.contract.kernels import KernelTable
from opweave.errors import AllocationError
from opweave.graph.dtypes import as_dtype
from opweave.runtime import reclaim as module
from opweave.runtime.host import HostBackend

F32 = as_dtype("f32")
SECONDS = 10

kernels = KernelTable("f32", "dense")


class GateStream(Stream):
    """Its work begins when the device's gate is open. An event is the number of calls queued before it."""

    def __init__(self, device):
        super().__init__(device)
        self.gate = device.gate
        self.queued, self.done = [], 0

    def _run(self, calls):
        self.queued += calls

    def _record(self):
        return len(self.queued)

    def _join(self, mark):
        assert self.gate.wait(SECONDS), "nobody opens the gate"
        for call in self.queued[self.done : mark]:
            call()
        self.done = max(self.done, mark)

    def _query(self, mark):
        return self.done >= mark

    def _synchronize(self):
        self._join(len(self.queued))


class GateDevice(Device):
    kernels = kernels
    stream_class = GateStream

    def __init__(self, capacity=1 << 20):
        self.gate, self.taken, self.capacity, self.frees = threading.Event(), 0, capacity, 0

    def _alloc(self, size, usage):
        if self.taken + size > self.capacity:
            raise MemoryError("the card is full")
        self.taken += size
        return np.zeros(size, np.uint8)

    def _free(self, mem):
        self.taken -= mem.size
        self.frees += 1

    def _address(self, mem):
        return None

    def _upload(self, mem, offset, data):
        mem[offset : offset + len(data)] = data

    def _download(self, mem, offset, out):
        out[:] = mem.data[offset : offset + len(out)]


@kernels("neg", "exp")
def neg(stream, op, out, x):
    if op == "exp":
        gc.collect()  # which may come at any time
    return partial(np.negative, *(arg.mem[arg.offset :][: arg.nbytes].view("f4") for arg in (x, out)))


def vector(buffer):
    return Arg(buffer, 0, F32, (4,), (4,))


def submit(stream, device, op="neg"):
    """Queue work over two buffers and forget them."""
    a, b = device.alloc(16), device.alloc(16)
    stream.compile([Step(op, vector(b), (vector(a),), {})]).run()


@pytest.fixture
def device():
    device = GateDevice()
    yield device
    device.gate.set()
    for stream in list(device.live_streams):
        stream.settle()


def test_memory_under_queued_work_is_put_aside_without_waiting(device):
    stream = device.open()
    submit(stream, device)
    assert device.taken == 32
    device.gate.set()
    stream.synchronize()
    assert device.taken == 0


@pytest.mark.parametrize("what", ["alloc", "compile", "mark"])
def test_who_comes_next_frees_what_is_reached(device, what):
    stream, other = device.open(), device.open()
    submit(stream, device)
    mark = stream.record()
    device.alloc(16)
    assert device.taken >= 32, "it is under way yet"
    device.gate.set()
    mark.synchronize()
    if what == "compile":
        other.compile([])
    else:
        device.alloc(16)
    assert device.taken == 0


def test_streams_without_work_under_way_hold_nothing(device):
    device.gate.set()
    stream = device.open()
    stream.synchronize()
    device.open()
    device.alloc(16)
    assert device.taken == 0
    submit(stream, device)
    stream.record().synchronize()
    device.alloc(16)
    assert device.taken == 0


def test_streams_of_other_memory_hold_nothing(device):
    elsewhere = GateDevice()
    with elsewhere.open() as other:
        submit(other, elsewhere)
        device.alloc(16)
        assert device.taken == 0
        elsewhere.gate.set()


def test_work_that_failed_is_over(device, monkeypatch):
    stream = device.open()
    submit(stream, device)

    def fail():
        raise RuntimeError("the card is gone")

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_synchronize", fail)
        stream.settle()
    assert device.taken == 0
    device.gate.set()


def test_a_stream_that_was_closed_or_forgotten_holds_nothing(device):
    stream = device.open()
    submit(stream, device)
    threading.Timer(0.05, device.gate.set).start()
    stream.close()
    device.alloc(16)
    assert device.taken == 0


def test_an_allocation_that_fails_frees_what_was_discarded_and_tries_again():
    device = GateDevice(capacity=64)
    stream = device.open()
    submit(stream, device)
    threading.Timer(0.05, device.gate.set).start()
    with device.alloc(64) as buffer:
        assert (buffer.size, device.taken) == (64, 64)
        with pytest.raises(AllocationError, match="the card is full"):
            device.alloc(1)
    stream.close()


def test_an_allocation_that_fails_for_another_reason_waits_for_nobody(device):
    stream = device.open()
    kept = device.alloc(16), device.alloc(16)
    stream.compile([Step("neg", vector(kept[1]), (vector(kept[0]),), {})]).run()
    with pytest.raises(AllocationError):
        device.alloc(2 << 20)
    assert not device.gate.is_set()
    device.gate.set()


def test_a_collection_in_the_middle_of_a_build_waits_for_nothing(device):
    """The gate is opened only after the build."""
    garbage = [device.alloc(16)]
    garbage.append(garbage)  # collected by the kernel that is being bound
    with ow.Scheduler([device, HostBackend().devices()[0]]) as scheduler:
        x = ow.input("x", (4,))
        stream = scheduler.streams[0]
        submit(stream, device)
        del garbage
        program = scheduler.build(ow.exp(x), pins={ow.exp(x): device})
        device.gate.set()
        assert program.run(x=np.ones(4, np.float32)).tolist() == [-1] * 4


def test_an_authors_free_does_not_begin_anew(device, monkeypatch):
    """It may allocate, or wait for a stream: what was put aside then comes after it, not within it."""
    stream, depth, deepest = device.open(), 0, 0
    plain = device._free

    def nested(mem):
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        device.alloc(16)
        stream.synchronize()
        plain(mem)
        depth -= 1

    for _ in range(8):
        submit(stream, device)
    device.gate.set()
    with monkeypatch.context() as patch:
        patch.setattr(device, "_free", nested)
        stream.synchronize()
    assert deepest == 1
    stream.synchronize()
    assert device.taken == 0


def test_an_authors_error_is_nobody_elses(device, monkeypatch):
    stream = device.open()
    submit(stream, device)
    device.gate.set()
    with monkeypatch.context() as patch:
        patch.setattr(device, "_free", lambda mem: 1 / 0)
        stream.synchronize()
    assert not module._DISCARDED


def test_plans_end_with_memory_that_was_discarded(device):
    stream = device.open()
    a, b = device.alloc(16), device.alloc(16)
    plan = stream.compile([Step("neg", vector(b), (vector(a),), {})])
    plan.run()
    del a, b
    with pytest.raises(ow.LifetimeError, match="was freed"):
        plan.run()
    device.gate.set()


def test_freeing_by_hand_still_waits(device):
    stream = device.open()
    a, b = device.alloc(16), device.alloc(16)
    stream.compile([Step("neg", vector(b), (vector(a),), {})]).run()
    threading.Timer(0.05, device.gate.set).start()
    a.free()
    assert device.gate.is_set()
    assert stream.done == 1
    b.free()
    assert device.taken == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children")
def test_a_forked_child_leaves_the_memory_to_its_parent(device):
    """What a driver gave to the parent is not freed a second time, not even at the child's exit."""
    stream = device.open()
    submit(stream, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        device.gate.set()
        module.reclaim()
        os._exit(0 if (device.frees, len(module._DISCARDED)) == (0, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    device.gate.set()
    stream.synchronize()
    assert device.taken == 0
