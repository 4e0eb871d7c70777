"""The name of the processor: what ``/proc/cpuinfo`` says, else what Python knows."""

from __future__ import annotations

import platform

import pytest

from opweave.runtime.host import processor


def test_the_model_is_preferred_to_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "cpu_fields", lambda: {"model name": "Model 1"})
    assert processor.cpu_name() == "Model 1"
    monkeypatch.setattr(processor, "cpu_fields", dict)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert processor.cpu_name() == "riscv64"


def test_backends_name_the_same_processor() -> None:
    import opweave as ow

    name = processor.cpu_name()
    assert ow.open_device("cpu").device.description == name
