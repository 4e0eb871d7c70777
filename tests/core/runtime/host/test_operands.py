"""Reading, writing and copying between any two places, in any layout and type."""

# mypy: no-check-untyped-defs

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opweave.contract import HOST_SPACE, Arg, BufferType
from opweave.errors import BoundsError, DTypeError, HazardError, LifetimeError, ShapeError
from opweave.graph.dtypes import DTYPES, as_dtype, bf16, f32, q4_0, q8_0
from opweave.graph.layout import array_shape, dense_strides, nbytes, span
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.operands import bind_copy, bind_read, bind_write, copy, copy_bytes, read, write
from tests.support.async_device import AsyncDevice
from tests.support.example_backend import ExampleDevice


class MappedDevice(AsyncDevice):
    """Memory that only this device's kernels address, and of which parts can be mapped for the host."""

    def _map(self, mem, offset, size):
        return mem.data.data[offset : offset + size]

    def _unmap(self, mem, view):
        view.release()


class PinnedType(BufferType):
    def __init__(self, device):
        super().__init__(device, "pinned", space=HOST_SPACE)

    def _alloc(self, size, usage):
        return bytearray(size)

    def _upload(self, mem, offset, data):
        mem[offset : offset + len(data)] = data

    def _download(self, mem, offset, out):
        out[:] = memoryview(mem)[offset : offset + len(out)]


class SwappedType(BufferType):
    """Stores every byte inverted, so that reading the memory directly gives wrong values."""

    def __init__(self, device):
        super().__init__(device, "swapped")

    def _init(self, mem, offset, tensor):
        return "inverted"

    def _upload(self, mem, offset, data):
        self.device._upload(mem, offset, memoryview(~np.frombuffer(data, np.uint8)))

    def _download(self, mem, offset, out):
        self.device._download(mem, offset, out)
        out[:] = memoryview(~np.frombuffer(out, np.uint8))


EXAMPLE = ExampleDevice()
KINDS = {
    "host": HostDevice().default_buffer_type,
    "host again": HostDevice().default_buffer_type,
    "separate": EXAMPLE.default_buffer_type,
    "separate again": ExampleDevice().default_buffer_type,
    "asynchronous": AsyncDevice().default_buffer_type,
    "mapped": MappedDevice().default_buffer_type,
    "pinned": PinnedType(EXAMPLE),
    "repacked": SwappedType(HostDevice()),
}
PAIRS = list(product(KINDS, KINDS))
RNG = np.random.default_rng(0)


def values(shape, dtype):
    """Any bytes that are values: random ones of the dtype, or raw blocks."""
    shape = array_shape(shape, dtype)
    if dtype.kind == "f":
        return RNG.standard_normal(shape).astype(dtype.numpy)
    return RNG.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype.numpy)


@st.composite
def windows(draw):
    """Shape, strides and offset of a permuted, gapped window without overlaps."""
    dtype = draw(st.sampled_from([*DTYPES.values()]))
    ndim = draw(st.integers(1 if dtype.block > 1 else 0, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim))
    if dtype.block > 1:
        shape[-1] = dtype.block * draw(st.integers(1, 2))
    shape = tuple(shape)

    def lay():
        order = draw(st.permutations(range(ndim - 1 if dtype.block > 1 else ndim)))
        strides, step = [0] * ndim, dtype.itemsize
        if dtype.block > 1:
            strides[-1] = step
            step *= shape[-1] // dtype.block
        for axis in order:
            step *= draw(st.integers(1, 2))
            strides[axis] = step
            step *= shape[axis]
        return tuple(strides), dtype.itemsize * draw(st.integers(0, 3))

    return dtype, shape, lay(), lay()


def place(kind, dtype, shape, layout):
    strides, offset = layout
    buffer = kind.alloc(offset + span(shape, strides, dtype) + 8)
    buffer.clear(0 if kind.is_raw else 0xFF)
    return Arg(buffer, offset, dtype, shape, strides)


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize(("of", "to"), PAIRS)
@given(window=windows())
def test_any_window_is_copied_between_any_two_memories(of, to, window):
    dtype, shape, a, b = window
    src, dst = place(KINDS[of], dtype, shape, a), place(KINDS[to], dtype, shape, b)
    array = values(shape, dtype)
    before = dst.buffer.read()
    write(src, array)
    assert read(src).tobytes() == array.tobytes()
    copy(dst, src)
    got = read(dst)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tobytes() == array.tobytes()
    # Nothing but the window was written.
    write(dst, np.zeros_like(array))
    np.testing.assert_array_equal(dst.buffer.read(), before)


