"""With PoCL on one thread and on two: kernels and a program over two devices are right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ONLY = [option for op in ("matmul", "softmax", "sum", "index_copy") for option in ("--only", f"*{op}*f32*")]
"""Families whose work-items share rows and tiles, or write where an index says."""
PROGRAM = """if True:
    import sys
    import numpy as np
    import opweave as ow

    name = sys.argv[1]
    device = ow.device(name).cl_device
    rng = np.random.default_rng(0)
    value, a, b = (rng.standard_normal((96, 96)).astype(np.float32) for _ in range(3))
    x = ow.input("x", (96, 96))
    w = ow.weights({"a": a, "b": b}, device={"a": name, "b": "host"})
    with ow.Scheduler([name, "host"]) as scheduler:
        program = scheduler.build(ow.softmax(ow.linear(ow.relu(ow.linear(x, w["a"])), w["b"])))
        for _ in range(5):
            got = program.run(x=value)
    logits = np.maximum(value.astype("f8") @ a.T, 0) @ b.T
    want = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(got, want / want.sum(1, keepdims=True), rtol=1e-3, atol=1e-4)
    print(device.max_compute_units)
"""


def run(threads, *command):
    environment = {**os.environ, "POCL_MAX_PTHREAD_COUNT": str(threads)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _pocl(device):
    if "Portable Computing Language" not in device.description:
        pytest.skip("only PoCL has a variable for its number of threads")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_over_two_devices(device, threads):
    result = run(threads, "-c", PROGRAM, f"opencl:{device.id}")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) <= threads


@pytest.mark.parametrize("threads", [1, 2])
def test_conformance(device, threads):
    result = run(threads, "-m", "opweave", "conformance", f"opencl:{device.id}", "--level", "2", *ONLY)
    assert result.returncode == 0, result.stdout + result.stderr
