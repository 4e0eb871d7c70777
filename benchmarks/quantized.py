"""Products with quantized weights on ``ort:cpu``, ``torch:cpu`` and ``cpu`` beside the operator itself, ``MatMulNBits``
in a bare session of ONNX Runtime with io binding, and beside ggml where llama-cpp-python is installed
(`benchmarks/_ggml.py` says how to build it for this processor), with as many threads.

1, 16 and 128 rows of weights of 4096 × 4096 and 4096 × 14336, in q4_0, q8_0, and but for ``ort:cpu`` q4_k and q6_k:
where ``int8`` is allowed (activations quantized in blocks; torch computes in bf16), and at full precision. The
contestants take turns in one process; the figure of each is its fastest sample. The bare session and the program that
is compared with it are there three times, with weights of their own: how well packed weights lie in the processor's
caches is chance, and makes one of several equal sessions up to a fifth faster than another.

Targets: of ``ort:cpu`` in ``int8`` 1.03 times the bare session; the fastest device in ``int8``, and at full precision,
ahead of ggml, which computes in int8 always, and of whose kinds of memory for weights the fastest counts; of ``cpu``
1.1 times its own product with weights in f32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

import opweave as ow
from opweave.graph.dtypes import as_dtype, f32
from opweave.graph.precision import Precision
from opweave.runtime.host.cores import usable_cores
from opweave_ort.model import MICROSOFT, ONNX_TYPES, Model
from opweave_ort.weights import form_of, pack, pieces

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks import _ggml
from benchmarks._measure import Report, interleaved, options

Array = np.ndarray[Any, Any]
SAMPLES = 15
PAUSE: Final = 0.015
SESSIONS: Final = 3
"""How often the bare session and ours are there."""
PRECISIONS: Final[tuple[Precision, ...]] = ("int8", "exact")


def blocks(name: str, rows: int, columns: int) -> Array:
    """Random rows of a block type, with scales of about 0.01."""
    dtype = as_dtype(name)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, columns // dtype.block, dtype.itemsize), np.uint8)
    scale = np.array([0.01], np.float16).view(np.uint8)
    for at in {"q4_k": (0, 2), "q6_k": (208,)}.get(name, (0,)):
        data[..., at : at + 2] = scale
    return data.reshape(rows, -1)


def bare(name: str, data: Array, x: Array, level: int) -> Callable[[], object]:
    """The operator in a session of its own, which reads and writes the same arrays at each run."""
    dtype, (outputs, inputs) = as_dtype(name), (len(data), x.shape[1])
    form = form_of(dtype, "int8")
    arrays = pack(data, dtype, form)
    model = Model()
    weights = [model.constant(arrays[piece.name]) for piece in pieces(dtype, (outputs, inputs), form)]
    made = model("MatMulNBits", model.input("in0", f32, x.shape), *weights, domain=MICROSOFT, K=inputs, N=outputs,
                 bits=8 if form == "bytes" else 4, block_size=32, accuracy_level=level)  # fmt: skip
    name_out = model.output(made, f32, (len(x), outputs))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = usable_cores().usable
    # Threads that go on spinning would slow down the contestant whose turn is next.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model.serialized(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    out = np.empty((len(x), outputs), np.float32)
    binding.bind_input("in0", "cpu", 0, ONNX_TYPES[f32], x.shape, x.ctypes.data)
    binding.bind_output(name_out, "cpu", 0, ONNX_TYPES[f32], out.shape, out.ctypes.data)
    run = partial(session.run_with_iobinding, binding)
    run.keep = (x, out)  # type: ignore[attr-defined]
    return run


def main() -> None:
    report = Report("quantized", options(__doc__ or ""))
    quick, threads = report.options.quick, usable_cores().usable
    has_ggml = find_spec("llama_cpp") is not None
    if has_ggml:
        report.machine |= {"llama-cpp-python": _ggml.version(), "ggml features": _ggml.features()}
        if _ggml.crashing():
            report.machine["ggml without AMX"] = "built by a GCC whose code for it crashes (see benchmarks/_ggml.py)"
    for outputs, inputs in [(1024, 1024)] if quick else [(4096, 4096), (14336, 4096)]:
        values = np.random.default_rng(2).standard_normal((outputs, inputs), np.float32)
        f32_weights = ow.weights({"w": values})
        for name in ("q4_0", "q8_0", "q4_k", "q6_k"):
            data = blocks(name, outputs, inputs)
            weights = [ow.weights({"w": ow.Blocks(data, (outputs, inputs), name)})["w"] for _ in range(SESSIONS)]
            for rows in (1, 16, 128):
                x = np.random.default_rng(1).standard_normal((rows, inputs)).astype(np.float32)
                contestants: dict[str, Callable[[], object]] = {}
                has_operator = name in ("q4_0", "q8_0")
                given = ow.input("x", x.shape)
                graphs = [ow.linear(given, w) for w in weights]
                for i in range(SESSIONS if has_operator else 0):
                    contestants[f"bare int8, {i}"] = bare(name, data, x, 4)
                    program = ow.Scheduler("ort:cpu").build(graphs[i], precision="int8")
                    contestants[f"ort int8, {i}"] = partial(program.run, {given: x})
                for device in ("ort:cpu", "torch:cpu", "cpu") if has_operator else ("torch:cpu", "cpu"):
                    for precision in PRECISIONS[device == "ort:cpu" :]:
                        program = ow.Scheduler(device).build(graphs[0], precision=precision)
                        contestants[f"{device.partition(':')[0]} {precision}"] = partial(program.run, {given: x})
                f32_program = ow.Scheduler("cpu").build(ow.linear(given, f32_weights["w"]))
                contestants["cpu f32"] = partial(f32_program.run, {given: x})
                if has_ggml:
                    contestants |= {f"ggml {k}": run for k, run in _ggml.products(name, data, x, threads).items()}
                samples = interleaved(contestants, 5 if quick else SAMPLES, 0.02, PAUSE)
                times: dict[str, float] = {}
                for k, found in samples.items():
                    all_of_them = k.partition(",")[0]
                    times[all_of_them] = min(*found, times.get(all_of_them, inf))
                peers = [times.pop(k) for k in [*times] if k.startswith("ggml")]
                best = {
                    p: min(v for k, v in times.items() if k.endswith(f" {p}") and "bare" not in k) for p in PRECISIONS
                }
                if peers:
                    times["ggml"] = min(peers)
                figures = {k.replace(" ", "_") + "_ms": round(v * 1e3, 3) for k, v in times.items()}
                product = f"{name} {outputs}x{inputs}"
                if has_operator:
                    ratio = times["ort int8"] / times["bare int8"]
                    figures["ratio"] = round(ratio, 3)
                    report.target(f"{product}, {rows} rows, int8", ratio, 1.03, "times MatMulNBits")
                report.row(weights=product, rows=rows, **figures)
                for precision in PRECISIONS if peers else ():
                    report.target(f"{product}, {rows} rows, {precision}", best[precision] / min(peers), 1, "times ggml")
                own = min(times["cpu int8"], times["cpu exact"]) / times["cpu f32"]
                report.target(f"{product}, {rows} rows, cpu", own, 1.1, "times cpu in f32")
    report.finish("products with quantized weights")


if __name__ == "__main__":
    main()
