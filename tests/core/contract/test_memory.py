"""Memory: buffer types, buffers, chunks, imports over arrays and mappings, life times, bounds."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import pickle
import weakref
from itertools import count

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opweave.contract import HOST_SPACE, Buffer, BufferType, Device, MultiBuffer, Usage, mapped
from opweave.contract.memory import as_bytes
from opweave.contract.transfers import BOUNCE_BYTES
from opweave.errors import (
    AllocationError,
    BoundsError,
    Broken,
    HazardError,
    LayoutError,
    LifetimeError,
    UnsupportedOpError,
)
from opweave.graph.dtypes import bf16, f32, q8_0
from opweave.graph.layout import dense_strides
from opweave.graph.tensor import Tensor, constant, input
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave.tracing import TRACE
from tests.support.async_device import AsyncDevice
from tests.support.example_backend import ExampleDevice


class Small(ExampleDevice):
    """1,000 bytes of memory, at most 256 in one buffer, with a count of the allocated bytes."""

    max_buffer_size = 256

    def __init__(self) -> None:
        self.taken = 0

    def mem_info(self) -> tuple[int, int]:
        return 1000 - self.taken, 1000

    def _alloc(self, size, usage):
        if size > 1000 - self.taken:
            raise MemoryError("the card is full")
        self.taken += size
        return super()._alloc(size, usage)

    def _free(self, mem):
        self.taken -= len(mem.data)


def tensor(n: int) -> Tensor:
    return input(f"t{n}", (n,), "f32")


# --- allocating -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [HostDevice(), ExampleDevice(), AsyncDevice()], ids=repr)
def test_a_buffer_holds_what_was_uploaded(device):
    data = np.arange(10, dtype=np.float32)
    with device.alloc(64, Usage.WEIGHTS) as buffer:
        assert (buffer.size, buffer.usage, buffer.device) == (64, Usage.WEIGHTS, device)
        buffer.clear()
        buffer.upload(8, data)
        out = np.empty(10, np.float32)
        buffer.download(8, out)
        np.testing.assert_array_equal(out, data)
        np.testing.assert_array_equal(buffer.read(8, 40).view(np.float32), data)
        assert not buffer.read(0, 8).any()
        buffer.fill(7, 60)
        assert buffer.read(56).tolist() == [0] * 4 + [7] * 4
        buffer.usage = Usage.COMPUTE
    assert buffer.freed


def test_host_buffers_are_aligned():
    device = HostDevice()
    for size in (1, 17, 64, 1000):
        assert device.alloc(size).address % device.alignment == 0


def test_a_buffer_of_no_bytes_is_a_buffer():
    buffer = ExampleDevice().alloc(0)
    assert buffer.size == 0
    buffer.upload(0, b"")
    assert buffer.read().size == 0
    buffer.clear()


def test_out_of_memory_names_device_request_and_what_is_free():
    device = Small()
    device.alloc(200)
    with pytest.raises(AllocationError, match="one buffer has at most 256 bytes") as caught:
        device.alloc(257)
    assert (caught.value.device, caught.value.requested) == ("small", 257)
    keep = [device.alloc(200) for _ in range(4)]
    gc.collect()
    with pytest.raises(AllocationError, match=r"small cannot allocate 201 bytes.*the card is full") as caught:
        device.alloc(201)
    assert caught.value.free == 1000 - sum(b.size for b in keep) == 200
    assert isinstance(caught.value, MemoryError)


def test_more_than_there_are_addresses_is_an_allocation_error():
    for size in (1 << 62, 1 << 63, 1 << 70):
        with pytest.raises(AllocationError):
            HostDevice().alloc(size)


def test_negative_sizes_are_refused():
    with pytest.raises(BoundsError):
        ExampleDevice().alloc(-1)
    with pytest.raises(BoundsError):
        ExampleDevice().default_buffer_type.alloc_chunked([4, -1])


def test_a_failing_account_does_not_hide_the_failure():
    class Confused(Small):
        def mem_info(self):
            raise RuntimeError("no driver")

    with pytest.raises(AllocationError, match="free: unknown") as caught:
        Confused().alloc(300)
    assert caught.value.free is None


def test_an_alloc_that_returns_nothing_is_out_of_memory():
    class Forgetful(ExampleDevice):
        def _alloc(self, size, usage):
            return None

    with pytest.raises(AllocationError, match="returned None"):
        Forgetful().alloc(8)


def test_integers_that_are_no_addresses_are_found_out():
    class Numbered(ExampleDevice):
        def __init__(self):
            self.numbers = count(1)

        def _alloc(self, size, usage):
            return next(self.numbers)

    with pytest.raises(Broken, match="override _address"):
        Numbered().alloc(8)

    class Sound(Numbered):
        def _address(self, mem):
            return None

    assert Sound().alloc(8).address is None


def test_chunks_hold_every_tensor_whole():
    device = Small()
    sizes = [100, 100, 100, 0, 256, 1, 30]
    whole, offsets = device.default_buffer_type.alloc_chunked(sizes, Usage.WEIGHTS)
    assert len(whole.buffers) == 4
    assert whole.usage is Usage.WEIGHTS
    places = [whole.locate(o, s) for o, s in zip(offsets, sizes, strict=True)]
    for (buffer, at), size in zip(places, sizes, strict=True):
        assert at % device.alignment == 0
        assert at + size <= buffer.size <= 256
    used = [(id(b), at, at + s) for (b, at), s in zip(places, sizes, strict=True) if s]
    assert all(a[0] != b[0] or a[2] <= b[1] or b[2] <= a[1] for i, a in enumerate(used) for b in used[:i])


def test_chunks_that_do_not_fit_leave_nothing_allocated():
    device = Small()
    with pytest.raises(AllocationError):
        device.default_buffer_type.alloc_chunked([256, 256, 256, 256])
    assert device.taken == 0
    with pytest.raises(AllocationError, match="one buffer has at most"):
        device.default_buffer_type.alloc_chunked([8, 257])
    assert device.taken == 0


@given(st.lists(st.integers(0, 256), max_size=20))
def test_any_sizes_are_divided_into_valid_chunks(sizes):
    kind = BufferType(ExampleDevice(), max_size=256)
    whole, offsets = kind.alloc_chunked(sizes)
    assert sum(b.size for b in whole.buffers) <= sum(-(-s // 64) * 64 for s in sizes)
    taken: list[tuple[int, int]] = []
    for size, offset in zip(sizes, offsets, strict=True):
        buffer, at = whole.locate(offset, size)
        assert buffer.size <= 256
        assert at % 64 == 0
        if size:
            start = whole.starts[whole.buffers.index(buffer)] + at
            assert all(start + size <= a or b <= start for a, b in taken)
            taken.append((start, start + size))


def test_a_multibuffer_acts_as_one():
    device = Small()
    whole, _ = device.default_buffer_type.alloc_chunked([200, 200])
    with whole:
        whole.usage = Usage.WEIGHTS
        assert all(b.usage is Usage.WEIGHTS for b in whole.buffers)
        whole.clear(3)
        assert all((b.read() == 3).all() for b in whole.buffers)
        whole.reset()
        for at, size in ((-1, 1), (150, 100), (0, 401), (0, -1), (401, 0)):
            with pytest.raises(BoundsError):
                whole.locate(at, size)
    assert whole.freed
    assert device.taken == 0
    buffers = [device.alloc(8), device.alloc(8)]
    for starts in ([8, 0], [0], [-8, 0]):
        with pytest.raises(BoundsError):
            MultiBuffer(buffers, starts)
    with pytest.raises(BoundsError):
        MultiBuffer([])


# --- bounds and life times --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [HostDevice(), ExampleDevice()], ids=repr)
@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (61, 4), (64, 1), (65, 0), (0, 65), (1 << 62, 4)])
def test_every_byte_range_is_checked(device, offset, size):
    buffer = device.alloc(64)
    buffer.clear(1)
    data = np.zeros(size, np.uint8)
    attempts = [
        lambda: buffer.upload(offset, data),
        lambda: buffer.download(offset, data),
        lambda: buffer.read(offset, size),
        lambda: buffer.fill(0, offset, size),
        lambda: buffer.check(offset, size),
        lambda: buffer.host_bytes(offset, size),
        lambda: mapped(buffer, offset, size).__enter__(),
    ]
    for attempt in attempts:
        with pytest.raises(BoundsError, match="outside of"):
            attempt()
    assert (buffer.read() == 1).all()


def test_a_read_past_the_end_takes_no_memory_first():
    with pytest.raises(BoundsError):
        HostDevice().alloc(64).read(0, 1 << 60)
    with pytest.raises(BoundsError):
        HostDevice().alloc(64).read(65)


@pytest.mark.parametrize("value", [-1, 256, 1.5])
def test_only_bytes_are_filled_with(value):
    with pytest.raises(BoundsError, match="is not a byte"):
        HostDevice().alloc(8).fill(value)


def test_views_are_checked():
    buffer = HostDevice().alloc(64)
    assert buffer.view(32, f32, (8,), (4,)).shape == (8,)
    assert buffer.view(0, q8_0, (32,), (34,)).shape == (34,)
    for offset, shape, strides in ((36, (8,), (4,)), (-4, (1,), (4,)), (0, (2, 2), (64, 4)), (64, (1,), (4,))):
        with pytest.raises(BoundsError):
            buffer.view(offset, f32, shape, strides)
    with pytest.raises(BoundsError):
        buffer.view(32, q8_0, (32,), (34,))
    buffer.free()
    with pytest.raises(LifetimeError, match="was freed"):
        buffer.view(0, f32, (1,), (4,))


@pytest.mark.parametrize("device", [HostDevice(), ExampleDevice(), AsyncDevice()], ids=repr)
def test_freed_buffers_are_refused(device):
    buffer = device.alloc(64)
    buffer.free()
    buffer.free()
    for attempt in (
        lambda: buffer.upload(0, b"x"),
        lambda: buffer.download(0, bytearray(1)),
        lambda: buffer.read(),
        lambda: buffer.clear(),
        lambda: buffer.reset(),
        lambda: buffer.init(tensor(4), 0),
        lambda: buffer.host_bytes(0, 1),
    ):
        with pytest.raises(LifetimeError, match="freed"):
            attempt()


def test_a_buffer_is_freed_with_its_last_reference():
    device = Small()
    device.alloc(100)
    gc.collect()
    assert device.taken == 0
    assert not list(device.live_buffers)


def test_a_buffer_whose_address_cannot_be_read_is_freed():
    class Odd(Small):
        def _address(self, mem):
            raise RuntimeError("no address")

    device = Odd()
    with pytest.raises(RuntimeError):
        device.alloc(100)
    gc.collect()
    assert device.taken == 0


def test_buffers_are_neither_copied_nor_pickled():
    """A second object over one handle would free it twice."""
    buffer = HostDevice().alloc(8)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(LifetimeError, match="cannot be copied or pickled"):
            attempt(buffer)


def test_tensors_are_placed_at_aligned_offsets_where_they_fit():
    buffer = ExampleDevice().alloc(128)
    placement = buffer.init(tensor(16), 64)
    assert (placement.buffer, placement.offset, placement.handle) == (buffer, 64, None)
    with pytest.raises(BoundsError, match="not a multiple of the alignment 64"):
        buffer.init(tensor(4), 4)
    with pytest.raises(BoundsError, match="outside of"):
        buffer.init(tensor(17), 64)


# --- what has bytes ---------------------------------------------------------------------------------------------------


def test_any_contiguous_buffer_gives_its_bytes():
    for data in (
        b"abcd",
        bytearray(4),
        memoryview(b"abcd"),
        np.zeros((2, 2), np.uint8),
        np.float32(1).reshape(()),
        np.zeros(2, ml_dtypes.bfloat16),
        (ctypes.c_int * 1)(),
    ):
        assert len(as_bytes(data)) == 4
    assert len(as_bytes(np.zeros((0, 3)))) == 0
    with pytest.raises(LayoutError, match="contiguous"):
        as_bytes(np.zeros((4, 4))[:, ::2])
    with pytest.raises(LayoutError, match="not list"):
        as_bytes([1, 2])
    with pytest.raises(LayoutError, match="writable"):
        as_bytes(b"abcd", writable=True)
    readonly = np.zeros(4)
    readonly.flags.writeable = False
    with pytest.raises(LayoutError, match="writable"):
        as_bytes(readonly, writable=True)


# --- importing --------------------------------------------------------------------------------------------------------


class Mapping(HostDevice):
    """Imports host memory in buffers of limited size."""

    alignment = 16

    def __init__(self, limit: int | None = None) -> None:
        self.max_buffer_size = limit
        self.imports = 0

    def _import_host(self, data):
        self.imports += 1
        return super()._import_host(data)

    def _free(self, mem):
        self.imports -= 1


def test_arrays_are_used_in_place_and_kept_alive():
    data = np.arange(100, dtype=np.float32)
    alive = weakref.ref(data)
    buffer = HostDevice().import_host(data)
    assert isinstance(buffer, Buffer)
    data[3] = 42
    assert buffer.read(12, 4).view(np.float32)[0] == 42
    buffer.upload(0, np.float32([7]))
    assert data[0] == 7
    del data
    gc.collect()
    assert alive() is not None
    buffer.free()
    gc.collect()
    assert alive() is None


def test_read_only_arrays_are_never_written():
    data = np.zeros(16, np.float32)
    data.flags.writeable = False
    buffer = HostDevice().import_host(data)
    assert isinstance(buffer, Buffer)
    assert buffer.readonly
    for attempt in (
        lambda: buffer.upload(0, b"x"),
        lambda: buffer.clear(),
        lambda: mapped(buffer, 0, 4, write=True).__enter__(),
    ):
        with pytest.raises(HazardError, match="read-only"):
            attempt()
    assert not buffer.view(0, f32, (4,), (4,)).flags.writeable
    with mapped(buffer, 0, 4) as view:
        assert bytes(view) == bytes(4)


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_WRITE])
def test_mappings_are_used_in_place_and_cannot_be_closed_underneath(tmp_path, access):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)))
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=access)
    buffer = HostDevice().import_host(mapping)
    assert isinstance(buffer, Buffer)
    assert buffer.readonly == (access == mmap.ACCESS_READ)
    assert buffer.read(100, 4).tolist() == [100, 101, 102, 103]
    with pytest.raises(BufferError):
        mapping.close()
    buffer.free()
    mapping.close()


def test_what_a_device_cannot_import():
    with pytest.raises(UnsupportedOpError, match="allocate and upload instead"):
        ExampleDevice().import_host(np.zeros(4))
    with pytest.raises(LayoutError):
        HostDevice().import_host(np.zeros((4, 4))[:, 1])
    assert HostDevice().import_host(np.zeros((0, 4))).size == 0


def test_windows_at_the_boundaries():
    device = Mapping(256)
    assert isinstance(device.import_host(bytes(256)), Buffer)
    with pytest.raises(AllocationError, match="max_tensor_size"):
        device.import_host(bytes(257))
    whole = device.import_host(bytes(257), max_tensor_size=16)
    assert isinstance(whole, MultiBuffer)
    assert whole.size == 257
    assert whole.starts == (0, 240)
    for too_large in (257, 256, 241):
        with pytest.raises(AllocationError, match="too few for windows"):
            device.import_host(bytes(1000), max_tensor_size=too_large)
    # Tensors may be larger than half of a buffer, and no tensor may be nothing.
    for largest in (0, 1, 240):
        windows = device.import_host(bytes(1000), max_tensor_size=largest)
        assert isinstance(windows, MultiBuffer)
        windows.locate(1000 - largest, largest)


@settings(max_examples=200)
@given(st.data())
def test_every_tensor_lies_whole_in_one_window(data):
    limit = data.draw(st.integers(64, 600), label="limit")
    largest = data.draw(st.integers(0, limit), label="max_tensor_size")
    size = data.draw(st.integers(limit + 1, 4 * limit), label="size")
    device = Mapping(limit)
    mapping = np.arange(size, dtype=np.uint32).astype(np.uint8)
    try:
        whole = device.import_host(mapping, max_tensor_size=largest)
    except AllocationError:
        # Refused only where windows would hardly advance.
        assert (limit - largest) // 16 * 16 * 16 < limit
        return
    assert isinstance(whole, MultiBuffer)
    assert whole.size == size
    assert all(b.size <= limit for b in whole.buffers)
    for offset in range(size - largest + 1):
        buffer, at = whole.locate(offset, largest)
        if largest:
            assert buffer.read(at, 1)[0] == mapping[offset]


def test_a_window_that_fails_leaves_none_imported():
    class Failing(Mapping):
        def _import_host(self, data):
            if self.imports == 2:
                raise MemoryError("no more pages can be pinned")
            return super()._import_host(data)

    device = Failing(256)
    with pytest.raises(AllocationError, match="no more pages"):
        device.import_host(bytes(2000), max_tensor_size=64)
    assert device.imports == 0


# --- the ways that every memory has -----------------------------------------------------------------------------------


def test_filling_and_copying_go_in_parts_of_bounded_size():
    """What a device does not override works in bounded memory, also where ranges overlap."""
    largest = []

    class Watched(ExampleDevice):
        def _upload(self, mem, offset, data):
            largest.append(len(data))
            super()._upload(mem, offset, data)

    n = 2 * BOUNCE_BYTES + 5
    buffer = Watched().alloc(n + 100)
    buffer.fill(9, 0, n)
    assert (buffer.read(0, n) == 9).all()
    assert max(largest) == BOUNCE_BYTES
    data = np.random.default_rng(0).integers(0, 256, n + 100, np.uint8)
    for dst, src in ((100, 0), (0, 100)):
        buffer.upload(0, data)
        buffer.type._copy(buffer.handle, dst, buffer.handle, src, n)
        np.testing.assert_array_equal(buffer.read(dst, n), data[src : src + n])


def test_memory_that_cannot_be_mapped_is_shown_as_a_copy():
    buffer = ExampleDevice().alloc(16)
    buffer.clear()
    with mapped(buffer, 4, 8, write=True) as view:
        view[:] = b"12345678"
    assert buffer.read(4, 8).tobytes() == b"12345678"
    with pytest.raises(ZeroDivisionError), mapped(buffer, 0, 16, write=True) as view:
        view[0] = 1 // 0
    assert buffer.read(4, 8).tobytes() == b"12345678"


def test_mapped_memory_is_unmapped_whatever_happens():
    log = []

    class Maps(AsyncDevice):
        def _map(self, mem, offset, size):
            log.append("map")
            return mem.data.data[offset : offset + size]

        def _unmap(self, mem, view):
            log.append("unmap")
            view.release()

    device = Maps()
    assert device.caps.map
    buffer = device.alloc(16)
    with mapped(buffer, 0, 4, write=True) as view:
        view[:] = b"abcd"
    with pytest.raises(ZeroDivisionError), mapped(buffer, 0, 4):
        raise ZeroDivisionError
    assert log == ["map", "unmap"] * 2
    assert buffer.read(0, 4).tobytes() == b"abcd"


# --- special memory ---------------------------------------------------------------------------------------------------


class Pinned(BufferType):
    """Host memory of a device whose own memory is elsewhere; handles are plain addresses."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, "card.pinned", space=HOST_SPACE, alignment=4)
        self.blocks: dict[int, ctypes.Array] = {}

    def _alloc(self, size, usage):
        block = (ctypes.c_ubyte * size)()
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def _free(self, mem):
        del self.blocks[mem]

    def _upload(self, mem, offset, data):
        ctypes.memmove(mem + offset, bytes(data), len(data))

    def _download(self, mem, offset, out):
        out[:] = ctypes.string_at(mem + offset, len(out))


