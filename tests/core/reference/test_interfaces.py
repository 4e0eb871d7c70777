"""What ggml's backends implement, of the shipped devices: the hooks behind buffers, streams, events and devices, each
called by itself, and what the core makes of them."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import opweave as ow
from opweave.contract import HOST_SPACE, Arg, BufferType, MultiBuffer, Step, Stream, Usage
from opweave.graph.dtypes import f32
from opweave.ops.encoding import encode
from opweave.runtime.device import Device
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.reservations import RESERVATIONS
from tests.support.real_devices import NAMES, make, real_device, three, values, vector

device = real_device
ONES = np.ones(16, np.float32)
BYTES = np.random.default_rng(0).integers(0, 256, 256, np.uint8)


@pytest.fixture
def handle(device):
    """Memory of a device as its author hands it out."""
    mem = device._alloc(256, Usage.ANY)
    device._upload(mem, 0, memoryview(BYTES))
    yield mem
    device._free(mem)


def bytes_of(device, mem, offset=0, size=256):
    out = bytearray(size)
    device._download(mem, offset, memoryview(out))
    return np.frombuffer(out, np.uint8)


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_tensors_are_set_and_got_at_any_offset(device, handle):
    """`buffer_i.set_tensor`, `get_tensor`: complete on return, and no byte beside."""
    want = BYTES.copy()
    for offset, size in ((0, 1), (3, 7), (100, 156), (255, 1)):
        part = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        device._upload(handle, offset, memoryview(part))
        want[offset : offset + size] = part
        assert np.array_equal(bytes_of(device, handle, offset, size), part)
        assert np.array_equal(bytes_of(device, handle), want)


def test_bytes_are_filled(device, handle):
    """`buffer_i.memset_tensor`, `clear`."""
    want = BYTES.copy()
    for offset, size, value in ((5, 3, 255), (64, 192, 1), (7, 1, 0), (0, 256, 128)):
        device._fill(handle, offset, size, value)
        want[offset : offset + size] = value
        assert np.array_equal(bytes_of(device, handle), want)


def test_bytes_are_copied_within_the_device_also_where_ranges_overlap(device, handle):
    """`buffer_i.cpy_tensor`."""
    other = device._alloc(256, Usage.ANY)
    device._fill(other, 0, 256, 7)
    device._copy(other, 10, handle, 20, 100)
    want = np.full(256, 7, np.uint8)
    want[10:110] = BYTES[20:120]
    assert np.array_equal(bytes_of(device, other), want)
    for to, start in ((40, 8), (8, 40)):
        before = bytes_of(device, handle).copy()
        device._copy(handle, to, handle, start, 100)
        before[to : to + 100] = before[start : start + 100].copy()
        assert np.array_equal(bytes_of(device, handle), before)
    device._free(other)


def test_the_base_of_a_buffer_is_where_its_bytes_lie(device, handle):
    """`buffer_i.get_base`: ``None`` where there is no address; a process reads at those that host memory has."""
    address = device._address(handle)
    if device.name.startswith("unified"):
        assert address is None
    else:
        assert address % device.alignment == 0
        assert ctypes.string_at(address, 256) == BYTES.tobytes()
    with device.alloc(64) as buffer:
        assert buffer.address == device._address(buffer.handle)


def test_what_is_freed_is_no_longer_counted(device):
    """`buffer_i.free_buffer`: by `free`, and with the last reference."""
    size, before = 1 << 20, RESERVATIONS.reserved
    for let_go in (lambda buffer: buffer.free(), lambda buffer: None):
        buffer = device.alloc(size)
        assert RESERVATIONS.reserved >= before + size
        let_go(buffer)
        del buffer
        assert RESERVATIONS.reserved == before


def test_several_buffers_act_as_one(device):
    """`buffer_is_multi_buffer`, `multi_buffer_set_usage`, `buffer_type_i.get_max_size`."""
    kind = BufferType(device, max_size=512, alignment=device.alignment)
    with pytest.raises(ow.AllocationError, match="one buffer has at most 512 bytes"):
        kind.alloc(513)
    whole, offsets = kind.alloc_chunked([500, 500], Usage.WEIGHTS)
    assert isinstance(whole, MultiBuffer)
    assert not isinstance(whole.buffers[0], MultiBuffer)
    assert len(whole.buffers) == 2
    assert {buffer.usage for buffer in whole.buffers} == {whole.usage} == {Usage.WEIGHTS}
    whole.usage = Usage.COMPUTE
    assert {buffer.usage for buffer in whole.buffers} == {Usage.COMPUTE}
    whole.clear(3)
    assert all((buffer.read() == 3).all() for buffer in whole.buffers)
    assert all(whole.locate(at, 10)[1] % kind.alignment == 0 for at in offsets)
    with pytest.raises(ow.BoundsError):
        whole.locate(offsets[1] - 1, 500)
    whole.free()
    assert all(buffer.freed for buffer in whole.buffers)


@pytest.mark.parametrize("name", [*NAMES, "torch:cpu"])
def test_every_kind_of_memory_keeps_what_it_was_given(name):
    """`buffer_type_i.*`, `buffer_i.init_tensor`, `reset`, `dev_get_extra_bufts`, `cpu_hbm_buffer_type`."""
    if name == "torch:cpu":
        from opweave_torch.device import TorchCpuDevice

        device = TorchCpuDevice()
        device.name = name
    else:
        device = make(name)
    kinds = device.buffer_types
    assert kinds[0] is device.default_buffer_type
    assert len({kind.name for kind in kinds}) == len(kinds)
    plain = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    arrays = {name: ow.Blocks(encode(plain, ow.as_dtype(name)), plain.shape, name) for name in ("q8_0", "q4_0")}
    tensors = list(ow.weights({"f32": plain, **arrays}).values())
    for kind in kinds:
        assert device.buffer_type(kind.name) is kind
        assert kind.device is device
        assert kind.alignment & (kind.alignment - 1) == 0
        kept = [tensor for tensor in tensors if kind.why_not(tensor) is None]
        assert kept, kind
        for tensor in kept:
            data = tensor.leaf.data
            size = kind.alloc_size(tensor)
            assert size >= tensor.nbytes or not kind.is_raw
            with kind.alloc(size, Usage.WEIGHTS) as buffer:
                assert (buffer.type, buffer.name, buffer.size) == (kind, kind.name, size)
                placement = buffer.init(tensor, 0)
                assert (placement.handle is None) == kind.is_raw
                buffer.upload(0, data)
                assert np.array_equal(buffer.read(0, tensor.nbytes), np.ascontiguousarray(data).view(np.uint8).ravel())
                with pytest.raises(ow.BoundsError):
                    buffer.init(tensor, kind.alignment)
                buffer.reset()
                if not kind.is_raw:
                    with pytest.raises(ow.LayoutError, match="prepared"):
                        buffer.read(0, 4)
        for tensor in set(tensors) - set(kept):
            with pytest.raises(ow.UnsupportedOpError, match="does not keep"):
                kind.alloc(1 << 20, Usage.WEIGHTS).init(tensor, 0)
        if not kind.holds(Usage.COMPUTE):
            with pytest.raises(ow.UnsupportedOpError, match="not for Usage"):
                kind.alloc(64, Usage.COMPUTE)
    with pytest.raises(ow.UnknownNameError):
        device.buffer_type("nothing")


# --- devices ----------------------------------------------------------------------------------------------------------


def test_capabilities_are_what_the_class_overrides(device):
    """`device_i.get_props`: and what is not there is refused, or done another way."""
    caps, kind = device.caps, type(device)
    assert caps.fill is (kind._fill is not Device._fill)
    assert caps.copy is (kind._copy is not Device._copy)
    assert caps.import_host is (kind._import_host is not Device._import_host)
    assert caps.offload is (kind._offload is not Device._offload)
    assert caps.pinned is (device.host_buffer_type is not None)
    with device.open() as stream:
        assert caps.asynchronous is stream.is_async is (type(stream)._synchronize is not Stream._synchronize)
        assert caps.events is stream.has_events
        assert caps.fuse is (type(stream)._fuse is not Stream._fuse)
    assert device.props().caps == caps


def test_devices_share_memory_when_both_reach_one_space(device):
    """`device_i.supports_buft`: what one device computed is read by the other without a copy, or by one."""
    host, x = HostDevice(), ow.input("x", (4, 6))
    y = ow.exp(x)
    v = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    from opweave_cpu import CpuDevice

    beside = CpuDevice()
    beside.name = "cpu:beside"
    assert beside.reaches(host.space)
    assert host.space is HOST_SPACE
    for other, copies in ((beside, 0), (device, 1)):
        assert other.reaches(host.alloc(64).space) is (copies == 0)
        with ow.Scheduler([other, host]) as scheduler:
            program = scheduler.build(ow.neg(y), {y: host, ow.neg(y): other})
            assert program.n_copies == copies
            np.testing.assert_allclose(program.run(x=v), -np.exp(v), rtol=1e-5)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_device_brings_weights_for_steps_that_it_wants(device, wanted, monkeypatch):
    """`offload_op`: asked of the device that comes before that of the weights; declined by an option. What the device
    answers by itself depends on rates that it measures."""
    from opweave_cpu import CpuDevice

    near = CpuDevice()
    near.name = "cpu:near"
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    weight = ow.weights({"w": w}, device=near)["w"]
    x = ow.input("x", (32, 64))
    y = ow.linear(x, weight)
    v = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    if not device.caps.offload:
        wanted = False
    else:
        monkeypatch.setattr(device, "_offload", lambda step: wanted and step.op == "linear")
    for option in (True, False):
        with ow.Scheduler([device, near], op_offload=option) as scheduler:
            program = scheduler.build(y)
            brought = wanted and option
            assert program.device_of(y) is (device if brought else near)
            assert program.partition.assignment.causes[y] == ("offload" if brought else "weights")
            assert {copy.cause for copy in program.partition.copies} == ({"weight-fetch"} if brought else set())
            np.testing.assert_allclose(program.run(x=v), v @ w.T, rtol=1e-3, atol=1e-4)


def test_products_of_many_rows_are_worth_it(device):
    """`device_i.offload_op`, by measured rates: never what is no product."""

    def arg(rows, columns):
        return Arg(None, 0, f32, (rows, columns), (columns * 4, 4))

    assert not device.offloads(Step("add", arg(8, 8), (arg(8, 8), arg(8, 8)), {}))
    huge = Step("linear", arg(1 << 16, 64), (arg(1 << 16, 64), arg(64, 64)), {})
    assert device.offloads(huge) <= device.caps.offload


def test_a_device_says_why_not(device):
    """`device_i.supports_op`: the reason names what is wrong; the same of a graph's node."""
    a, b, out = three(device)
    assert device._why_not(Step("add", out, (a, b), {})) is None
    why = device.why_not(Step("nonsense", out, (a, b), {}))
    assert why
    assert "nonsense" in why
    far = Step("add", out, (a, vector(HostDevice().alloc(64))), {})
    with device.open() as stream, pytest.raises(ow.LifetimeError, match="cannot reach"):
        stream.run([far])
    assert (values(out) == 0).all()


