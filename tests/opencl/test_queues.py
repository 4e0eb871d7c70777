"""The queue of a stream: kernels and transfers in order, and transfers on a second stream beside its kernels."""

from __future__ import annotations

import gc

import numpy as np
import pyopencl as cl
import pytest

from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave_opencl.stream import MANY

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


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_transfer_on_a_second_stream_runs_beside_kernels(device, stream, buffers, gate):
    """As the scheduler brings weights from host memory."""
    a, b, other = buffers
    stream.compile([plus(a, a, b)]).run()
    with device.open() as second:
        second.upload(other, 0, np.full(N, 3, np.float32))
        second.synchronize()  # while the kernels are held up
    assert gate.command_execution_status > 0
    open_(gate)
    stream.synchronize()
    assert (other.read().view(np.float32) == 3).all()


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


def test_transfers_of_any_size_keep_their_order(stream, buffers):
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


def test_an_event_covers_kernels_and_transfers(device, stream, buffers, gate):
    a, b, other = buffers
    stream.compile([plus(a, a, b)]).run()
    stream.upload(other, 0, np.full(N, 3, np.float32))
    event = stream.record()
    assert not event.done
    open_(gate)
    got = np.empty(N, np.float32)
    with device.open() as second:
        second.wait(event)
        second.download(other, 0, got)
        second.synchronize()
    assert (got == 3).all()


def test_a_transfer_waits_for_an_event_of_another_stream(device, stream, buffers, gate):
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
    for value in range(3 * MANY):
        stream.upload(buffers[0], 0, np.full(16, value, np.float32))
        stream.queue.finish()
    assert len(stream._transfers) <= MANY + 1, "each keeps its array alive"


# --- collections in the middle ----------------------------------------------------------------------------------------


def test_memory_under_queued_work_is_dropped_without_waiting(device):
    gate = cl.UserEvent(device.context)
    gc.collect()
    device.synchronize()  # what earlier tests left is freed before it is counted
    taken = device.budget.used
    with device.open() as stream:
        cl.enqueue_barrier(stream.queue, wait_for=[gate])
        a, b = device.alloc(BYTES), device.alloc(BYTES)
        stream.compile([plus(b, a, a)]).run()
        del a, b
        gc.collect()
        device.alloc(16)
        assert device.budget.used >= taken + 2 * BYTES
        gate.set_status(cl.command_execution_status.COMPLETE)
        stream.synchronize()
        assert device.budget.used == taken
