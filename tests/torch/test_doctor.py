"""What ``opweave doctor`` says about torch's wheel."""

from __future__ import annotations

import pytest
import torch

from opweave_torch import doctor, hooks
from opweave_torch.device import TorchCpuDevice


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with an NVIDIA driver and no other."""
    (tmp_path / "version").write_text("NVRM")
    signs = (("an NVIDIA driver", tmp_path / "version", "cuda"), ("an AMD driver", tmp_path / "kfd", "hip"))
    monkeypatch.setattr(doctor, "_DRIVERS", signs)


def test_a_wheel_for_the_cpu_beside_a_driver_is_slow(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    found = doctor.wheel_diagnosis()
    assert found.status == "slow"
    assert "was built without CUDA" in found.message
    assert "https://pytorch.org" in found.remedy


def test_a_driver_that_the_wheel_does_not_reach_is_wrong(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert doctor.wheel_diagnosis().status == "wrong"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert doctor.wheel_diagnosis().status == "ok"


def test_without_devices_torch_is_not_asked():
    assert list(hooks.opweave_doctor(devices=[])) == []
    assert {d.about for d in hooks.opweave_doctor(devices=[TorchCpuDevice()])} == {"torch", "torch's threads"}