# --- streams and events -----------------------------------------------------------------------------------------------


def test_a_stream_is_closed_once_when_its_work_is_done(device, monkeypatch):
    """`i.free`."""
    a, b, out = three(device)
    stream, closed = device.open(), []
    close = type(stream)._close
    monkeypatch.setattr(type(stream), "_close", lambda self: (closed.append(self), close(self)))
    plan = stream.compile([Step("add", out, (a, b), {}), Step("add", a, (out, b), {})])
    for _ in range(50):
        plan.run()
    stream.close()
    stream.close()
    assert closed == [stream]
    assert (values(a) == 101).all(), "closing waits for what was submitted"
    for refused in (plan.run, stream.record, lambda: stream.compile([]), lambda: stream.download(a.buffer, 0, ONES)):
        with pytest.raises(ow.LifetimeError, match="was closed"):
            refused()
    assert stream.closed


def test_a_plan_is_made_run_often_and_freed(device):
    """`i.graph_plan_create`, `graph_plan_compute`, `graph_plan_free`, `graph_compute`, `synchronize`."""
    a, b, out = three(device)
    steps = [Step("add", out, (a, b), {}), Step("mul", a, (out, b), {})]
    with device.open() as stream:
        plan = stream.compile(steps)
        assert len(plan) == 2
        for _ in range(3):
            plan.run()
        stream.run(steps)
        stream.synchronize()
        assert (values(a) == 5).all()
        plan.close()
        plan.close()
        with pytest.raises(ow.LifetimeError, match="was closed"):
            plan.run()
        stream.compile([]).run()
        stream.synchronize()
    assert (values(a) == 5).all()


