"""ONNX models through the front end: the import of each node, and a run beside the same graph written by hand and
beside ONNX Runtime.

A run through the front end makes the calls of one program, so it should take what the graph by hand takes (1.00)."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import opweave as ow
import opweave_onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options

LAYERS, WIDTH, ROWS = 24, 512, 64


def model() -> tuple[onnx.ModelProto, list[Any]]:
    """Layers of a product, a sum, gelu and a sum with what came in."""
    rng = np.random.default_rng(0)
    nodes: list[Any] = []
    weights: list[Any] = []
    arrays: list[Any] = []
    x = "x"
    for i in range(LAYERS):
        w = (rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        b = rng.standard_normal(WIDTH).astype(np.float32)
        arrays.append((w, b))
        weights += [numpy_helper.from_array(w, f"w{i}"), numpy_helper.from_array(b, f"b{i}")]
        nodes += [
            helper.make_node("Gemm", [x, f"w{i}", f"b{i}"], [f"z{i}"], transB=1),
            helper.make_node("Gelu", [f"z{i}"], [f"g{i}"]),
            helper.make_node("Add", [f"g{i}", x], [f"y{i}"]),
        ]
        x = f"y{i}"
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", WIDTH])
    graph = helper.make_graph(nodes, "layers", [value], [onnx.ValueInfoProto(name=x)], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), arrays


def by_hand(arrays: list[Any], x: ow.Tensor) -> ow.Tensor:
    for i, (w, b) in enumerate(arrays):
        group = ow.weights({f"w{i}": w, f"b{i}": b})
        x = ow.gelu(ow.linear(x, group[f"w{i}"], group[f"b{i}"])) + x
    return x


def main() -> None:
    report = Report("onnx_models", options(__doc__ or ""))
    quick = report.options.quick
    proto, arrays = model()
    data = proto.SerializeToString()
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    runtime = partial(session.run, None, {"x": x})
    for name in ("cpu", "torch:cpu", "ort:cpu", "opencl:0"):
        try:
            ow.device(name)
        except ow.OpweaveError:
            continue
        devices = [name, "host"]
        with ow.Scheduler(devices) as scheduler:  # its own: a device opened, kernels compiled
            scheduler.build(by_hand(arrays, ow.input("x", x.shape))).run(x=x)
            builds = []
            for _ in range(3 if quick else 9):
                start = perf_counter()
                with opweave_onnx.load(data, scheduler) as loaded:
                    loaded.program({"x": x})
                    builds.append(perf_counter() - start)
        with opweave_onnx.load(data, devices) as loaded, ow.Scheduler(devices) as scheduler:
            program = scheduler.build({"y": by_hand(arrays, ow.input("x", x.shape))})
            calls = {
                "front end": partial(loaded.run, {"x": x}),
                "by hand": partial(program.run, x=x),
                "runtime": runtime,
            }
            times = interleaved(calls, 5 if quick else 15, 0.03)
        best = {who: min(found) for who, found in times.items()}
        ratio = best["front end"] / best["by hand"]
        report.row(
            device=name, import_us_per_node=min(builds) / len(proto.graph.node) * 1e6, run_ms=best["front end"] * 1e3,
            to_by_hand=ratio, to_onnx_runtime=best["front end"] / best["runtime"],
        )  # fmt: skip
        report.target(f"{name}: a run", ratio, 1.03, "times the graph by hand")
    report.finish("ONNX models, fastest of interleaved samples; import: load, trace and build, weights not uploaded")


if __name__ == "__main__":
    main()
