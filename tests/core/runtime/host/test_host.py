"""The backend ``host``: memory of this process, and every definition as a kernel."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Kind, Step
from opweave.errors import AllocationError
from opweave.graph.dtypes import as_dtype
from opweave.graph.layout import dense_strides
from opweave.graph.opdef import OPS, OpDef
from opweave.runtime.host import memory, reservations
from opweave.runtime.host.device import HostBackend, HostDevice
from opweave.runtime.host.memory import host_memory_info
from opweave.runtime.host.operands import read, write
from opweave.runtime.host.reservations import Reservations


def leaf(device, array):
    dtype = as_dtype(array.dtype)
    arg = Arg(device.alloc(max(array.nbytes, 1)), 0, dtype, array.shape, dense_strides(array.shape, dtype))
    write(arg, array)
    return arg


@pytest.fixture
def device():
    return HostDevice()


def run(device, op, out, *srcs, **attrs):
    with device.open() as stream:
        stream.run([Step(op, out, srcs, attrs)])
    return read(out)


def test_it_is_the_last_resort():
    backend = HostBackend()
    (device,) = backend.devices()
    assert (backend.name, device.kind) == ("host", Kind.HOST)
    assert backend.priority < 0
    assert device.kernels.ops() == {name for name, op in OPS.items() if not op.is_view}
    assert device.why_not(Step("reshape", *[None] * 2, {})) == "no definition of reshape"


def test_it_runs_references_on_any_layout(device):
    x = leaf(device, np.arange(12, dtype=np.float32).reshape(3, 4))
    transposed = Arg(x.buffer, 0, x.dtype, (4, 3), (4, 16))
    out = leaf(device, np.zeros((4, 3), np.float32))
    np.testing.assert_array_equal(run(device, "neg", out, transposed), -np.arange(12).reshape(3, 4).T)
    np.testing.assert_array_equal(run(device, "add", x, x, x), 2 * np.arange(12).reshape(3, 4))


def test_results_are_rounded_and_overflow_without_warnings(device):
    x = leaf(device, np.float32([1e30, 1, 0]))
    half = leaf(device, np.zeros(3, np.float16))
    np.testing.assert_array_equal(run(device, "cast", half, x, dtype=as_dtype("f16")), np.float16([np.inf, 1, 0]))
    out = leaf(device, np.zeros(3, np.float32))
    assert run(device, "log", out, x)[2] == -np.inf


def test_it_runs_what_third_parties_define(device, monkeypatch):
    monkeypatch.setitem(OPS, "double", OpDef("double", infer=lambda x: (x.shape, x.dtype), reference=lambda x: x * 2))
    x = leaf(device, np.float32([1, 2]))
    assert device.why_not(Step("double", x, (x,), {})) is None
    assert run(device, "double", x, x).tolist() == [2, 4]


def test_a_reference_may_write_where_it_reads(device):
    """Every source may be overwritten: a reference is done reading when its result is written."""
    x = leaf(device, np.arange(4, dtype=np.float32))
    assert device.inplace(Step("concat", x, (x,), {}))
    rows = Arg(x.buffer, 0, x.dtype, (4,), (4,))
    np.testing.assert_array_equal(run(device, "add", x, x, rows), [0, 2, 4, 6])


def test_memory_info():
    free, total = host_memory_info()
    assert 0 < free <= total
    assert HostDevice().mem_info()[1] == total


def test_more_than_the_machine_has_left_is_refused(monkeypatch):
    """Systems promise more memory than there is and end the process that uses it."""
    monkeypatch.setattr(memory, "RESERVATIONS", Reservations())
    monkeypatch.setattr(reservations, "meminfo", lambda: {"MemAvailable": 300 << 20, "SwapFree": 100 << 20})
    device = HostDevice()
    with pytest.raises(AllocationError, match="more than the machine has left"):
        device.alloc(401 << 20)
    assert device.alloc(399 << 20).size == 399 << 20
    monkeypatch.setattr(reservations, "meminfo", dict)
    assert device.alloc(1 << 28).size == 1 << 28


def test_promises_that_nobody_has_used_yet_count(monkeypatch):
    """Many allocations that each fit, and together do not."""
    monkeypatch.setattr(memory, "RESERVATIONS", reserved := Reservations())
    monkeypatch.setattr(reservations, "meminfo", lambda: {"MemAvailable": 400 << 20})
    device = HostDevice()
    first, second = device.alloc(150 << 20), device.alloc(150 << 20)
    assert reserved.reserved == 300 << 20
    assert abs(device.mem_info()[0] - (100 << 20)) < 8 << 20
    with pytest.raises(AllocationError, match="314,572,800 bytes are reserved"):
        device.alloc(150 << 20)
    view = second.view(0, as_dtype("f32"), (4,), (4,))
    for buffer in (first, second):
        buffer.free()
    del first, second
    assert reserved.reserved == 150 << 20, "an array is still over it"
    del view
    assert reserved.reserved == 0
    device.alloc(150 << 20)


def test_what_is_used_is_not_subtracted_twice(monkeypatch):
    """Memory in use is already missing from what the system reports as available."""
    resident = 1 << 30
    monkeypatch.setattr(reservations, "resident_bytes", lambda: resident)
    monkeypatch.setattr(reservations, "meminfo", lambda: {"MemAvailable": available})
    reserved, available = Reservations(), 1000
    reserved.reserve(600)
    assert reserved.available() == 400
    resident, available = resident + 500, 500  # 500 of them were written to
    assert reserved.available() == 400
    resident, available = resident - 700, 1200  # they, or other arrays, are gone
    assert reserved.available() == 600
    reserved.release(600)
    assert reserved.available() == 1200


def test_memory_info_on_other_systems(monkeypatch):
    monkeypatch.setattr(reservations, "meminfo", dict)
    free, total = host_memory_info()
    assert 0 < free <= total
    monkeypatch.delattr(memory.os, "sysconf")
    assert host_memory_info() == (0, 0)


def test_a_graph_needs_no_other_device():
    x = ow.input("x", (2, 3))
    with ow.Scheduler(HostDevice()) as scheduler:
        np.testing.assert_allclose(scheduler.build(ow.softmax(x)).run(x=np.zeros((2, 3), "f4")), np.full((2, 3), 1 / 3))
