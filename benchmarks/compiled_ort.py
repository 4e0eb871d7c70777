"""A compiled split on ``ort:cpu`` beside a bare session of ONNX Runtime with io binding, on the same model.

A chain of additions and two MLPs. `Program.run` copies its input in and gives a new array; the session reads and writes
the same arrays at each run. The contestants take turns in one process; the figure of each is its fastest sample.

Target: 1.03 times the session plus 5 µs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

import opweave as ow
from opweave.graph.dtypes import f32
from opweave.host.cores import usable_cores
from opweave_ort.model import ONNX_TYPES, Model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options

Array = np.ndarray[Any, Any]
SAMPLES = 60
TIMES, MICROSECONDS = 1.03, 5.0


class Job(NamedTuple):
    """One computation: of tensors, and as operators of a model, from the names of its input and of its arrays."""

    name: str
    x: Array
    arrays: Mapping[str, Array]
    ours: Callable[[ow.Tensor, Mapping[str, ow.Tensor]], ow.Tensor]
    theirs: Callable[[Model, str, Mapping[str, str]], str]


def chain(nodes: int) -> Job:
    def ours(x: ow.Tensor, w: Mapping[str, ow.Tensor]) -> ow.Tensor:
        for _ in range(nodes):
            x = x + w["w"]
        return x

    def theirs(m: Model, x: str, w: Mapping[str, str]) -> str:
        for _ in range(nodes):
            x = m("Add", x, w["w"])
        return x

    return Job(f"chain of {nodes}", np.linspace(0, 1, 1024, dtype="f4"), {"w": np.full(1024, 1e-3, "f4")}, ours, theirs)


def mlp(batch: int, sizes: tuple[int, ...]) -> Job:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        arrays[f"w{i}"] = (rng.standard_normal((m, n)) / np.sqrt(n)).astype("f4")
        arrays[f"b{i}"] = rng.standard_normal(m).astype("f4")
    last = len(sizes) - 2

    def ours(x: ow.Tensor, w: Mapping[str, ow.Tensor]) -> ow.Tensor:
        for i in range(last + 1):
            x = ow.linear(x, w[f"w{i}"], w[f"b{i}"])
            x = ow.relu(x) if i < last else x
        return x

    def theirs(m: Model, x: str, w: Mapping[str, str]) -> str:
        for i in range(last + 1):
            x = m("Gemm", x, w[f"w{i}"], w[f"b{i}"], transB=1)
            x = m("Relu", x) if i < last else x
        return x

    x = rng.standard_normal((batch, sizes[0])).astype("f4")
    return Job(f"MLP {batch} x {'-'.join(map(str, sizes))}", x, arrays, ours, theirs)


def bare(job: Job) -> tuple[Callable[[], object], Array]:
    """A run of a session of the job, and the array that it writes."""
    model = Model()
    x = model.input("in0", f32, job.x.shape)
    made = job.theirs(model, x, {name: model.constant(array) for name, array in job.arrays.items()})
    shape = (*job.x.shape[:-1], len(list(job.arrays.values())[-1]))
    name = model.output(made, f32, shape)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = usable_cores().usable
    # Threads that go on spinning would slow down the contestant whose turn is next.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model.serialized(), settings, providers=["CPUExecutionProvider"])
    binding, out = session.io_binding(), np.empty(shape, np.float32)
    binding.bind_input("in0", "cpu", 0, ONNX_TYPES[f32], job.x.shape, job.x.ctypes.data)
    binding.bind_output(name, "cpu", 0, ONNX_TYPES[f32], shape, out.ctypes.data)
    return partial(session.run_with_iobinding, binding), out


def main() -> None:
    report = Report("compiled_ort", options(__doc__ or ""))
    for job in (chain(10), mlp(1, (64, 64, 10)), mlp(32, (784, 512, 512, 10))):
        x = ow.input("x", job.x.shape)
        program = ow.Scheduler("ort:cpu").build(job.ours(x, ow.weights(job.arrays)))
        ours = partial(program.run, {x: job.x})
        theirs, out = bare(job)
        theirs()
        np.testing.assert_allclose(ours(), out, rtol=1e-4, atol=1e-4)
        times = interleaved({"opweave": ours, "session": theirs}, 7 if report.options.quick else SAMPLES, 5e-3)
        best = {name: min(found) * 1e6 for name, found in times.items()}
        report.row(job=job.name, opweave_us=best["opweave"], session_us=best["session"],
                   difference_us=best["opweave"] - best["session"])  # fmt: skip
        limit = TIMES * best["session"] + MICROSECONDS
        report.target(job.name, best["opweave"] / limit, 1, f"of {TIMES} times and {MICROSECONDS:g} µs")
    report.finish("Program.run on ort:cpu beside a bare session (fastest samples)")


if __name__ == "__main__":
    main()
