"""What ``opweave doctor`` says about BLAS, on the processors and with the variables that there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from opweave_cpu import hardware
from opweave_cpu.doctor import kernel_diagnosis

OLD, AVX2 = ("sse4_2",), ("avx", "avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw")


def blas(kernel: str | None) -> dict[str, object]:
    return {"internal_api": "openblas", "version": "0.3.31", "architecture": kernel, "num_threads": 2}


@pytest.mark.parametrize(
    ("kernel", "instructions", "status"),
    [
        ("SkylakeX", AVX512, "ok"), ("Cooperlake", AVX512, "ok"), ("Haswell", AVX512, "slow"), ("Zen", AVX2, "ok"),
        ("Sandybridge", AVX2, "slow"), ("Prescott", AVX512, "slow"), ("Nehalem", OLD, "ok"), ("Haswell", OLD, "ok"),
        ("neoversev1", ("asimd", "sve"), "ok"), ("something new", AVX512, "ok"), (None, AVX512, "ok"),
    ],
)  # fmt: skip
def test_a_kernel_older_than_the_processor_is_slow(monkeypatch, kernel, instructions, status):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    found = kernel_diagnosis(blas(kernel), instructions)
    assert found.status == status
    assert bool(found.remedy) == (status == "slow")


def test_a_variable_that_forces_it_is_named_and_to_be_unset(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    forced = kernel_diagnosis(blas("Haswell"), AVX512)
    assert (forced.status, forced.remedy) == ("slow", "unset OPENBLAS_CORETYPE")
    assert "OPENBLAS_CORETYPE=Haswell is in force" in forced.message
    assert kernel_diagnosis(blas("Haswell"), AVX2).status == "ok", "as new as the processor"
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert kernel_diagnosis(blas("Haswell"), AVX512).remedy.startswith("pip install --upgrade numpy")


def test_the_device_reports_its_blas():
    features = hardware.cpu_features()
    if "blas" not in features:
        pytest.skip("NumPy's BLAS tells nothing about itself")
    assert features["blas_threads"] >= 1
    if hardware.has_openblas():
        assert features["blas_kernel"]


@pytest.mark.timeout(200)
@pytest.mark.skipif(
    not (hardware.has_openblas() and "avx2" in hardware.instruction_sets()), reason="OpenBLAS on a processor with AVX2"
)
def test_the_command_finds_an_inherited_variable():
    environ = {**os.environ, "OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_NUM_THREADS": "1", "OPWEAVE_BACKENDS": "cpu"}

    def opweave(command: str) -> dict:
        done = subprocess.run(
            [sys.executable, "-m", "opweave", command, "--json"],
            capture_output=True, text=True, timeout=100, env=environ, check=False,
        )  # fmt: skip
        return json.loads(done.stdout)

    found = {d["about"]: d for d in opweave("doctor")["diagnoses"] if d["by"] == "cpu"}
    assert (found["BLAS"]["status"], found["BLAS"]["remedy"]) == ("slow", "unset OPENBLAS_CORETYPE")
    assert not [about for about in found if "threads" in about], "those of BLAS are not used within runs"
    cpu = next(d for d in opweave("devices")["devices"] if d["name"] == "cpu")
    assert cpu["blas"]["blas_kernel"] == "Nehalem"
    assert cpu["blas"]["blas_threads"] == 1
