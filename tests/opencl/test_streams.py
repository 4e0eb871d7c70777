"""Streams: asynchronous, in order, and waiting for each other by events."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyopencl as cl
import pytest

from opweave.contract import Arg, Group, Plan, Step, StepError
from opweave.errors import DeviceLostError, ExecutionError, LifetimeError
from opweave.graph.dtypes import as_dtype
from opweave_opencl.errors import translated
from tests.support.opencl import anew

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


def test_an_event_of_another_context_is_waited_for_on_the_host(device, stream, buffers):
    stream.upload(buffers[0], 0, np.ones(N, np.float32))
    stream.compile([doubling(buffers)] * 4).run()
    event = stream.record()
    with anew(device).open() as other:
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


def test_a_failed_event_raises_instead_of_hanging(stream):
    with pytest.raises(ExecutionError, match="status -5"):
        stream._query(SimpleNamespace(command_execution_status=-5))
    complete, running = (
        SimpleNamespace(command_execution_status=status)
        for status in (cl.command_execution_status.COMPLETE, cl.command_execution_status.RUNNING)
    )
    assert stream._query(complete)
    assert not stream._query(running)


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [
        (cl.status_code.DEVICE_NOT_AVAILABLE, DeviceLostError, "stopped answering"),
        (cl.status_code.OUT_OF_RESOURCES, ExecutionError, "more registers or local memory"),
        (cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE, MemoryError, "no memory left"),
        (cl.status_code.INVALID_KERNEL_ARGS, ExecutionError, "failed while submitting a kernel"),
    ],
)
def test_a_kernel_that_cannot_be_submitted_is_a_typed_error(stream, buffers, monkeypatch, code, expected, message):
    planted = DriverError(code)

    def fail(*args):
        raise planted

    good = doubling(buffers)
    with monkeypatch.context() as patch:
        patch.setattr(cl, "enqueue_nd_range_kernel", fail)
        bad = stream._compile([Group((good,)), Group((good,))])
    plan = Plan(stream, bad, 2)
    with pytest.raises(StepError, match=message) as caught:
        plan.run()
    assert caught.value.step == 0
    assert isinstance(caught.value.error, expected)
    assert caught.value.error.__cause__ is planted
    assert stream.failure is caught.value.error
    stream.recover()
    stream.run([good])
    stream.synchronize()


def test_a_group_that_the_device_does_not_take_is_a_typed_error(device, stream, buffers):
    program = device.programs.build("set.cl", "__kernel void set(__global float *out) { out[0] = 1; }")
    huge = 8 * device.cl_device.max_work_group_size
    call = stream.launch(program, "set", (huge,), (huge,), [vector(buffers[0])])
    with pytest.raises(StepError, match="INVALID_WORK_GROUP_SIZE") as caught:
        Plan(stream, [call], 1).run()
    assert isinstance(caught.value.error, ExecutionError)
    assert isinstance(caught.value.error.__cause__, cl.LogicError)
    stream.recover()
