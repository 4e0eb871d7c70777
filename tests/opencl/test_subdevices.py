"""Parts of a device as devices: how they are named, that they copy and wait without the host, and run a split graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

import opweave as ow
from opweave.contract import Stream
from opweave.errors import Unavailable
from opweave_opencl import program
from opweave_opencl.caching import BinaryCache
from opweave_opencl.discovery import PARTS, Found, partition
from opweave_opencl.program import Programs


def test_parts_are_named_after_their_device(device, halves):
    assert [d.name for d in halves] == [f"opencl:{device.id}.0", f"opencl:{device.id}.1"]
    whole = device.cl_device
    assert sum(d.cl_device.max_compute_units for d in halves) == whole.max_compute_units
    assert not halves[0].reaches(halves[1].space)


def test_sub_devices_share_a_memory_budget(halves):
    before = halves[1].mem_info()[0]
    with halves[0].alloc(1 << 20):
        assert halves[1].budget.used == halves[0].budget.used >= 1 << 20
        assert halves[1].mem_info()[0] <= before


def test_devices_of_one_platform_share_a_context(halves):
    assert halves[0].context is halves[1].context


def test_parts_load_what_was_built_for_the_whole(device, halves, tmp_path, monkeypatch):
    cache = BinaryCache(tmp_path / "cache")
    text = "__kernel void twice(__global int *x) { x[get_global_id(0)] *= 2; }"
    Programs(device.name, device.context, device.cl_device, cache).build("twice.cl", text)
    monkeypatch.setattr(program, "compiled", lambda *_: pytest.fail("it is built again"))
    for half in halves:
        built = Programs(half.name, half.context, half.cl_device, cache).build("twice.cl", text)
        values = np.arange(8, dtype=np.int32)
        mem = cl.Buffer(half.context, cl.mem_flags.COPY_HOST_PTR, hostbuf=values)
        kernel = cl.Kernel(built, "twice")
        kernel.set_arg(0, mem)
        cl.enqueue_nd_range_kernel(half.queue, kernel, (8,), None)
        cl.enqueue_copy(half.queue, values, mem)
        assert np.array_equal(values, 2 * np.arange(8))


def fake(units, ways, most=8):
    device: Any = SimpleNamespace(
        name="Acme",
        platform=SimpleNamespace(name="Acme CL"),
        extensions="",
        max_compute_units=units,
        partition_properties=ways,
        partition_max_sub_devices=most,
    )
    device.create_sub_devices = lambda how: [tuple(how)] * 9
    return Found("3", device, device)


WAY = cl.device_partition_property


def test_units_are_shared_out_evenly():
    cut = partition([fake(5, [WAY.BY_COUNTS, WAY.EQUALLY])], "3")
    assert [f.id for f in cut][:3] == ["3.0", "3.1", "3.2"]
    assert cut[0].device == (WAY.BY_COUNTS, 2, 2, 1, WAY.BY_COUNTS_LIST_END)
    cut = partition([fake(5, [WAY.EQUALLY])], "2")
    assert [f.id for f in cut] == ["3.0", "3.1"]
    assert cut[0].device == (WAY.EQUALLY, 2)


def test_what_cannot_be_cut_stays_whole():
    found = [fake(8, [WAY.EQUALLY]), fake(8, [])._replace(id="4")]
    assert [f.id for f in partition(found, "2")] == ["3.0", "3.1", "4"]
    assert partition(found, "") == partition(found, "1") == found


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (fake(1, [WAY.EQUALLY]), "it has 1 compute units"),
        (fake(8, []), "its driver does not cut it"),
        (fake(8, [WAY.EQUALLY], most=1), "not cut it into so many"),
    ],
)
def test_no_device_that_can_be_cut(device, why):
    with pytest.raises(Unavailable, match=rf"no device can be cut into 2 parts \(3: Acme \(Acme CL\): .*{why}"):
        partition([device], "2")


@pytest.mark.parametrize("parts", ["two", "0", "-1", "1.5"])
def test_no_number_of_parts(parts):
    with pytest.raises(Unavailable, match="is no number of parts") as caught:
        partition([fake(8, [WAY.EQUALLY])], parts)
    assert PARTS in caught.value.remedy


# --- working together -----------------------------------------------------------------------------------------------


def test_copies_between_parts_do_not_touch_the_host(halves, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    with halves[0].alloc(1 << 20) as src, halves[1].alloc(1 << 20) as dst, halves[1].open() as stream:
        src.upload(0, values)
        for device in halves:
            monkeypatch.setattr(device, "_upload", None)
            monkeypatch.setattr(device, "_download", None)
        assert stream.copy_from(dst, 100, src, 50, 1 << 19)
        stream.synchronize()
        monkeypatch.undo()
        np.testing.assert_array_equal(dst.read(100, 1 << 19), values[50 : 50 + (1 << 19)])


def test_a_part_waits_for_another_without_the_host(halves, monkeypatch):
    n = 1 << 20
    with halves[0].open() as first, halves[1].open() as second, halves[0].alloc(n) as src, halves[1].alloc(n) as dst:
        first.upload(src, 0, np.full(n, 5, np.uint8))
        mark = first.record()
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "synchronize", None)
            patch.setattr(type(mark), "synchronize", None)
            second.wait(mark)
            assert second.copy_from(dst, 0, src, 0, n)
        second.synchronize()
        assert (dst.read() == 5).all()


def test_two_parts_run_a_split_graph(halves):
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal((48, 48)).astype(np.float32) / 7 for i in range(6)}
    x = ow.input("x", (32, 48))
    value = rng.standard_normal((32, 48)).astype(np.float32)
    weights = ow.weights(arrays, device={"w[024]": halves[0], "w[135]": halves[1]})
    h, want = x, value.astype(np.float64)
    for name in arrays:
        h = ow.relu(ow.linear(h, weights[name])) + x
        want = np.maximum(want @ arrays[name].T.astype(np.float64), 0) + value
    with ow.Scheduler(halves) as scheduler:
        program = scheduler.build(h)
        assert {split.target.name for split in program.splits} == {d.name for d in halves}
        assert len(program.splits) >= 6
        for _ in range(3):
            np.testing.assert_allclose(program.run(x=value), want, rtol=1e-4, atol=1e-4)
