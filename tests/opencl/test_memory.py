"""Buffers: written values are read back, ranges and life times are checked, lack of memory raises AllocationError."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyopencl as cl
import pytest

import opweave as ow
from opweave.contract import HOST_SPACE, Arg, Group, Step
from opweave.errors import AllocationError, BoundsError, LifetimeError
from opweave.graph.dtypes import as_dtype
from opweave.runtime.host.device import HostBackend

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
    """Also where the driver would allocate more than its memory. Untouched memory takes none of the machine's."""
    gc.collect()  # programs of other tests give their memory back now, and not in between
    before, size = device.budget.used, device.max_buffer_size
    held = [device.alloc(size) for _ in range(device.mem_info()[0] // size)]
    with pytest.raises(AllocationError) as caught:
        device.alloc(size)
    assert caught.value.requested == size
    assert caught.value.free is not None
    assert caught.value.free < size
    for buffer in held:
        buffer.free()
    assert device.budget.used == before
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


# --- limits -----------------------------------------------------------------------------------------------------------


def test_what_one_buffer_cannot_hold_is_chunked(device, monkeypatch):
    """Weights and temporaries of more than the largest buffer lie in several."""
    limit = 64 << 10
    assert (
        device.host_buffer_type.max_size is None or device.host_buffer_type.max_size > limit
    )  # made before the change
    monkeypatch.setattr(device, "max_buffer_size", limit)
    monkeypatch.setattr(device, "_default_type", None)
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal((64, 64)).astype(np.float32) for i in range(10)}  # 16 KiB each
    value = rng.standard_normal((64, 64)).astype(np.float32)
    x = ow.input("x", (64, 64))
    weights = ow.weights(arrays)
    kept = [ow.tanh(x * weights[name]) for name in arrays]  # all are needed at the end
    with ow.Scheduler([device, "host"]) as scheduler:
        program = scheduler.build(kept)
        got = program.run(x=value)
        buffers = {region.buffer for region in program.memory_map().places.values() if region.buffer.device is device}
    assert len(buffers) > 4
    assert max(buffer.size for buffer in buffers) <= limit
    for result, weight in zip(got, arrays.values(), strict=True):
        np.testing.assert_allclose(result, np.tanh(value * weight), rtol=1e-5, atol=1e-6)


def test_a_tensor_larger_than_the_largest_buffer(device, monkeypatch):
    monkeypatch.setattr(device, "max_buffer_size", 4096)
    monkeypatch.setattr(device, "_default_type", None)
    x = ow.input("x", (64, 64))
    with ow.Scheduler([device, "host"]) as scheduler, pytest.raises(AllocationError, match="one buffer has at most"):
        scheduler.build(ow.neg(x), pins={ow.neg(x): device}).run(x=np.zeros((64, 64), np.float32))


def test_a_driver_without_memory_is_an_allocation_error(device, monkeypatch):
    def fail(*args, **named):
        error = cl.MemoryError("clEnqueueMigrateMemObjects failed: MEM_OBJECT_ALLOCATION_FAILURE")
        monkeypatch.setattr(type(error), "code", cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE)
        monkeypatch.setattr(type(error), "__str__", Exception.__str__)
        raise error

    taken = device.budget.used
    monkeypatch.setattr(cl, "enqueue_migrate_mem_objects", fail)
    with pytest.raises(AllocationError, match="MEM_OBJECT_ALLOCATION_FAILURE") as caught:
        device.alloc(1024)
    assert caught.value.requested == 1024
    assert caught.value.device == device.name
    assert device.budget.used == taken


def test_devices_in_the_hosts_memory_promise_no_more_than_the_machine_has(device, monkeypatch):
    if not device.cl_device.host_unified_memory:
        pytest.skip("the device has memory of its own")
    monkeypatch.setattr("opweave_opencl.device.host_memory_info", lambda: (1 << 20, 1 << 34))
    assert device.mem_info() == (1 << 20, device.budget.total)
    device.alloc(1 << 20).free()
    with pytest.raises(AllocationError) as caught:
        device.alloc((1 << 20) + 1)
    assert caught.value.free == 1 << 20


def test_threads_share_the_memory_budget(device):
    before = device.budget.used

    def work(_):
        for _ in range(20):
            device.alloc(1000).free()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert device.budget.used == before


# --- pinned host memory -----------------------------------------------------------------------------------------------


def test_pinned_memory_is_host_memory(device):
    kind = device.host_buffer_type
    assert kind is device.host_buffer_type
    assert kind is device.buffer_types[1]
    assert kind.name == f"{device.name}.pinned"
    with kind.alloc(1000) as buffer:
        assert buffer.is_host
        assert buffer.space is HOST_SPACE
        assert buffer.address is not None
        assert buffer.address % 64 == 0
        buffer.fill(7)
        assert (buffer.read() == 7).all()


def test_transfers_from_and_to_pinned_memory(device, stream):
    values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    kind = device.host_buffer_type
    with kind.alloc(1 << 20) as there, kind.alloc(1 << 20) as back, device.alloc(1 << 20) as buffer:
        there.upload(0, values)
        stream.upload(buffer, 0, there.host_bytes(0, 1 << 20))
        stream.download(buffer, 0, back.host_bytes(0, 1 << 20))
        stream.synchronize()
        np.testing.assert_array_equal(back.read(), values)


def test_pinned_memory_is_unmapped_when_it_is_freed(device):
    buffer = device.host_buffer_type.alloc(1000)
    mapping = buffer.handle.base
    buffer.free()
    with pytest.raises(cl.Error):
        mapping.release(device.queue)
