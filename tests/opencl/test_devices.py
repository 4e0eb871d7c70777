"""Which devices are found, their properties, and the error when there is none."""

from __future__ import annotations

import builtins
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
import pytest

from opweave.contract import Kind
from opweave.errors import Unavailable, UnknownNameError
from opweave.packages import pip_install
from opweave_opencl import OpenCLBackend
from opweave_opencl.discovery import SELECTION, Found, find_devices, select
from opweave_opencl.properties import kind_of
from tests.support.opencl import anew


def test_devices_are_numbered_and_describe_themselves(device):
    assert device.id.isdecimal()
    assert device.cl_device.name.strip() in device.description
    assert device.cl_device.platform.name.strip() in device.description
    assert f"{device.cl_device.max_compute_units} compute unit" in device.description
    assert f"driver {device.cl_device.driver_version.strip()}" in device.description
    free, total = device.mem_info()
    assert 0 < free <= total == device.cl_device.global_mem_size
    assert device.max_buffer_size == device.cl_device.max_mem_alloc_size
    assert device.alignment * 8 == device.cl_device.mem_base_addr_align
    assert {"opencl", "driver", "fp16", "fp64", "compute_units", "local_memory", "max_work_group"} <= set(
        device.features()
    )


def test_each_device_has_a_memory_space_of_its_own(device):
    first, second = anew(device), anew(device)
    assert not first.space.host
    assert not first.reaches(second.space)


def test_capabilities(device):
    caps = device.caps
    assert caps.asynchronous
    assert caps.events
    assert caps.fill
    assert caps.copy
    assert caps.import_host is caps.map is bool(device.cl_device.host_unified_memory)
    assert caps.pinned


@pytest.mark.parametrize(
    ("kind", "unified", "expected"),
    [
        (cl.device_type.CPU, True, Kind.CPU),
        (cl.device_type.GPU, False, Kind.GPU),
        (cl.device_type.GPU, True, Kind.IGPU),
        (cl.device_type.ACCELERATOR, False, Kind.ACCEL),
        (cl.device_type.CPU | cl.device_type.DEFAULT, True, Kind.CPU),
    ],
)
def test_kinds(kind, unified, expected):
    assert kind_of(SimpleNamespace(type=kind, host_unified_memory=unified)) is expected  # type: ignore[arg-type]


def fakes(*names):
    """Devices of these names; those called RX are integrated graphics processors, the others CPUs."""
    found = []
    for number, name in enumerate(names):
        device: Any = SimpleNamespace(
            name=name,
            platform=SimpleNamespace(name="Acme CL"),
            extensions="",
            type=cl.device_type.GPU if "RX" in name else cl.device_type.CPU,
            host_unified_memory=True,
        )
        found.append(Found(str(number), device, device))
    return found


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ("", "012"),
        ("1", "1"),
        ("2, 0", "02"),
        ("rx", "1"),
        ("*rx*", "1"),
        ("Gx*,2", "02"),
        ("*(acme cl)", "012"),
        ("igpu", "1"),
        ("CPU", "02"),
    ],
)
def test_selection_keeps_the_numbers(wanted, numbers):
    assert [f.id for f in select(fakes("GX 100", "RX 7", "Host"), wanted)] == list(numbers)


def test_parts_are_selected_by_their_own_number_and_by_the_whole_ones():
    whole, other = fakes("GX 100", "Host")
    parts = [whole._replace(id="0.0"), whole._replace(id="0.1"), other]
    assert [f.id for f in select(parts, "0")] == ["0.0", "0.1"]
    assert [f.id for f in select(parts, "0.1,1")] == ["0.1", "1"]


@pytest.mark.parametrize("wanted", ["nonsense*", "7", "0.1", "gpu", "0,nonsense"])
def test_a_selection_that_matches_nothing_names_what_there_is(monkeypatch, wanted):
    monkeypatch.setenv(SELECTION, wanted)
    with pytest.raises(Unavailable, match=r"there are: 0: GX 100 \(Acme CL\), CPU") as caught:
        select(fakes("GX 100"))
    assert SELECTION in caught.value.remedy


def test_a_selection_with_a_slip_suggests_what_was_meant():
    with pytest.raises(Unavailable, match=r"no OpenCL device named 'gx 10l'; did you mean 'GX 100'") as caught:
        select(fakes("GX 100", "Host"), "GX 10l")
    assert isinstance(caught.value.__cause__, UnknownNameError)


def test_no_platform(monkeypatch):
    def none():
        raise cl.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    monkeypatch.setattr(cl, "get_platforms", none)
    with pytest.raises(Unavailable, match="no OpenCL platform") as caught:
        OpenCLBackend().devices()
    assert pip_install("opweave-opencl[pocl]") in caught.value.remedy


def test_platforms_without_devices(monkeypatch):
    def none():
        raise cl.RuntimeError("clGetDeviceIDs failed: DEVICE_NOT_FOUND")

    empty = SimpleNamespace(name="Empty CL", get_devices=none)
    monkeypatch.setattr(cl, "get_platforms", lambda: [empty])
    with pytest.raises(Unavailable, match=r"no OpenCL device \(found: Empty CL\)"):
        OpenCLBackend().devices()
    monkeypatch.setattr(cl, "get_platforms", list)
    with pytest.raises(Unavailable, match="no OpenCL device"):
        OpenCLBackend().devices()


@pytest.mark.parametrize(("versions", "numbers"), [(["1.1", "1.2", "3.0"], ["1", "2"]), (["1.0", "10.0"], ["1"])])
def test_devices_of_old_versions_are_left_out(monkeypatch, versions, numbers):
    devices = [f.device for f in fakes(*versions)]
    for device, version in zip(devices, versions, strict=True):
        device.version = f"OpenCL {version} Acme"
    platform = SimpleNamespace(name="Acme CL", get_devices=lambda: devices)
    monkeypatch.setattr(cl, "get_platforms", lambda: [platform])
    assert [f.id for f in find_devices()] == numbers
    devices[:] = devices[:1]
    with pytest.raises(Unavailable, match=rf"no device has OpenCL 1.2 or newer \({versions[0]} \(Acme CL\)"):
        find_devices()


def test_pyopencl_missing(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "pyopencl":
            raise ImportError("libOpenCL.so.1: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Unavailable, match=r"libOpenCL\.so\.1") as caught:
        find_devices()
    assert "pip install" in caught.value.remedy


def test_importing_the_plugin_loads_no_driver():
    code = "import sys, opweave_opencl; sys.exit('pyopencl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_contexts_are_made_on_first_use(device):
    fresh = anew(device)
    assert "context" not in vars(fresh)
    fresh.alloc(16)
    assert "context" in vars(fresh)
