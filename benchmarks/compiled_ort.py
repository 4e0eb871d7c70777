"""A compiled split on ``ort:cpu`` beside a bare session of ONNX Runtime with io binding, on the same model.

A chain of additions and two MLPs. `Program.run` copies its input in and gives a new array; the session reads and writes
the same arrays at each run. The contestants take turns in one process; the figure of each is its fastest sample.

Target: 1.03 times the session plus 5 µs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

import opweave as ow
from opweave.graph.dtypes import f32
from opweave.runtime.host.cores import usable_cores
from opweave_ort.model import ONNX_TYPES, Model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._jobs import Array, Job, Operations, chain, mlp
from benchmarks._measure import Report, interleaved, options

SAMPLES = 60
TIMES, MICROSECONDS = 1.03, 5.0


def operations(model: Model) -> Operations:
    """The operators of a model, from the names of their operands to that of the result."""
    return Operations(partial(model, "Add"), partial(model, "Gemm", transB=1), partial(model, "Relu"))


def bare(job: Job, model: Model) -> tuple[Callable[[], object], Array]:
    """A run of a session of the job, which is built into ``model``, and the array that it writes."""
    x = model.input("in0", f32, job.x.shape)
    made = job.theirs(x, {name: model.constant(array) for name, array in job.arrays.items()})
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
    for make in (partial(chain, 10, 1024), partial(mlp, 1, (64, 64, 10)), partial(mlp, 32, (784, 512, 512, 10))):
        model = Model()
        job = make(operations(model))
        x = ow.input("x", job.x.shape)
        program = ow.Scheduler("ort:cpu").build(job.ours(x, ow.weights(job.arrays)))
        ours = partial(program.run, {x: job.x})
        theirs, out = bare(job, model)
        theirs()
        np.testing.assert_allclose(ours(), out, rtol=1e-4, atol=1e-4)
        times = interleaved({"opweave": ours, "session": theirs}, 7 if report.options.quick else SAMPLES, 5e-3)
        best = {name: min(found) * 1e6 for name, found in times.items()}
        report.row(job=job.name, opweave_us=best["opweave"], session_us=best["session"],
                   ratio=best["opweave"] / best["session"])  # fmt: skip
        limit = TIMES * best["session"] + MICROSECONDS
        report.target(job.name, best["opweave"] / limit, 1, f"of {TIMES} times and {MICROSECONDS:g} µs")
    report.finish("Program.run on ort:cpu beside a bare session (fastest samples)")


if __name__ == "__main__":
    main()
