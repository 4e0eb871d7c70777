"""Which devices there are, what they can, and what of each other's memory they see."""

import os
import subprocess
import sys

import numpy as np
import pytest

from opweave.contract import HOST_SPACE, Arg, Kind, SetThreads, Step
from opweave.errors import Broken, LifetimeError, UnsupportedOpError
from opweave.graph.dtypes import as_dtype
from opweave_conformance import Case, cases_for
from opweave_cpu import CpuBackend, CpuDevice, IsolatedCpuDevice
from tests.support.kernels import assert_right_where_accepted, by_operation

F32 = as_dtype("f32")


def test_one_device_in_host_memory_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPWEAVE_CPU_DEVICES", raising=False)
    (device,) = CpuBackend().devices()
    assert device.kind is Kind.CPU
    assert device.id is None
    assert device.space is HOST_SPACE
    assert device.caps.import_host
    assert device.caps.map
    assert device.description
    assert device.mem_info()[1] > 0


def test_features_name_what_computes(device: CpuDevice) -> None:
    features = device.features()
    assert features["numpy"] == np.__version__
    assert features["blas_threads"] >= 1


@pytest.mark.parametrize("text", ["", "1", " 1 "])
def test_one_device_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", text)
    assert [type(d) for d in CpuBackend().devices()] == [CpuDevice]


def test_several_devices_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", "3")
    devices = CpuBackend().devices()
    assert [d.id for d in devices] == ["0", "1", "2"]
    assert len({d.space for d in devices}) == 3
    for device in devices:
        assert not device.space.host
        assert not device.reaches(HOST_SPACE)
        assert [d for d in devices if d.reaches(device.space)] == [device]
        assert not device.caps.import_host
        assert not device.caps.map
        with pytest.raises(UnsupportedOpError, match="upload"):
            device.import_host(np.zeros(4, np.float32))


def test_the_registry_names_them() -> None:
    code = "from opweave import registry; print([d.name for d in registry.devices() if d.name != 'host'])"
    for count, names in (("1", "['cpu']"), ("2", "['cpu:0', 'cpu:1']")):
        environment = {**os.environ, "OPWEAVE_CPU_DEVICES": count, "OPWEAVE_BACKENDS": "cpu"}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert run.stdout.strip() == names


@pytest.mark.parametrize("cases", by_operation(cases_for("linear", "index_copy", "softmax")[::10]))
def test_kernels_work_in_memory_of_their_own(cases: list[Case]) -> None:
    assert_right_where_accepted(IsolatedCpuDevice(0), cases)


def test_a_kernel_never_sees_memory_of_another_device() -> None:
    one, other = IsolatedCpuDevice(0), IsolatedCpuDevice(1)
    here, there = (Arg(d.alloc(16), 0, F32, (4,), (4,)) for d in (one, other))
    with pytest.raises(LifetimeError, match="cannot reach"):
        one.open().run([Step("add", here, (here, there), {})])


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_a_bad_number_of_devices_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OPWEAVE_CPU_DEVICES", text)
    with pytest.raises(Broken, match="no number of devices") as caught:
        CpuBackend().devices()
    assert "OPWEAVE_CPU_DEVICES" in caught.value.remedy


def test_backend_sets_threads() -> None:
    backend = CpuBackend()
    assert backend.extension(SetThreads) is backend
