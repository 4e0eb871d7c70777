"""Memory that host and device share: arrays used in place, buffers mapped, both only between mapping and unmapping."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from opweave.contract import Arg, Buffer, Kind, MultiBuffer, Step, mapped
from opweave.errors import HazardError, UnsupportedOpError
from opweave.graph.dtypes import as_dtype
from opweave_opencl.device import OpenCLDevice
from opweave_opencl.unified import UnifiedDevice

F32 = as_dtype("f32")


@pytest.fixture(autouse=True)
def _unified(device):
    if not isinstance(device, UnifiedDevice):
        pytest.skip("the device has memory of its own")


def aligned(n, dtype=np.float32, to=4096):
    raw = np.zeros(n * np.dtype(dtype).itemsize + to, np.uint8)
    skip = -raw.__array_interface__["data"][0] % to
    return raw[skip : skip + n * np.dtype(dtype).itemsize].view(dtype)


def vector(buffer, n, offset=0):
    return Arg(buffer, offset, F32, (n,), (4,))


def test_kernels_read_and_write_an_array_in_place(device, stream):
    array = aligned(1024)
    array[:] = np.arange(1024)
    with device.import_host(array) as buffer:
        x = vector(buffer, 1024)
        stream.run([Step("add", x, (x, x), {})])
        stream.synchronize()
        np.testing.assert_array_equal(buffer.read().view(np.float32), 2 * np.arange(1024))
        with mapped(buffer, 0, 4096):
            np.testing.assert_array_equal(array, 2 * np.arange(1024))


def test_what_is_uploaded_filled_or_copied_is_in_the_array(device):
    array, other = aligned(256, np.uint8), device.alloc(64)
    other.upload(0, np.arange(64, dtype=np.uint8))
    with device.import_host(array) as buffer:
        buffer.upload(0, np.full(16, 1, np.uint8))
        buffer.fill(2, 16, 16)
        device.default_buffer_type._copy(buffer.handle, 32, other.handle, 0, 64)
        assert array[:32].tolist() == [1] * 16 + [2] * 16
        assert array[32:96].tolist() == list(range(64))


def test_a_read_only_array_is_read_by_kernels_and_written_by_nobody(device, stream):
    array = aligned(64)
    array[:] = 3
    array.flags.writeable = False
    out = device.alloc(256)
    with device.import_host(array) as buffer:
        assert buffer.readonly
        stream.run([Step("add", vector(out, 64), (vector(buffer, 64), vector(buffer, 64)), {})])
        stream.synchronize()
        assert (out.read().view(np.float32) == 6).all()
        with pytest.raises(HazardError):
            stream.run([Step("neg", vector(buffer, 64), (vector(out, 64),), {})])
        with pytest.raises(HazardError):
            buffer.fill(0)
        with mapped(buffer, 0, 256) as view:
            assert np.frombuffer(view, np.float32)[5] == 3


def test_arrays_that_are_badly_aligned_are_refused(device):
    array = aligned(1024, np.uint8)[4:]
    with pytest.raises(UnsupportedOpError, match=f"begins at a multiple of {device.alignment} bytes"):
        device.import_host(array)


def test_graphics_processors_take_whole_lines_of_whole_pages(device, monkeypatch):
    """Drivers of graphics processors keep a copy of anything else."""
    monkeypatch.setattr(device, "kind", Kind.IGPU)
    array = aligned(8192, np.uint8)
    device.import_host(array).free()
    for part in (array[:100], array[128:256]):
        with pytest.raises(UnsupportedOpError, match="begins at a multiple of 4096 bytes and ends at one of 64"):
            device.import_host(part)


def test_a_mapping_of_a_file_above_the_largest_buffer_comes_in_windows(device, monkeypatch, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(np.arange(64 << 10, dtype=np.float32).tobytes())
    monkeypatch.setattr(device, "max_buffer_size", 100 << 10)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with device.import_host(mapping, max_tensor_size=4096) as whole:
        assert isinstance(whole, MultiBuffer)
        assert len(whole.buffers) > 2
        for element in (0, 25_000, 60_000):
            part, local = whole.locate(4 * element, 4096)
            assert part.read(local, 4096).view(np.float32)[0] == element
    mapping.close()


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (5, 100), (128, 256), (999, 1)])
def test_mapped_bytes_are_the_buffers_own(device, offset, size):
    with device.alloc(1000) as buffer:
        buffer.clear(9)
        with mapped(buffer, offset, size, write=True) as view:
            assert bytes(view) == bytes([9]) * size
            view[:] = bytes([7]) * size
        expected = np.full(1000, 9, np.uint8)
        expected[offset : offset + size] = 7
        np.testing.assert_array_equal(buffer.read(), expected)


def test_discrete_devices_neither_map_nor_import():
    caps = OpenCLDevice.__dict__
    assert not {"_map", "_unmap", "_import_host"} & set(caps)


def test_an_import_lets_go_of_its_array(device):
    array = aligned(64)
    buffer = device.import_host(array)
    assert isinstance(buffer, Buffer)
    taken = device.budget.used
    buffer.free()
    assert buffer.owner is None
    assert device.budget.used == taken