def test_a_step_is_bound_by_itself(device):
    """`i.graph_compute`: ``_bind`` gives a call without arguments, made as often as one likes."""
    from opweave.contract import Group

    a, b, out = three(device)
    with device.open() as stream:
        if stream.lists_operands:
            (group,) = stream.fuse([Step("add", out, (a, b), {})])
        else:
            group = Group((Step("add", out, (a, b), {}),))
        call = stream._bind(group)
        for n in (1, 5):
            a.buffer.upload(0, ONES * n)
            stream._run(iter([call]))
            stream.synchronize()
            assert (values(out) == n + 1).all()


def test_events_hold_back_other_streams_and_the_host(device):
    """`i.event_record`, `event_wait`, `device_i.event_new`, `event_synchronize`: of work before it, not behind it."""
    a, b, out = three(device)
    seen = [np.zeros(16, np.float32) for _ in range(8)]
    with device.open() as first, device.open() as second:
        ahead = first.compile([Step("add", a, (a, b), {})])
        behind = second.compile([Step("mul", out, (a, b), {})])
        for got in seen:
            ahead.run()
            event = first.record()
            second.wait(event)
            behind.run()
            second.download(out.buffer, 0, got)
            first.wait(second.record())
        event = first.record()
        event.synchronize()
        assert event.done
        assert first.record() is not event, "none is recorded twice"
        first.synchronize()
        second.synchronize()
    assert [got[3] for got in seen] == list(range(2, 10))


def test_an_event_of_failed_work_says_so(device):
    """`event_synchronize`, `event_wait`: raise what the work before the event failed with; nobody waits for ever."""
    table, out = device.alloc(64), device.alloc(64)
    ids = device.alloc(64)
    ids.upload(0, np.full(16, 99, np.int32))
    from opweave.graph.dtypes import i32

    step = Step("embedding", Arg(out, 0, f32, (4, 1), (4, 4)),
                (Arg(table, 0, f32, (4, 1), (4, 4)), Arg(ids, 0, i32, (4,), (4,))), {})  # fmt: skip
    with device.open() as stream, device.open() as other:
        plan = stream.compile([step])
        with pytest.raises(Exception, match="embedding") as caught:  # noqa: PT012 - at the run, or where one waits
            plan.run()
            stream.record().synchronize()
        assert isinstance(caught.value, (ow.OpweaveError, IndexError))
        if stream.failure is not None:
            with pytest.raises(ow.OpweaveError):
                stream.synchronize()
            stream.recover()
        ids.upload(0, np.zeros(16, np.int32))
        plan.run()
        other.wait(stream.record())
        other.synchronize()
        stream.synchronize()