@pytest.mark.parametrize(("of", "to"), PAIRS)
@pytest.mark.parametrize("how", ["synchronous", "asynchronous", "worker", "asynchronous worker"])
def test_copies_decided_beforehand_do_the_same(of, to, how):
    device = KINDS[to].device
    if how.startswith("asynchronous") and not device.caps.asynchronous:
        device = AsyncDevice()
        device.shared_spaces = (KINDS[to].space,)
    with device.open(worker=how.endswith("worker")) as stream:
        dense = ((16, 4), 8)
        for a, b in product((dense, ((4, 12), 0)), repeat=2):
            shape = (3, 4)
            src, dst = place(KINDS[of], f32, shape, a), place(KINDS[to], f32, shape, b)
            call, queued = bind_copy(dst, stream, src)
            assert queued or not how.endswith("worker")
            for _ in range(2):
                array = values(shape, f32)
                write(src, array)
                call()
                stream.synchronize()
                np.testing.assert_array_equal(read(dst), array)


@pytest.mark.parametrize("worker", [False, True])
def test_a_queued_copy_comes_after_the_work_of_its_stream(worker):
    """The stream may still be reading what the copy overwrites."""
    device = AsyncDevice()
    layout = ((4,), 0)
    seen = set()
    for kind in KINDS.values():
        a, src = place(device.default_buffer_type, f32, (16,), layout), place(kind, f32, (16,), layout)
        out = np.zeros(16, np.float32)
        write(a, np.full(16, 1, np.float32))
        write(src, np.full(16, 2, np.float32))
        with device.open(delay=0.01, worker=worker) as stream:
            stream.download(a.buffer, 0, out.view(np.uint8))
            call, queued = bind_copy(a, stream, src)
            seen.add(queued)
            if not queued:
                stream.synchronize()  # then it is the caller who sees to the order
            call()
            stream.synchronize()
        assert (out == 1).all()
        assert (read(a) == 2).all()
    assert True in seen


def test_direct_copies_are_used_where_the_device_has_them():
    device = AsyncDevice()
    a, b = (place(device.default_buffer_type, f32, (16,), ((4,), 0)) for _ in range(2))
    with device.open() as stream:
        call, queued = bind_copy(a, stream, b)
        call()
        assert queued
        assert stream.log == ["copy_from"]


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_feeding_and_fetching(name, worker):
    kind = KINDS[name]
    with kind.device.open(worker=worker) as stream:
        for layout in (((16, 4), 8), ((4, 12), 0)):
            arg = place(kind, f32, (3, 4), layout)
            view, put, queued = bind_write(arg, stream)
            assert (view is None) == (put is not None) == (worker or not kind.is_host)
            assert queued == (worker or (name in ("asynchronous", "mapped") and arg.is_dense))
            fetch = bind_read(arg)
            array = values((3, 4), f32)
            if view is None:
                put(array)
            else:
                np.copyto(view, array)
            stream.synchronize()
            got = fetch()
            np.testing.assert_array_equal(got, array)
            got[:] = 0
            np.testing.assert_array_equal(fetch(), array), "results are copies"


@pytest.mark.parametrize(("of", "to"), PAIRS)
def test_bytes_are_copied_and_checked(of, to):
    src, dst = KINDS[of].alloc(64), KINDS[to].alloc(64)
    data = RNG.integers(0, 256, 64, np.uint8)
    src.upload(0, data)
    dst.upload(0, np.zeros(64, np.uint8))
    copy_bytes(dst, 8, src, 4, 16)
    np.testing.assert_array_equal(dst.read(8, 16), data[4:20])
    assert not dst.read(0, 8).any()
    assert not dst.read(24).any()
    for a, b, size in ((56, 0, 9), (0, 56, 9), (-1, 0, 4), (0, -1, 4), (0, 0, -1)):
        with pytest.raises(BoundsError):
            copy_bytes(dst, a, src, b, size)
    copy_bytes(dst, 64, src, 64, 0)
    src.free()
    with pytest.raises(LifetimeError):
        copy_bytes(dst, 0, src, 0, 4)
    with pytest.raises(LifetimeError):
        copy_bytes(src, 0, dst, 0, 4)


@pytest.mark.parametrize("name", [n for n, k in KINDS.items() if k.is_raw])
@pytest.mark.parametrize(("to", "of"), [(0, 3), (3, 0), (5, 5)])
def test_ranges_of_one_buffer_may_overlap(name, to, of):
    buffer = KINDS[name].alloc(64)
    data = RNG.integers(0, 256, 64, np.uint8)
    buffer.upload(0, data)
    copy_bytes(buffer, to, buffer, of, 40)
    np.testing.assert_array_equal(buffer.read(to, 40), data[of : of + 40])