class Card(ExampleDevice):
    def __init__(self) -> None:
        self.pinned = Pinned(self)

    @property
    def host_buffer_type(self):
        return self.pinned

    @property
    def buffer_types(self):
        return (self.default_buffer_type, self.pinned)


def test_pinned_memory_is_host_memory_of_a_device():
    card = Card()
    assert card.caps.pinned
    assert not ExampleDevice().caps.pinned
    assert ExampleDevice().host_buffer_type is None
    kind = card.host_buffer_type
    assert (kind.name, kind.is_host, kind.is_raw, kind.can_map) == ("card.pinned", True, True, False)
    assert not card.default_buffer_type.is_host
    with kind.alloc(64) as buffer:
        buffer.clear(5)
        assert (buffer.read() == 5).all()
        buffer.host_bytes(4, 4)[:] = b"abcd"
        assert buffer.read(4, 4).tobytes() == b"abcd"
        view = buffer.view(8, f32, (4,), (4,))
        view[:] = [1, 2, 3, 4]
        assert buffer.read(8, 16).view(np.float32).tolist() == [1, 2, 3, 4]
        with pytest.raises(BoundsError):
            buffer.view(56, f32, (4,), (4,))
        kind._copy(buffer.handle, 0, buffer.handle, 8, 16)
        assert buffer.read(0, 16).view(np.float32).tolist() == [1, 2, 3, 4]
    assert not kind.blocks
    with pytest.raises(AllocationError, match="card cannot allocate") as caught:
        BufferType(card, "card.small", max_size=8).alloc(9)
    assert "card.small" in str(caught.value)


