"""What a run costs beyond its kernels: `Program.run`, feeding and fetching included, beside its peers.

Chains of 1, 10 and 1,000 additions of 16 floats on ``cpu``; nothing is fused by anybody but ``compiled``. The
contestants, in one process and in turns:

- ``bare``: a list of ``partial(np.add, a, b, out)``, called in a loop; nothing is fed or fetched. The floor for NumPy.
- ``opweave``: ``program.run({x: array})``, which feeds one input and returns a new array.
- ``compiled``: the same with ``opweave-cpu[jit]``, which compiles chains of 32 additions; without it not there.
- ``torch``: eager additions of tensors, on one thread.
- ``onnxruntime``: ``session.run`` on one thread, graph optimisations off.

Targets: opweave at most 20 µs + 1.2 times ``bare``; 1,000 compiled additions at most 48 ns each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, median, options

SIZE = 16
FIXED = 20e-6
FACTOR = 1.2


def bare(nodes: int, x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> Callable[[], object]:
    """Two buffers in turns, as a memory plan without in-place results would have it."""
    a, b = np.array(x), np.empty_like(x)
    calls = [partial(np.add, *((a, w, b) if i % 2 == 0 else (b, w, a))) for i in range(nodes)]

    def run() -> None:
        for call in calls:
            call()

    return run


def opweave_run(
    nodes: int, x: np.ndarray[Any, Any], w: np.ndarray[Any, Any], *, compiled: bool = False
) -> Callable[[], object]:
    os.environ["OPWEAVE_CPU_JIT"] = "1" if compiled else "0"  # read when the stream is opened
    tensor = ow.input("x", x.shape)
    weight = ow.weights({"w": w})["w"]
    h = tensor
    for _ in range(nodes):
        h = h + weight
    program = ow.Scheduler("cpu").build(h)
    return partial(program.run, {tensor: x})


def torch_run(nodes: int, x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)
    fed, weight = torch.from_numpy(x), torch.from_numpy(w)

    def run() -> object:
        with torch.inference_mode():
            h = fed
            for _ in range(nodes):
                h = h + weight
            return h.numpy()

    return run


def onnxruntime_run(nodes: int, x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> Callable[[], object]:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    values = ["x", *(f"h{i}" for i in range(nodes))]
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Add", [values[i], "w"], [values[i + 1]]) for i in range(nodes)],
            "chain",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
            [helper.make_tensor_value_info(values[-1], TensorProto.FLOAT, x.shape)],
            [numpy_helper.from_array(w, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])
    return partial(session.run, None, {"x": x})


def peers() -> dict[str, Callable[..., Callable[[], object]]]:
    """Those that are installed."""
    result: dict[str, Callable[..., Callable[[], object]]] = {"bare": bare, "opweave": opweave_run}
    for name, packages, run in (
        ("compiled", ("llvmlite",), partial(opweave_run, compiled=True)),
        ("torch", ("torch",), torch_run),
        ("onnxruntime", ("onnxruntime", "onnx"), onnxruntime_run),
    ):
        try:
            for package in packages:
                __import__(package)
        except ImportError:
            continue
        result[name] = run
    return result


def main() -> None:
    given = options(__doc__.splitlines()[0])
    report = Report("dispatch", given)
    x, w = np.linspace(0, 1, SIZE, dtype=np.float32), np.full(SIZE, 1e-3, np.float32)
    for nodes in (1, 10, 1000):
        times = interleaved({n: make(nodes, x, w) for n, make in peers().items()}, samples=9 if given.quick else 41)
        middle = {name: median(samples) for name, samples in times.items()}
        report.row(
            nodes=nodes,
            **{f"{name}_us": t * 1e6 for name, t in middle.items()},
            **{f"opweave_over_{n}": middle["opweave"] / t for n, t in middle.items() if n != "opweave"},
        )
        limit = FIXED + FACTOR * middle["bare"]
        report.target(f"run of {nodes:,} adds", middle["opweave"] * 1e6, limit * 1e6, "µs")
        if nodes == 1000 and "compiled" in middle:
            report.target("compiled addition of 1,000", middle["compiled"] / nodes * 1e9, 48, "ns")
    report.finish("Program.run with feeding and fetching, chains of additions of 16 floats (medians)")


if __name__ == "__main__":
    main()
