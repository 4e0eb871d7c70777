"""Which devices there are, what is known about them, and what they can be opened with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.contract import HOST_SPACE, Arg, Kind, SetThreads, Step
from opweave.errors import Broken, PluginError, Unavailable
from opweave.graph.dtypes import as_dtype
from opweave_torch import TorchBackend
from opweave_torch.accelerator import CudaDevice, MpsDevice, SeparateCpuDevice, TorchAccelerator, XpuDevice
from opweave_torch.device import TorchCpuDevice
from opweave_torch.health import why_no_kernels
from opweave_torch.options import THREADS


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OPWEAVE_BACKENDS": "torch", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


# --- finding --------------------------------------------------------------------------------------------------------


def test_the_cpu_comes_last_and_shares_the_memory_of_the_process(monkeypatch):
    monkeypatch.delenv("OPWEAVE_TORCH_SEPARATE", raising=False)
    *accelerators, cpu = TorchBackend().devices()
    assert isinstance(cpu, TorchCpuDevice)
    assert cpu.kind is Kind.ACCEL
    assert cpu.space is HOST_SPACE
    assert cpu.caps.import_host
    assert cpu.caps.map
    assert not cpu.caps.asynchronous
    assert len(accelerators) == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def test_the_registry_names_it_and_finding_it_imports_nothing():
    code = """