class Repacked(BufferType):
    """Keeps f32 matrices transposed and padded; the layout travels in the handle."""

    usages = frozenset({Usage.WEIGHTS})

    def __init__(self, device: Device) -> None:
        super().__init__(device, "example.repacked")
        self.shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self.forgotten = 0

    def alloc_size(self, tensor):
        return tensor.nbytes + 32

    def _init(self, mem, offset, tensor):
        self.shapes[id(mem), offset] = tensor.shape
        return "transposed"

    def _upload(self, mem, offset, data):
        shape = self.shapes[id(mem), offset]
        packed = np.frombuffer(data, np.float32).reshape(shape).T.copy()
        self.device._upload(mem, offset, as_bytes(packed))

    def _download(self, mem, offset, out):
        shape = self.shapes[id(mem), offset]
        raw = np.empty(shape[::-1], np.float32)
        self.device._download(mem, offset, as_bytes(raw))
        out[:] = as_bytes(raw.T.copy())

    def _reset(self, mem):
        self.forgotten += 1


def test_repacked_memory_unpacks_what_is_read_and_hands_out_a_handle():
    device = ExampleDevice()
    kind = Repacked(device)
    assert not kind.is_raw
    assert not kind.can_map
    w = constant(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert kind.alloc_size(w) == 56
    buffer = kind.alloc(256, Usage.WEIGHTS)
    placement = buffer.init(w, 64)
    assert placement.handle == "transposed"
    buffer.upload(64, w.leaf.data)
    raw = np.empty(6, np.float32)
    device._download(buffer.handle, 64, as_bytes(raw))
    assert raw.tolist() == [0, 3, 1, 4, 2, 5]
    assert buffer.read(64, 24).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    buffer.reset()
    assert kind.forgotten == 1
    with pytest.raises(BoundsError):
        buffer.init(w, 256 - 24)


def test_a_part_of_a_repacked_tensor_is_read_and_written_by_way_of_the_whole():
    kind = Repacked(ExampleDevice())
    buffer = kind.alloc(512, Usage.WEIGHTS)
    values = np.arange(12, dtype=np.float32)
    for offset, shape in ((64, (3, 4)), (256, (6, 2))):
        buffer.init(constant(values.reshape(shape)), offset)
        buffer.upload(offset, values)
    assert buffer.read(256 + 8, 16).view(np.float32).tolist() == [2, 3, 4, 5]
    buffer.upload(256 + 4, np.float32([-1, -2]))
    assert buffer.read(256, 48).view(np.float32).tolist() == [0, -1, -2, *range(3, 12)]
    assert buffer.read(64, 48).view(np.float32).tolist() == [*range(12)]
    with mapped(buffer, 64 + 16, 8, write=True) as view:
        view[:] = np.float32([7, 7]).tobytes()
    assert buffer.read(64, 24).view(np.float32).tolist() == [0, 1, 2, 3, 7, 7]
    buffer.fill(0, 64, 8)
    assert buffer.read(64, 12).view(np.float32).tolist() == [0, 0, 2]
    buffer.clear(0)
    assert not buffer.read(64, 48).any()
    assert not buffer.read(256, 48).any()


def test_what_is_no_part_of_a_prepared_tensor_is_refused():
    kind = Repacked(ExampleDevice())
    buffer = kind.alloc(512, Usage.WEIGHTS)
    buffer.init(constant(np.zeros((3, 4), np.float32)), 64)
    for offset, size in ((0, 16), (60, 8), (64, 52), (108, 8), (256, 4)):
        with pytest.raises(LayoutError, match="not inside of a tensor that was prepared"):
            buffer.read(offset, size)
        with pytest.raises(LayoutError, match="not inside of a tensor that was prepared"):
            buffer.upload(offset, bytes(size))
    with pytest.raises(LayoutError, match="does not store tensors as they were uploaded"):
        Repacked(HostDevice()).alloc(64, Usage.WEIGHTS).host_bytes(0, 4)
    buffer.init(constant(np.zeros((2, 2), np.float32)), 64)  # in the place of the other one
    with pytest.raises(LayoutError, match="not inside of a tensor that was prepared"):
        buffer.read(64, 48)


@pytest.mark.parametrize(
    ("what", "value"),
    [("alignment", 0), ("alignment", -64), ("alignment", 48), ("alignment", "64"), ("alignment", None),
     ("max_buffer_size", 0), ("max_buffer_size", -1), ("max_buffer_size", "1 GiB")],
)  # fmt: skip
def test_nonsense_about_memory_is_refused_where_it_is_first_asked(what, value):
    class Odd(ExampleDevice):
        pass

    setattr(Odd, what, value)
    with pytest.raises(Broken, match="of Odd"):
        Odd().alloc(16)
    with pytest.raises(Broken, match="of Odd"):
        Scheduler(Odd())
    if what == "alignment" and value is not None:
        with pytest.raises(Broken, match="of odd memory"):
            BufferType(ExampleDevice(), "odd memory", alignment=value)


def test_repacked_host_memory_is_not_read_past_its_unpacking():
    kind = Repacked(HostDevice())
    assert kind.space.host
    assert not kind.is_host
    assert not kind.can_map


# --- events -----------------------------------------------------------------------------------------------------------


def test_taking_and_giving_back_memory_is_announced():
    seen = []
    with TRACE.listen(lambda h: seen.append((h.kind, h.name, h.data["bytes"]))):
        ExampleDevice().alloc(100, Usage.WEIGHTS).free()
    assert seen == [("alloc", "exampledevice", 100), ("free", "exampledevice", 100)]


def test_the_default_kind_is_called_like_its_device():
    device = ExampleDevice()
    kind = device.default_buffer_type
    device.name = "example:1"
    assert kind.name == "example:1"


def test_bf16_shows_as_what_it_is():
    buffer = HostDevice().alloc(64)
    view = buffer.view(0, bf16, (4,), dense_strides((4,), bf16))
    assert view.dtype == ml_dtypes.bfloat16
