"""Which devices there are, what they say about themselves, and what is said when there is none."""

from __future__ import annotations

import builtins
import subprocess
import sys
from types import SimpleNamespace

import pyopencl as cl
import pytest

from opweave.contract import Kind
from opweave.errors import Unavailable
from opweave_opencl import OpenCLBackend
from opweave_opencl.discovery import SELECTION, find_devices, kind_of, select


def test_devices_are_numbered_and_describe_themselves(device):
    assert device.id == "0"
    assert device.cl_device.name.strip() in device.description
    assert device.cl_device.platform.name.strip() in device.description
    free, total = device.mem_info()
    assert 0 < free <= total == device.cl_device.global_mem_size
    assert device.max_buffer_size == device.cl_device.max_mem_alloc_size
    assert device.alignment * 8 == device.cl_device.mem_base_addr_align
    assert {"opencl", "driver", "fp16", "fp64", "compute_units", "local_memory", "max_work_group"} <= set(
        device.features()
    )


def test_each_device_has_a_memory_space_of_its_own():
    first, second = OpenCLBackend().devices()[0], OpenCLBackend().devices()[0]
    assert not first.space.host
    assert not first.reaches(second.space)


def test_capabilities(device):
    caps = device.caps
    assert caps.asynchronous
    assert caps.events
    assert caps.fill
    assert caps.copy
    assert not caps.import_host


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
    return [SimpleNamespace(name=name, platform=SimpleNamespace(name="Acme CL")) for name in names]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [("", [0, 1, 2]), ("1", [1]), ("2, 0", [0, 2]), ("*rx*", [1]), ("Gx*,2", [0, 2]), ("*(acme cl)", [0, 1, 2])],
)
def test_selection_keeps_the_numbers(wanted, numbers):
    assert [n for n, _ in select(fakes("GX 100", "RX 7", "Host"), wanted)] == numbers


def test_a_selection_that_matches_nothing_names_what_there_is(monkeypatch):
    monkeypatch.setenv(SELECTION, "nonsense*")
    with pytest.raises(Unavailable, match=r"'nonsense\*' matches no device of 0: GX 100 \(Acme CL\)") as caught:
        select(fakes("GX 100"))
    assert SELECTION in caught.value.remedy


def test_no_platform(monkeypatch):
    def none():
        raise cl.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    monkeypatch.setattr(cl, "get_platforms", none)
    with pytest.raises(Unavailable, match="no OpenCL platform") as caught:
        OpenCLBackend().devices()
    assert "opweave-opencl[pocl]" in caught.value.remedy


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


def test_contexts_are_made_on_first_use():
    fresh = OpenCLBackend().devices()[0]
    assert "context" not in vars(fresh)
    fresh.alloc(16)
    assert "context" in vars(fresh)
