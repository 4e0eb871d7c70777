"""Two queues that act as one: what touches the same bytes keeps its order, what does not may run beside it."""

from __future__ import annotations

import gc
from threading import Thread
from weakref import ref

import numpy as np
import pyopencl as cl
import pytest

from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave_opencl.queues import MANY, SMALL, Touched, Work

N = 1 << 18  # floats: 1 MiB
BYTES = 4 * N


def vector(buffer, offset=0, n=N):
    return Arg(buffer, offset, as_dtype("f32"), (n,), (4,))


@pytest.fixture
def buffers(device):
    made = [device.alloc(BYTES) for _ in range(3)]
    for buffer in made:
        buffer.clear()
    return made


@pytest.fixture
def gate(stream):
    """Holds up the kernels of the stream until it is opened."""
    event = cl.UserEvent(stream.target.context)
    cl.enqueue_barrier(stream.queue, wait_for=[event])
    yield event
    if event.command_execution_status > 0:
        event.set_status(cl.command_execution_status.COMPLETE)


def open_(event):
    event.set_status(cl.command_execution_status.COMPLETE)


def plus(out, a, b):
    return Step("add", vector(out), (vector(a), vector(b)), {})


# --- what touches what ------------------------------------------------------------------------------------------------


A, B = object(), object()


@pytest.mark.parametrize(
    ("some", "others", "expected"),
    [
        (Touched(A, 0, 10, True), Touched(A, 9, 20, False), True),
        (Touched(A, 0, 10, False), Touched(A, 9, 20, True), True),
        (Touched(A, 0, 10, True), Touched(A, 10, 20, True), False),
        (Touched(A, 0, 10, False), Touched(A, 0, 10, False), False),
        (Touched(A, 0, 10, True), Touched(B, 0, 10, True), False),
    ],
)
def test_order_matters_where_one_writes_what_the_other_touches(some, others, expected):
    assert Work([some]).meets(Work([others])) is expected
    assert Work([others]).meets(Work([some])) is expected


def test_ranges_that_touch_become_one():
    work = Work([Touched(A, 20, 30, True), Touched(A, 0, 10, True), Touched(A, 10, 20, True), Touched(A, 5, 8, False)])
    assert sorted((r.begin, r.end, r.written) for r in work.ranges) == [(0, 30, True), (5, 8, False)]


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_transfer_that_touches_nothing_under_way_runs_beside_it(stream, buffers, gate):
    a, b, other = buffers
    stream.compile([plus(a, a, b)]).run()
    stream.upload(other, 0, np.full(N, 3, np.float32))
    assert stream.queues.split
    (upload,) = stream.queues._moving.values()
    upload.wait()  # while the kernels are held up
    assert gate.command_execution_status > 0
    open_(gate)
    stream.synchronize()
    assert (other.read().view(np.float32) == 3).all()


