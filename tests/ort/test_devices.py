"""Devices of providers, what the backend says without ONNX Runtime, and what ``opweave doctor`` says of it."""

from __future__ import annotations

import subprocess
import sys

import onnxruntime
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.formats.onnx_operators import ONNX_OPERATORS
from opweave.graph.dtypes import f32, i32
from opweave.graph.opdef import OPS
from opweave_ort import OrtBackend, doctor, hooks, providers
from opweave_ort.runtime import RUNTIME


def test_importing_the_package_imports_no_runtime():
    code = "import sys, opweave_ort, opweave_ort.hooks; sys.exit('onnxruntime' in sys.modules or 'onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_provider_that_is_there_is_a_device_and_the_cpu_is_last(monkeypatch):
    here = ["CPUExecutionProvider", "CUDAExecutionProvider", "AzureExecutionProvider", "OpenVINOExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: here)
    found = OrtBackend().devices()
    assert [d.id for d in found] == ["cuda:0", "openvino", "cpu"]
    assert [d.kind for d in found] == [ow.Kind.GPU, ow.Kind.ACCEL, ow.Kind.ACCEL]


def test_a_provider_that_makes_no_session_is_unavailable(monkeypatch):
    missing = providers.Provider("NoSuchExecutionProvider", "none", ow.Kind.GPU)
    from opweave_ort.device import OrtDevice

    with pytest.raises(ow.Unavailable, match="NoSuchExecutionProvider"):
        OrtDevice(missing)._probe()


def test_a_provider_that_onnx_runtime_leaves_out_is_unavailable(monkeypatch):
    """Without its libraries it makes a session all the same, on the CPU, and only logs that."""
    from opweave_ort.device import OrtDevice

    only_cpu = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession",
        lambda model, options, providers, **more: only_cpu(model, options, providers=["CPUExecutionProvider"]),
    )  # fmt: skip
    OrtDevice(providers.PROVIDERS[-1])._probe()
    cuda = next(p for p in providers.PROVIDERS if p.id == "cuda")
    with pytest.raises(ow.Unavailable, match=r"CUDAExecutionProvider makes no session: .*left it out"):
        OrtDevice(cuda)._probe()


def test_only_the_cpus_provider_reports_indices_out_of_range():
    from opweave_ort.device import OrtDevice

    table, ids = Arg(None, 0, f32, (4, 8), (32, 4)), Arg(None, 0, i32, (2,), (4,))
    step = Step("embedding", Arg(None, 0, f32, (2, 8), (32, 4)), (table, ids), {})
    said = {p.id: OrtDevice(p).why_not(step) for p in providers.PROVIDERS}
    assert said.pop("cpu") is None
    assert all(why is not None and "does not report indices out of range" in why for why in said.values())


def test_an_old_onnx_runtime_is_unavailable(monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.16.0")
    with pytest.raises(ow.Unavailable, match=r"onnxruntime 1\.16\.0 is older than 1\.31") as raised:
        OrtBackend().devices()
    assert raised.value.remedy == "pip install 'onnxruntime>=1.31'"


def test_an_old_package_of_another_provider_is_not_joined_by_a_second_one(monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.1")
    monkeypatch.setattr(providers, "packages_distributions", lambda: {"onnxruntime": ["onnxruntime-openvino"] * 2})
    with pytest.raises(ow.Unavailable, match=r"onnxruntime-openvino 1\.24\.1 is older than 1\.31") as raised:
        OrtBackend().devices()
    assert "pip install 'onnxruntime-openvino>=1.31'" in raised.value.remedy
    assert "uninstall it and install onnxruntime" in raised.value.remedy


def test_threads_are_those_of_the_stream_else_of_the_backend(device):
    backend = OrtBackend()
    backend.set_threads(1)
    try:
        assert RUNTIME.most_threads == 1
        assert RUNTIME.options(3).intra_op_num_threads == 3
    finally:
        backend.set_threads(None)
    with pytest.raises(ow.PluginError):
        backend.set_threads(0)


def test_only_sessions_with_large_steps_have_threads(device, monkeypatch):
    asked = []
    make = RUNTIME.options

    def options(threads):
        asked.append(threads)
        return make(threads)

    monkeypatch.setattr(RUNTIME, "options", options)
    with ow.Scheduler(device.open(threads=3)) as scheduler:
        small, large = ow.input("small", (8, 9)), ow.input("large", (300, 301))
        scheduler.build(ow.tanh(small) @ small.T)
        scheduler.build(ow.tanh(large))
        scheduler.build(ow.input("a", (64, 127)) @ ow.input("b", (127, 64)))
    assert asked == [1, 3, 3]


def test_switches_are_0_or_1(monkeypatch):
    for variable in ("OPWEAVE_ORT_PACK", "OPWEAVE_ORT_SHARED_POOL"):
        monkeypatch.setenv(variable, "yes")
        with pytest.raises(ow.Unavailable, match=f"{variable} is 0 or 1, not 'yes'") as raised:
            OrtBackend().devices()
        assert raised.value.remedy == f"set {variable} to 0 or 1, or unset it"
        monkeypatch.delenv(variable)


def test_sessions_of_other_libraries_can_be_made_beside_ours(device):
    with ow.Scheduler(device) as scheduler:
        scheduler.build(ow.exp(ow.input("x", (4,))))
    from opweave.graph.dtypes import f32
    from opweave_ort.model import Model

    model = Model()
    model.output(model("Exp", model.input("in0", f32, (4,))), f32, (4,))
    onnxruntime.InferenceSession(model.serialized(), providers=["CPUExecutionProvider"], enable_fallback=False)


def test_the_doctor_tells_a_package_without_the_provider_of_a_driver(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM")
    signs = (("an NVIDIA driver", tmp_path / "version", "CUDAExecutionProvider", "onnxruntime-gpu"),)
    monkeypatch.setattr(doctor, "_DRIVERS", signs)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    found = doctor.package_diagnosis()
    assert (found.status, "onnxruntime-gpu" in found.remedy) == ("slow", True)
    assert doctor.version_diagnosis("2.0.1").status == "wrong"


def test_the_doctor_tells_packages_that_overwrite_each_other(monkeypatch):
    both = ["onnxruntime", "onnxruntime-gpu"]
    monkeypatch.setattr(providers, "packages_distributions", lambda: {"onnxruntime": both})
    found = doctor.package_diagnosis()
    assert (found.status, found.remedy[:46]) == ("wrong", "pip uninstall onnxruntime onnxruntime-gpu, the")
    assert list(hooks.opweave_doctor(devices=[])) == []


def test_the_table_of_operators_names_operations_and_can_be_read_backwards():
    assert {row.op for row in ONNX_OPERATORS} <= set(OPS)
    backwards = {(row.onnx, tuple(sorted(row.fixed.items()))) for row in ONNX_OPERATORS}
    assert len(backwards) == len(ONNX_OPERATORS)


def test_the_families_that_models_consist_of_have_emitters(device):
    wanted = {"attention", "conv", "convolution", "elementwise", "experts", "indexing", "interpolation", "matmul",
              "normalization", "random", "reduction", "rope", "state_space"}  # fmt: skip
    missing = {
        name for name, op in OPS.items() if op.family in wanted and not op.is_view and name not in device.kernels.ops()
    }
    assert not missing
