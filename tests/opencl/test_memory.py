"""Buffers: what is written is read, ranges and life times are kept, memory runs out politely."""

from __future__ import annotations

import numpy as np
import pytest

from opweave.contract import Arg, Group, Step
from opweave.dtypes import as_dtype
from opweave.errors import AllocationError, BoundsError, LifetimeError
from opweave.host import HostBackend

F32 = as_dtype("f32")


def vector(buffer, offset, n):
    return Arg(buffer, offset, F32, (n,), (4,))


@pytest.mark.parametrize("offset", [0, 1, 4, 100, 1000])
@pytest.mark.parametrize("size", [1, 3, 16, 24])
def test_what_is_written_is_read(device, offset, size):
    buffer = device.alloc(1024)
    buffer.clear(7)
    data = np.arange(size, dtype=np.uint8)
    buffer.upload(offset, data)
    expected = np.full(1024, 7, np.uint8)
    expected[offset : offset + size] = data
    np.testing.assert_array_equal(buffer.read(), expected)


@pytest.mark.parametrize(("offset", "size"), [(0, 64), (16, 32), (4, 8), (5, 7), (63, 1)])
def test_fill(device, offset, size):
    buffer = device.alloc(64)
    buffer.clear()
    buffer.fill(0xA5, offset, size)
    expected = np.zeros(64, np.uint8)
    expected[offset : offset + size] = 0xA5
    np.testing.assert_array_equal(buffer.read(), expected)


def test_read_only_memory_can_be_uploaded(device):
    buffer = device.alloc(4)
    buffer.upload(0, b"abcd")
    assert bytes(buffer.read()) == b"abcd"


def test_copies_between_and_within_buffers(device):
    a, b = device.alloc(100), device.alloc(100)
    data = np.arange(100, dtype=np.uint8)
    a.upload(0, data)
    b.clear()
    device._copy(b.handle, 10, a.handle, 20, 30)
    np.testing.assert_array_equal(b.read(10, 30), data[20:50])
    assert not b.read(40).any()
    device._copy(a.handle, 10, a.handle, 0, 50)  # the ranges overlap
    np.testing.assert_array_equal(a.read(10, 50), data[:50])


def test_ranges_outside_are_refused(device):
    buffer = device.alloc(64)
    with pytest.raises(BoundsError):
        buffer.upload(60, b"12345")
    with pytest.raises(BoundsError):
        buffer.read(0, 65)
    with pytest.raises(BoundsError):
        buffer.fill(0, -1, 2)


def test_more_than_one_buffer_can_hold(device):
    with pytest.raises(AllocationError, match="one buffer has at most"):
        device.alloc(device.max_buffer_size + 1)


def test_memory_runs_out_at_allocation(device):
    """Also where the driver would promise more than there is. Memory that nobody touches costs the machine nothing."""
    before, size = device.allocated, device.max_buffer_size
    held = [device.alloc(size) for _ in range(device.mem_info()[0] // size)]
    with pytest.raises(AllocationError) as caught:
        device.alloc(size)
    assert caught.value.requested == size
    assert caught.value.free is not None
    assert caught.value.free < size
    for buffer in held:
        buffer.free()
    assert device.allocated == before
    device.alloc(size).free()


def test_a_buffer_that_was_freed(device, stream):
    buffer, out = device.alloc(64), device.alloc(64)
    step = Step("add", vector(out, 0, 16), (vector(buffer, 0, 16), vector(buffer, 0, 16)), {})
    buffer.free()
    with pytest.raises(LifetimeError):
        buffer.read()
    with pytest.raises(LifetimeError):
        buffer.upload(0, b"1")
    with pytest.raises(LifetimeError):
        stream.compile([step])


def test_a_plan_over_freed_memory(device, stream):
    """Drivers crash on kernels whose memory is gone: the plan refuses to run, and its calls hold the memory."""
    x, out = device.alloc(64), device.alloc(64)
    x.upload(0, np.ones(16, np.float32))
    step = Step("add", vector(out, 0, 16), (vector(x, 0, 16), vector(x, 0, 16)), {})
    plan, (call,) = stream.compile([step]), stream._compile([Group((step,))])
    x.free()
    with pytest.raises(LifetimeError):
        plan.run()
    call()
    stream.synchronize()
    assert out.read().view(np.float32).tolist() == [2.0] * 16


def test_foreign_memory_is_refused(device, stream):
    out = device.alloc(64)
    host = HostBackend().devices()[0].alloc(64)
    with pytest.raises(LifetimeError):
        stream.compile([Step("neg", vector(out, 0, 16), (vector(host, 0, 16),), {})])


@pytest.mark.parametrize("offset", [0, 4, 12, 64, 132])
def test_kernels_take_a_base_and_an_offset(device, stream, offset):
    x, out = device.alloc(1024), device.alloc(1024)
    values = np.arange(100, dtype=np.float32)
    x.upload(offset, values)
    out.clear()
    stream.run([Step("neg", vector(out, offset + 8, 100), (vector(x, offset, 100),), {})])
    stream.synchronize()
    got = out.read().view(np.float32)
    np.testing.assert_array_equal(got[(offset + 8) // 4 :][:100], -values)
    assert not got[: (offset + 8) // 4].any()
    assert not got[(offset + 8) // 4 + 100 :].any()