import json, sys
import opweave as ow
states = [r.state.name for r in ow.plugins() if r.name == "torch"]
import opweave_torch
early = "torch" in sys.modules
names = [d.name for d in ow.devices() if d.backend.name == "torch"]
print(json.dumps([states, early, names[-1], "torch" in sys.modules]))
"""
    assert json.loads(python(code)) == [["DISCOVERED"], False, "torch:cpu", True]


def test_without_torch_it_is_unavailable_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unavailable, match="torch cannot be imported") as caught:
        TorchBackend().devices()
    assert "pip install torch" in caught.value.remedy


def test_separate_memory_is_asked_for_by_a_variable(monkeypatch):
    for text, kind in (("", TorchCpuDevice), ("0", TorchCpuDevice), (" 1 ", SeparateCpuDevice)):
        monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", text)
        assert type(TorchBackend().devices()[-1]) is kind
    monkeypatch.setenv("OPWEAVE_TORCH_SEPARATE", "yes")
    with pytest.raises(Broken, match="'yes'") as caught:
        TorchBackend().devices()
    assert "OPWEAVE_TORCH_SEPARATE" in caught.value.remedy


def test_with_separate_memory_it_plays_an_accelerator(separate):
    assert separate.id == "cpu"
    assert not separate.reaches(HOST_SPACE)
    caps = separate.caps
    assert (caps.asynchronous, caps.events, caps.offload) == (True, True, True)
    assert not caps.import_host
    assert not caps.map
    assert separate.mem_info()[1] > 0


# --- what is known about them ---------------------------------------------------------------------------------------


def test_features_of_the_cpu(device):
    features = device.features()
    assert features["torch"] == torch.__version__
    assert features["threads"] == torch.get_num_threads()
    assert features["capability"] == torch.backends.cpu.get_cpu_capability()
    assert TorchBackend().features() == features
    assert "PyTorch" in device.description
    assert device.mem_info()[1] > 0


def properties(**more: object) -> SimpleNamespace:
    return SimpleNamespace(
        name="A Card", major=9, minor=0, multi_processor_count=132, is_integrated=0, pci_domain_id=0, pci_bus_id=0x1B,
        pci_device_id=0, **more,
    )  # fmt: skip


def show(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Let torch show ``count`` accelerators of a type."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_cards_of_cuda_by_number_with_name_kind_and_pci_address(monkeypatch):
    show(monkeypatch, "cuda", 2)
    found = [properties(), properties()]
    found[1].is_integrated, found[1].pci_bus_id = 1, 0x41
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda target: found[target.index])
    first, second, cpu = TorchBackend().devices()
    assert isinstance(first, CudaDevice)
    assert [d.id for d in (first, second, cpu)] == ["cuda:0", "cuda:1", "cpu"]
    assert (first.kind, second.kind) == (Kind.GPU, Kind.IGPU)
    assert first.description == "A Card"
    assert (first.hardware_id, second.hardware_id) == ("0000:1b:00.0", "0000:41:00.0")
    assert first.dlpack_device == (2, 0)
    assert second.dlpack_device == (2, 1)
    caps = first.caps
    assert (caps.asynchronous, caps.events, caps.pinned, caps.offload) == (True, True, True, True)


def test_of_two_backends_with_one_card_torch_is_used():
    assert TorchBackend.priority > pytest.importorskip("opweave_opencl").OpenCLBackend.priority


def test_memory_that_torch_keeps_for_later_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda target: properties())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda target: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda target: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda target: 200)
    assert CudaDevice(torch.device("cuda", 0)).mem_info() == (1300, 8000)


def test_other_accelerators_by_their_type(monkeypatch):
    show(monkeypatch, "xpu", 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda target: properties())
    assert isinstance(TorchBackend().devices()[0], XpuDevice)
    show(monkeypatch, "mps", 1)
    apple = TorchBackend().devices()[0]
    assert isinstance(apple, MpsDevice)
    assert (apple.id, apple.kind) == ("mps", Kind.IGPU)
    assert not apple.caps.events
    show(monkeypatch, "mtia", 1)
    (other, _) = TorchBackend().devices()
    assert type(other) is TorchAccelerator
    assert (other.id, other.kind) == ("mtia:0", Kind.ACCEL)


def test_metal_has_no_f64():
    arg = Arg(None, 0, as_dtype("f64"), (4,), (8,))
    assert "f64" in str(MpsDevice(torch.device("mps")).why_not(Step("add", arg, (arg, arg), {})))


# --- opening them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, -1, 1.5, "two", True])
def test_a_bad_number_of_threads_is_refused(device, threads):
    with pytest.raises(PluginError, match="positive whole number"):
        device.open(threads=threads)
    with pytest.raises(PluginError, match="positive whole number"):
        TorchBackend().set_threads(threads)


def test_unknown_parameters_are_refused_with_those_there_are(device):
    with pytest.raises(TypeError, match=r"graphs.*compile.*deterministic.*threads"):
        device.open(graphs=True)
    with pytest.raises(PluginError, match="deterministic must be true or false"):
        device.open(deterministic="perhaps")


def test_a_run_has_the_threads_it_was_opened_with_and_leaves_torch_as_it_was(device):
    found, seen = torch.get_num_threads(), []

    def look(x: np.ndarray) -> np.ndarray:
        seen.append(torch.get_num_threads())
        return x

    x = ow.input("x", (3,))
    node = ow.custom(look, x, like=x)
    with device.open(threads=found + 1) as stream, ow.Scheduler(stream) as scheduler:
        assert stream.threads == found + 1
        scheduler.build(node).run(x=np.ones(3, np.float32))
    assert seen == [found + 1]
    assert torch.get_num_threads() == found


def test_the_backend_sets_threads_of_streams_without_their_own(device, monkeypatch):
    monkeypatch.setattr(THREADS, "default", None)
    backend = TorchBackend()
    assert backend.extension(SetThreads) is backend
    backend.set_threads(3)
    assert device.open().threads == 3
    assert device.open(threads=2).threads == 2
    backend.set_threads(None)
    assert device.open().threads == torch.get_num_threads()


def test_a_deterministic_run_forbids_other_algorithms_and_leaves_torch_as_it_was(device):
    seen = []

    def look(x: np.ndarray) -> np.ndarray:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return x

    x = ow.input("x", (3,))
    node = ow.custom(look, x, like=x)
    for wanted in (True, False):
        with device.open(deterministic=wanted) as stream, ow.Scheduler(stream) as scheduler:
            scheduler.build(node).run(x=np.ones(3, np.float32))
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_stream_of_cuda_needs_a_setting_of_cublas(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda target: properties())
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(PluginError, match="cuBLAS") as caught:
        CudaDevice(torch.device("cuda", 0)).open(deterministic=True)
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in caught.value.remedy


# --- cards that do not work -------------------------------------------------------------------------------------------

BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("card", "built_for", "runs"),
    [
        ("sm_90", BUILT, True),
        ("sm_89", BUILT, True),  # code of sm_86
        ("sm_103", BUILT, True),
        ("sm_70", BUILT, False),
        ("sm_110", BUILT, False),
        ("sm_70", [*BUILT, "compute_50"], True),
        ("sm_70", [*BUILT, "compute_80"], False),
        ("sm_91", ["sm_90a"], False),  # code of one architecture alone
        ("sm_90", ["sm_90a"], True),
        ("sm_70", [], True),  # nothing is known
        ("gfx90a", ["gfx908", "gfx90a"], True),
        ("gfx803", ["gfx908", "gfx90a"], False),
        ("gfx1103", ["gfx90a", "gfx11-generic"], True),
    ],
)
def test_for_which_cards_a_build_has_kernels(card, built_for, runs):
    why = why_no_kernels(card, built_for)
    assert (why is None) is runs
    if why is not None:
        assert f"has no kernels for {card}, only for {' '.join(built_for)}" in why


def test_a_card_without_kernels_is_listed_with_the_reason_and_the_others_go_on(monkeypatch):
    show(monkeypatch, "cuda", 3)
    old = properties()
    old.name, old.major = "An Old Card", 6

    def found(target):
        if target.index == 1:
            raise RuntimeError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA")
        return old if target.index == 2 else properties()

    monkeypatch.setattr(torch.cuda, "get_device_properties", found)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT)
    registry = ow.Registry(environ={}, search=[])
    registry.register(TorchBackend)
    name = registry.backends()[0].name
    assert [d.name for d in registry.devices()] == [f"{name}:cuda:0", f"{name}:cpu", "host"]
    (record,) = [r for r in registry.plugins() if r.name == name]
    lost, without = record.unusable
    assert (lost.name, lost.error) == (f"{name}:cuda:1", "CUDA error: unknown error")
    assert (without.name, without.description) == (f"{name}:cuda:2", "An Old Card")
    assert "has no kernels for sm_60" in without.error
    assert "pytorch.org" in without.remedy


def test_other_accelerators_are_tried_with_a_kernel(monkeypatch):
    good = TorchAccelerator(torch.device("cpu"))
    good.probe()

    def fail(*args: object, **named: object) -> None:
        raise RuntimeError("no kernel image is available\nat some line")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(Unavailable, match=r"it runs no kernel: no kernel image is available\n"):
        good.probe()
    monkeypatch.setattr(torch, "ones", lambda *args, **named: torch.zeros(8))
    with pytest.raises(Unavailable, match=r"the sum of eight twos is 0\.0"):
        good.probe()
