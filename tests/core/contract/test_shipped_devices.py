"""Buffers, streams, events, devices and schedulers of the shipped backends, each with memory of its own: in which order
things happen, what is refused, and what an error leaves behind."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import opweave as ow
from opweave.contract import HOST_SPACE, Arg, Step
from opweave.graph.dtypes import f32
from opweave.runtime.host.device import HostDevice
from tests.support.real_devices import make, real_device, three, values, vector

device = real_device
ONES = np.ones(16, np.float32)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_buffer_and_its_kind_of_memory(device):
    kind, x = device.default_buffer_type, ow.input("x", (3, 5))
    assert kind.device is device
    assert kind.name == device.name
    assert kind.space is device.space
    assert kind.is_host is device.space.host is False
    assert kind.alignment & (kind.alignment - 1) == 0
    assert kind.max_size is None or kind.max_size > 1 << 20
    assert kind.alloc_size(x) >= x.nbytes
    assert kind in device.buffer_types
    with kind.alloc(1000) as buffer:
        assert (buffer.name, buffer.size, buffer.type, buffer.is_host) == (kind.name, 1000, kind, False)
        assert buffer.address is None or buffer.address % kind.alignment == 0
        assert buffer.init(x, kind.alignment).offset == kind.alignment
        with pytest.raises(ow.BoundsError, match="alignment"):
            buffer.init(x, 1)
        buffer.reset()
    assert buffer.freed


def test_a_buffer_holds_what_was_uploaded(device):
    buffer, data = device.alloc(256), np.arange(256, dtype=np.uint8)
    buffer.clear()
    assert not buffer.read().any()
    buffer.upload(0, data)
    buffer.fill(7, 10, 20)
    data[10:30] = 7
    out = np.zeros(100, np.uint8)
    buffer.download(5, out)
    assert np.array_equal(out, data[5:105])
    assert np.array_equal(buffer.read(), data)
    assert buffer.usage is ow.Usage.ANY
    buffer.usage = ow.Usage.WEIGHTS
    assert buffer.usage is ow.Usage.WEIGHTS
    for wrong in ("weights", "WEIGHTS", 1, None, ow.Kind.CPU):
        with pytest.raises(ow.UnknownNameError, match=r"usage of memory.*Usage\.WEIGHTS"):
            buffer.usage = wrong
        with pytest.raises(ow.UnknownNameError, match=r"usage of memory.*Usage\.COMPUTE"):
            device.alloc(16, wrong)
    assert buffer.usage is ow.Usage.WEIGHTS
    for refused in (lambda: buffer.upload(250, data[:7]), lambda: buffer.fill(0, -1, 2), lambda: buffer.fill(256)):
        with pytest.raises(ow.BoundsError):
            refused()
    assert np.array_equal(buffer.read(), data)
    buffer.free()
    buffer.free()
    with pytest.raises(ow.LifetimeError, match="was freed"):
        buffer.read()


def test_what_does_not_fit_is_refused_and_nothing_is_lost(device):
    kept = device.alloc(64)
    kept.upload(0, ONES)
    with pytest.raises(ow.AllocationError) as caught:
        device.alloc(1 << 50)
    assert caught.value.device == device.name
    assert caught.value.requested == 1 << 50
    assert (values(vector(kept)) == 1).all()


def test_several_buffers_hold_what_one_cannot(device):
    kind = device.default_buffer_type
    whole, offsets = kind.alloc_chunked([100, 200, 300])
    data = [np.full(n, i, np.uint8) for i, n in enumerate((100, 200, 300))]
    for at, part in zip(offsets, data, strict=True):
        buffer, local = whole.locate(at, len(part))
        buffer.upload(local, part)
    for at, part in zip(offsets, data, strict=True):
        buffer, local = whole.locate(at, len(part))
        assert np.array_equal(buffer.read(local, len(part)), part)
    whole.free()


def test_values_are_copied_between_any_two_memories(device):
    from opweave.runtime.host import operands

    source = vector(device.alloc(64))
    operands.write(source, np.arange(16, dtype=np.float32))
    for other in (HostDevice(), make("cpu"), make("torch")):
        target = Arg(other.alloc(64), 0, f32, (4, 4), (4, 16))  # transposed
        operands.copy(target, Arg(source.buffer, 0, f32, (4, 4), (16, 4)))
        assert np.array_equal(operands.read(target), np.arange(16).reshape(4, 4))
        operands.copy_bytes(source.buffer, 4, target.buffer, 0, 8)
        assert np.array_equal(values(source)[1:3], [0, 4])
        operands.write(source, np.arange(16, dtype=np.float32))


def test_pinned_memory_and_host_memory_in_place(device):
    """Where the device has them; where not, it says so."""
    kind = device.host_buffer_type
    assert (kind is not None) is device.caps.pinned
    if kind is not None:
        with kind.alloc(64) as pinned, device.alloc(64) as near, device.open() as stream:
            pinned.upload(0, ONES)
            stream.upload(near, 0, pinned.host_bytes(0, 64))
            stream.synchronize()
            assert (values(vector(near)) == 1).all()
    array = np.zeros(1 << 14, np.float32)
    if not device.caps.import_host:
        with pytest.raises(ow.UnsupportedOpError):
            device.import_host(array)
        return
    aligned = array[(-array.ctypes.data // 4) % 1024 :][:2048]
    with device.import_host(aligned) as buffer:
        buffer.upload(0, ONES)
        assert (aligned[:16] == 1).all()


# --- streams and events -----------------------------------------------------------------------------------------------


def test_steps_run_in_the_order_of_the_stream_together_with_transfers(device):
    a, b, out = three(device)
    seen = [np.zeros(16, np.float32) for _ in range(3)]
    with device.open() as stream:
        assert stream.device is device
        plan = stream.compile([Step("add", out, (a, b), {}), Step("add", a, (out, b), {})])
        for got in seen:
            plan.run()
            stream.download(out.buffer, 0, got)
            stream.upload(b.buffer, 0, ONES * 10)
        stream.synchronize()
    assert [float(got[0]) for got in seen] == [2, 13, 33]
    assert (values(a) == 43).all()


def test_steps_that_run_once_and_plans_that_end(device):
    a, b, out = three(device)
    with device.open() as stream:
        stream.run([Step("mul", out, (a, b), {})])
        stream.synchronize()
        assert (values(out) == 1).all()
        plan = stream.compile([Step("add", out, (a, b), {})])
        plan.close()
        with pytest.raises(ow.LifetimeError, match="was closed"):
            plan.run()
        plan = stream.compile([Step("add", out, (a, b), {})])
        b.buffer.free()
        with pytest.raises(ow.LifetimeError, match="was freed"):
            plan.run()
    with pytest.raises(ow.LifetimeError, match="was closed"):
        stream.run([Step("add", out, (a, a), {})])


def test_unsupported_steps_are_refused_with_the_reason(device):
    a, b, out = three(device)
    step = Step("add", out, (a, b), {})
    assert device.supports(step)
    assert device.why_not(step) is None
    odd = Step("nonsense", out, (a, b), {})
    assert not device.supports(odd)
    assert device.why_not(odd)
    with device.open() as stream, pytest.raises(ow.UnsupportedOpError, match="nonsense"):
        stream.run([odd])
    foreign = Step("add", out, (a, vector(HostDevice().alloc(64))), {})
    with device.open() as stream, pytest.raises(ow.LifetimeError, match="cannot reach"):
        stream.compile([foreign])


def test_an_event_is_reached_when_the_work_before_it_is_done(device):
    a, b, out = three(device)
    got = np.zeros(16, np.float32)
    with device.open() as stream, device.open() as other:
        plan = stream.compile([Step("add", out, (a, b), {})])
        for n in (1, 2):
            stream.upload(a.buffer, 0, ONES * n)
            plan.run()
            event = stream.record()
            other.wait(event)
            other.download(out.buffer, 0, got)
            other.synchronize()
            assert (got == n + 1).all()
            event.synchronize()
            assert event.done
        kept = weakref.ref(event)
        del event
        gc.collect()
        assert kept() is None


def test_a_failed_run_says_what_failed_and_leaves_the_device_usable(device):
    table = ow.weights({"t": np.arange(12, dtype=np.float32).reshape(4, 3)})["t"]
    ids = ow.input("ids", (2,), "i32")
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(ow.embedding(table, ids) + 1.0)
        with pytest.raises(ow.ExecutionError) as caught:
            program.run(ids=np.array([1, 99], np.int32))
        assert caught.value.device == device.name
        assert "embedding" in str(caught.value)
        assert np.array_equal(program.run(ids=np.array([1, 3], np.int32)), [[4, 5, 6], [10, 11, 12]])


# --- devices and schedulers -------------------------------------------------------------------------------------------


def test_a_device_at_a_glance(device):
    props = device.props()
    assert (props.name, props.description, props.kind) == (device.name, device.description, device.kind)
    assert props.caps == device.caps
    free, total = device.mem_info()
    assert 0 < free <= total
    assert device.reaches(device.space)
    assert not device.reaches(HOST_SPACE)
    assert HostDevice().reaches(HOST_SPACE)
    assert not HostDevice().reaches(device.space)
    with pytest.raises(TypeError, match="nonsense"):
        device.open(nonsense=1)


def test_a_scheduler_from_building_to_closing(device):
    host = HostDevice()
    x = ow.input("x", (4, 6))
    near, far = ow.neg(x), ow.exp(ow.neg(x))
    v = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    with ow.Scheduler([device, host]) as scheduler:
        assert scheduler.devices == (device, host)
        assert [stream.device for stream in scheduler.streams] == [device, host]
        assert scheduler.buffer_type(device) is device.default_buffer_type
        assert scheduler.n_slots == 1
        planned = scheduler.partition(far, {far: host})
        program = scheduler.build(far, {far: host})
        assert [split.target.device for split in program.splits] == [split.target.device for split in planned.splits]
        assert (program.device_of(near), program.device_of(far)) == (device, host)
        assert program.n_copies == 1
        np.testing.assert_allclose(program.run(x=v), np.exp(-v), rtol=1e-6)
        futures = [program.submit(x=v * n) for n in range(3)]
        scheduler.synchronize()
        assert all(future.done() for future in futures)
        for n, future in enumerate(futures):
            np.testing.assert_allclose(future.result(), np.exp(-v * n), rtol=1e-6)
        scheduler.reset()
        with pytest.raises(ow.LifetimeError, match="was closed"):
            program.run(x=v)
        np.testing.assert_allclose(scheduler.build(far).run(x=v), np.exp(-v), rtol=1e-5)
    with pytest.raises(ow.LifetimeError, match="was closed"):
        scheduler.build(near)


def test_runs_overlap_in_slots(device):
    x = ow.input("x", (4, 6))
    output = ow.exp(ow.neg(x))
    with ow.Scheduler([device, HostDevice()], parallel=2) as scheduler:
        program = scheduler.build(output, {output: HostDevice().name})
        assert program.slots == scheduler.n_slots == 2
        futures = [program.submit(x=np.full((4, 6), n, np.float32)) for n in range(6)]
        for n, future in enumerate(futures):
            np.testing.assert_allclose(future.result(), np.full((4, 6), np.exp(-n)), rtol=1e-5)


def test_values_without_axes_are_read_anew_in_each_run(device):
    steps, x = ow.state(f"steps of {device.name}", ()), ow.input("number", ())
    weights = ow.weights({"scale": np.array(2, np.float32)})
    product = (steps + 1.0) * x * weights["scale"]
    outputs = [product, ow.accumulate(steps, 1.0), ow.add_region(x, ow.set_region(product, x, ()), ())]
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(outputs)
        for n in range(1, 5):
            scale = 2 if n < 3 else 5
            weights.write({"scale": np.array(scale, np.float32)})
            got = program.run(number=np.array(n + 0.5, np.float32))
            assert [value.item() for value in got] == [n * (n + 0.5) * scale, n, 2 * n + 1]
