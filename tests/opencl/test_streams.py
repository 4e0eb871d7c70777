"""Streams: asynchronous, in order, and waiting for each other by events."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyopencl as cl
import pytest

from opweave.contract import Arg, Step
from opweave.dtypes import as_dtype
from opweave.errors import DeviceLostError, ExecutionError, LifetimeError
from opweave_opencl.errors import translated

N = 1 << 20


def vector(buffer, n=N):
    return Arg(buffer, 0, as_dtype("f32"), (n,), (4,))


@pytest.fixture
def buffers(device):
    return [device.alloc(4 * N) for _ in range(2)]


def doubling(buffers):
    """A step that doubles the first buffer in place."""
    x = vector(buffers[0])
    return Step("add", x, (x, x), {})


def test_work_runs_in_order(stream, buffers):
    data, out = np.ones(N, np.float32), np.empty(N, np.float32)
    stream.upload(buffers[0], 0, data)
    plan = stream.compile([doubling(buffers)] * 10)
    plan.run()
    stream.download(buffers[0], 0, out)
    stream.synchronize()
    assert (out == 1024).all()


def test_an_event_is_done_after_the_work_before_it(stream, buffers):
    stream.upload(buffers[0], 0, np.ones(N, np.float32))
    stream.compile([doubling(buffers)] * 5).run()
    event = stream.record()
    event.synchronize()
    assert event.done
    assert buffers[0].read().view(np.float32)[0] == 32


def test_done_becomes_true_without_waiting_for_the_stream(stream, buffers):
    buffers[0].clear()
    stream.compile([doubling(buffers)] * 3).run()
    event = stream.record()
    for _ in range(10_000_000):
        if event.done:
            break
    assert event.done


def test_a_stream_waits_for_another(device, stream, buffers):
    data, out = np.ones(N, np.float32), np.empty(N, np.float32)
    with device.open() as other:
        stream.upload(buffers[0], 0, data)
        stream.compile([doubling(buffers)] * 8).run()
        other.wait(stream.record())
        other.download(buffers[0], 0, out)
        other.synchronize()
    assert (out == 256).all()


def test_an_event_of_another_context_is_waited_for_on_the_host(stream, buffers):
    from opweave_opencl import OpenCLBackend

    stream.upload(buffers[0], 0, np.ones(N, np.float32))
    stream.compile([doubling(buffers)] * 4).run()
    event = stream.record()
    with OpenCLBackend().devices()[0].open() as other:
        other.wait(event)
        assert event.done


def test_arrays_live_until_a_transfer_is_done(stream, buffers):
    for value in range(8):
        stream.upload(buffers[0], 0, np.full(N, value, np.float32))
    out = np.empty(N, np.float32)
    stream.download(buffers[0], 0, out)
    stream.synchronize()
    assert (out == 7).all()


def test_parameters_are_refused_by_name(device):
    with pytest.raises(TypeError, match="threads"):
        device.open(threads=2)


def test_a_closed_stream(device, buffers):
    stream = device.open()
    stream.close()
    with pytest.raises(LifetimeError):
        stream.record()
    with pytest.raises(LifetimeError):
        stream.compile([doubling(buffers)])


class DriverError(Exception):
    def __init__(self, code):
        self.code = code
        super().__init__(f"status {code}")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE, MemoryError),
        (cl.status_code.OUT_OF_HOST_MEMORY, MemoryError),
        (cl.status_code.INVALID_BUFFER_SIZE, MemoryError),
        (cl.status_code.OUT_OF_RESOURCES, ExecutionError),
        (cl.status_code.DEVICE_NOT_AVAILABLE, DeviceLostError),
        (cl.status_code.INVALID_CONTEXT, DeviceLostError),
        (cl.status_code.INVALID_COMMAND_QUEUE, DeviceLostError),
        (cl.status_code.INVALID_KERNEL_ARGS, ExecutionError),
    ],
)
def test_driver_errors_are_typed(code, expected):
    with pytest.raises(expected, match="status"), translated("opencl:0", "testing"):
        raise DriverError(code)


def test_while_allocating_missing_resources_are_missing_memory():
    with pytest.raises(MemoryError), translated("opencl:0", "allocating", allocating=True):
        raise DriverError(cl.status_code.OUT_OF_RESOURCES)


def test_errors_that_are_not_the_drivers_pass():
    with pytest.raises(ZeroDivisionError), translated("opencl:0", "testing"):
        raise ZeroDivisionError


def test_a_failed_mark_raises_instead_of_hanging(stream):
    with pytest.raises(ExecutionError, match="status -5"):
        stream._query(SimpleNamespace(command_execution_status=-5))
    assert stream._query(SimpleNamespace(command_execution_status=cl.command_execution_status.COMPLETE))
    assert not stream._query(SimpleNamespace(command_execution_status=cl.command_execution_status.RUNNING))