def test_large_copies_go_through_the_host_in_chunks(monkeypatch):
    monkeypatch.setattr("opweave.runtime.host.operands.BOUNCE_BYTES", 10)
    src, dst = KINDS["separate"].alloc(64), KINDS["asynchronous"].alloc(64)
    data = RNG.integers(0, 256, 64, np.uint8)
    src.upload(0, data)
    copy_bytes(dst, 0, src, 0, 64)
    np.testing.assert_array_equal(dst.read(), data)


def test_repeated_elements_are_read_once_and_shown_often():
    buffer = KINDS["separate"].alloc(16)
    buffer.upload(0, np.float32([1, 2, 3, 4]))
    assert read(Arg(buffer, 0, f32, (2, 4), (0, 4))).tolist() == [[1, 2, 3, 4]] * 2


def test_values_without_elements():
    for kind in KINDS.values():
        arg = Arg(kind.alloc(0), 0, f32, (0, 3), (12, 4))
        write(arg, np.empty((0, 3), np.float32))
        assert read(arg).shape == (0, 3)
        copy(arg, arg)


def test_what_does_not_fit_is_refused():
    device = HostDevice()
    arg = Arg(device.alloc(64), 0, f32, (4, 4), (16, 4))
    with pytest.raises(ShapeError):
        write(arg, np.zeros((4, 3), np.float32))
    with pytest.raises(DTypeError):
        write(arg, np.zeros((4, 4)))
    with pytest.raises(ShapeError):
        copy(arg, Arg(device.alloc(64), 0, f32, (16,), (4,)))
    with pytest.raises(ShapeError):
        copy(arg, Arg(device.alloc(64), 0, as_dtype("i32"), (4, 4), (16, 4)))
    unbound = Arg(None, 0, f32, (4, 4), (16, 4))
    with HostDevice().open() as stream:
        for attempt in (
            lambda: read(unbound),
            lambda: write(unbound, np.zeros((4, 4), np.float32)),
            lambda: copy(arg, unbound),
            lambda: copy(unbound, arg),
            lambda: bind_copy(arg, stream, unbound),
            lambda: bind_read(unbound),
            lambda: bind_write(unbound, stream),
        ):
            with pytest.raises(LifetimeError, match="no memory"):
                attempt()


@pytest.mark.parametrize("name", KINDS)
def test_operands_out_of_bounds_or_freed_are_refused(name):
    good = Arg(KINDS[name].alloc(64), 0, f32, (4, 4), (16, 4))
    write(good, np.zeros((4, 4), np.float32))
    for bad, error in (
        (Arg(good.buffer, 4, f32, (4, 4), (16, 4)), BoundsError),
        (Arg(good.buffer, 0, f32, (4, 4), (16, 8)), BoundsError),
        (Arg(good.buffer, -16, f32, (4, 4), (16, 4)), BoundsError),
    ):
        for attempt in (
            lambda b=bad: read(b),
            lambda b=bad: write(b, np.zeros((4, 4), np.float32)),
            lambda b=bad: copy(good, b),
        ):
            with pytest.raises(error):
                attempt()
    good.buffer.free()
    for attempt in (lambda: read(good), lambda: write(good, np.zeros((4, 4), np.float32)), lambda: copy(good, good)):
        with pytest.raises(LifetimeError):
            attempt()


def test_read_only_memory_is_not_written():
    array = np.zeros((4, 4), np.float32)
    array.flags.writeable = False
    device = HostDevice()
    fixed = Arg(device.import_host(array), 0, f32, (4, 4), (16, 4))
    columns = Arg(fixed.buffer, 0, f32, (4, 4), (4, 16))
    free = Arg(device.alloc(64), 0, f32, (4, 4), (16, 4))
    for attempt in (
        lambda: write(fixed, np.ones((4, 4), np.float32)),
        lambda: write(columns, np.ones((4, 4), np.float32)),
        lambda: copy(fixed, free),
        lambda: copy(columns, free),
        lambda: copy_bytes(fixed.buffer, 0, free.buffer, 0, 64),
    ):
        with pytest.raises(HazardError, match="read-only"):
            attempt()
    copy(free, fixed)


def test_the_host_form_of_quantized_rows_counts_bytes():
    assert array_shape((4, 64), q4_0) == (4, 36)
    assert array_shape((32,), q8_0) == (34,)
    assert array_shape((4, 64), f32) == (4, 64)
    assert nbytes((4, 64), q4_0) == 4 * 36
    assert dense_strides((4, 64), q4_0) == (36, 18)


def test_bf16_keeps_its_bits():
    array = np.array([1.5, -2, np.inf, np.nan], ml_dtypes.bfloat16)
    arg = Arg(KINDS["separate"].alloc(8), 0, bf16, (4,), (2,))
    write(arg, array)
    assert read(arg).tobytes() == array.tobytes()