def test_small_transfers_share_the_queue_of_the_kernels(stream, buffers):
    stream.upload(buffers[0], 0, np.ones(SMALL // 4 - 1, np.float32))
    stream.synchronize()
    assert not stream.queues.split


def test_kernels_wait_for_what_they_read(stream, buffers):
    a, b, out = buffers
    plan = stream.compile([plus(out, a, b)])
    for value in range(10):
        stream.upload(a, 0, np.full(N, value, np.float32))
        stream.upload(b, 0, np.full(N, 100, np.float32))
        plan.run()
        got = np.empty(N, np.float32)
        stream.download(out, 0, got)
        stream.synchronize()
        assert (got == 100 + value).all()


def test_an_upload_waits_for_kernels_that_read_what_it_overwrites(stream, buffers, gate):
    a, b, out = buffers
    b.upload(0, np.full(N, 5, np.float32))
    stream.compile([plus(out, a, b)]).run()
    stream.upload(b, 0, np.full(N, 9, np.float32))
    open_(gate)
    stream.synchronize()
    assert (out.read().view(np.float32) == 5).all()
    assert (b.read().view(np.float32) == 9).all()


def test_a_download_waits_for_the_kernels_that_write_it(stream, buffers, gate):
    a, b, out = buffers
    a.upload(0, np.full(N, 5, np.float32))
    stream.compile([plus(out, a, b)]).run()
    got = np.empty(N, np.float32)
    stream.download(out, 0, got)
    open_(gate)
    stream.synchronize()
    assert (got == 5).all()


def test_transfers_on_either_queue_keep_their_order(stream, buffers):
    """Large ones go beside the kernels, small ones between them."""
    a = buffers[0]
    for value in range(20):
        stream.upload(a, 0, np.full(N, value, np.float32))
        stream.upload(a, 16, np.full(4, -value, np.float32))
        got = np.empty(N, np.float32)
        stream.download(a, 0, got)
        stream.synchronize()
        assert (got[4:8] == -value).all()
        assert (got[8:] == value).all()


def test_without_waiting_in_between(stream, buffers):
    a, b, out = buffers
    plan = stream.compile([plus(out, a, b), plus(a, out, b)])
    results = []
    want = np.zeros(N, np.float32)
    for value in range(12):
        stream.upload(b, 0, np.full(N, value, np.float32))
        plan.run()
        results.append(np.empty(N, np.float32))
        stream.download(a, 0, results[-1])
    stream.synchronize()
    for value, got in enumerate(results):
        want += 2 * value
        np.testing.assert_array_equal(got, want)


def test_a_mark_covers_both_queues(device, stream, buffers, gate):
    a, b, other = buffers
    stream.compile([plus(a, a, b)]).run()
    stream.upload(other, 0, np.full(N, 3, np.float32))
    mark = stream.record()
    assert not mark.done
    assert len(mark._handle) == 2
    open_(gate)
    got = np.empty(N, np.float32)
    with device.open() as second:
        second.wait(mark)
        second.download(other, 0, got)
        second.synchronize()
    assert (got == 3).all()


def test_both_queues_wait_for_a_mark(device, stream, buffers, gate):
    """The first transfer after a wait may be what makes the second queue."""
    a, b, _ = buffers
    b.upload(0, np.full(N, 5, np.float32))
    stream.compile([plus(a, a, b)]).run()
    got = np.empty(N, np.float32)
    with device.open() as second:
        second.wait(stream.record())
        second.download(a, 0, got)
        open_(gate)
        second.synchronize()
    assert (got == 5).all()


def test_little_is_kept_of_long_work(stream, buffers):
    for value in range(4 * MANY):
        stream.upload(buffers[0], 0, np.full(16, value, np.float32))
    stream.synchronize()
    assert not stream.queues._computing
    for value in range(3 * MANY):
        stream.upload(buffers[0], 0, np.full(16, value, np.float32))
        stream.queue.finish()
    assert len(stream.queues._computing) <= MANY + 1
    assert len(stream._transfers) <= MANY + 1, "each keeps its array alive"


def test_waiting_often_keeps_little(device, stream, buffers):
    with device.open() as other:
        for _ in range(3 * MANY):
            stream.compile([plus(buffers[0], buffers[0], buffers[1])]).run()
            other.queues.wait(stream.record()._handle)
            stream.queue.finish()
        other.synchronize()
        assert len(other.queues._gate) <= MANY + 1


# --- collections in the middle ----------------------------------------------------------------------------------------


class Collecting(dict):
    """Cyclic garbage is collected while it is looked at, which may happen whenever something is allocated."""

    def copy(self):
        gc.collect()
        return super().copy()

    def items(self):
        gc.collect()
        return super().items()


def test_a_buffer_that_is_collected_while_the_queues_are_looked_at_waits_for_nobody(device, stream, buffers):
    a, b, _ = buffers
    stream.compile([plus(a, a, b)]).run()
    stream.queues._computing = Collecting(stream.queues._computing)
    held = [device.alloc(BYTES)]
    held.append(held)
    gone = ref(held[0])
    del held
    waiting = Thread(target=stream.synchronize, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    assert gone() is None


def test_memory_under_queued_work_is_dropped_without_waiting(device):
    gate = cl.UserEvent(device.context)
    taken = device.account.taken
    with device.open() as stream:
        cl.enqueue_barrier(stream.queue, wait_for=[gate])
        a, b = device.alloc(BYTES), device.alloc(BYTES)
        stream.compile([plus(b, a, a)]).run()
        del a, b
        gc.collect()
        device.alloc(16)
        assert device.account.taken >= taken + 2 * BYTES
        gate.set_status(cl.command_execution_status.COMPLETE)
        stream.synchronize()
        assert device.account.taken == taken
