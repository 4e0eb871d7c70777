"""f32 products on an OpenCL device that is a processor, beside tinygrad's OpenCL runtime and NumPy's BLAS.

The contestants take turns in one process, on all cores; the device is the first of kind CPU (PoCL):

- ``blas``: ``np.matmul`` into an array made beforehand.
- ``opweave``: a program of the one product; its operands are weights, its result stays on the device. Waiting for the
  device, and fetching one element of the result, are included.
- ``tinygrad``: the same as a captured graph on the same device, without search.
- ``tinygrad_beam``: with ``BEAM=2``, only with ``--beam``: each product's search takes minutes. tinygrad keeps what it
  found on disk, and a second run is short.
- ``bound``: the same number of multiplications and additions in registers, on the same device: what remains to be
  gained by any kernel there. (BLAS may be above it, where it wakes its threads faster.)

All have to agree on the result first. Figures are minima, in milliseconds. Before each sample there is a pause: threads
of OpenBLAS go on spinning, which made whatever came next take up to twice as long. Targets: at least 0.7 of what BLAS
computes in the same time, and less time than tinygrad without search.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, parser, seconds

SIZES = ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (32, 4096, 4096))
SHARE_OF_BLAS = 0.7
SAMPLE, PAUSE = 0.02, 0.05
"""Seconds of a sample, and before it."""
SLOW = 1.0
"""Seconds from which on a call is timed twice and takes no turns."""

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]

PEAK = """
typedef float16 Loose __attribute__((aligned(4)));
__kernel void peak(__global float *out, __global const float *in, const int rounds)
{
    float16 s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0, s6 = 0, s7 = 0;
    float16 t0 = 0, t1 = 0, t2 = 0, t3 = 0, t4 = 0, t5 = 0, t6 = 0, t7 = 0;
    for (int i = 0; i < rounds; i++) {
        // Loads that the compiler cannot take out of the loop, and always the same cache lines.
        __global const float *at = in + (i & 15) * 48;
        const float16 x = *(__global const Loose *)at, y = *(__global const Loose *)(at + 16);
#define ADD(n) s##n += at[32 + n] * x, t##n += at[32 + n] * y;
        ADD(0) ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7)
    }
    float16 sum = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + t0 + t1 + t2 + t3 + t4 + t5 + t6 + t7;
    *(__global Loose *)(out + get_global_id(0) * 16) = sum;
}
"""
GROUPS = 256


def bound(device: Any, flops: int) -> Call:
    """As many additions of products, evenly over the cores, with all operands in registers or the first cache."""
    import pyopencl as cl

    queue = cl.CommandQueue(device.context, device.cl_device)
    kernel = cl.Kernel(cl.Program(device.context, PEAK).build(devices=[device.cl_device]), "peak")
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, GROUPS * 64)
    numbers = np.full(1024, 1e-3, np.float32)
    given = cl.Buffer(device.context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=numbers)
    kernel.set_args(out, given, np.int32(max(1, flops // (GROUPS * 16 * 32))))

    def call(*memory: Any) -> None:
        cl.enqueue_nd_range_kernel(queue, kernel, (GROUPS,), (1,))
        queue.finish()

    return partial(call, out, given)  # the driver does not keep what arguments were set to


def opweave_call(device: Any, a: Array, b: Array) -> tuple[Call, Array]:
    leaves = ow.weights({"a": a, "b": b})
    product = leaves["a"] @ leaves["b"]
    scheduler = ow.Scheduler(device)
    return scheduler.build(ow.flatten(product)[:1]).run, scheduler.build(product).run()


def tinygrad_call(a: Array, b: Array, beam: int) -> tuple[Call, Array]:
    tinygrad: Any = import_module("tinygrad")
    x, y = tinygrad.Tensor(a, device="CL").realize(), tinygrad.Tensor(b, device="CL").realize()
    product = tinygrad.TinyJit(lambda x, y: (x @ y).realize())
    with tinygrad.Context(BEAM=beam):
        for _ in range(3):
            result = product(x, y)
    device = tinygrad.Device["CL"]

    def call() -> None:
        product(x, y)
        device.synchronize()

    return call, result.numpy()


def has_tinygrad() -> bool:
    """Whether tinygrad is here; if so it is told to take the OpenCL library that pyopencl brought."""
    import pyopencl

    libraries = sorted((Path(pyopencl.__file__).parent / ".libs").glob("libOpenCL*"))
    if libraries:
        os.environ.setdefault("OPENCL_PATH", str(libraries[0]))
    return find_spec("tinygrad") is not None


def main() -> None:
    command = parser(__doc__.splitlines()[0])
    command.add_argument("--beam", action="store_true", help="also let tinygrad search, which takes many minutes")
    given = command.parse_args()
    device = next((d for d in ow.devices() if d.name.startswith("opencl:") and d.kind is ow.Kind.CPU), None)
    if device is None:
        sys.exit("no OpenCL device of kind CPU here: pip install 'opweave-opencl[pocl]'")
    tinygrad = has_tinygrad()
    report = Report("opencl_matmul", given)
    for m, k, n in SIZES[:2] if given.quick else SIZES:
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        want = np.empty((m, n), np.float32)
        calls: dict[str, Call] = {"blas": partial(np.matmul, a, b, want)}
        calls["blas"]()
        found = {}
        calls["opweave"], found["opweave"] = opweave_call(device, a, b)
        if tinygrad:
            calls["tinygrad"], found["tinygrad"] = tinygrad_call(a, b, 0)
            if given.beam:
                calls["tinygrad_beam"], found["tinygrad_beam"] = tinygrad_call(a, b, 2)
        for name, value in found.items():
            if not np.allclose(value, want, 1e-3, 1e-2):
                raise AssertionError(f"{name} and numpy disagree on {m}x{k}x{n}")
        flops = 2 * m * k * n
        calls["bound"] = bound(device, flops)
        slow = {name: call for name, call in calls.items() if seconds(call) > SLOW}
        quick = {name: call for name, call in calls.items() if name not in slow}
        samples = interleaved(quick, 5 if given.quick else 15, SAMPLE, PAUSE)
        times = {name: min(found) for name, found in samples.items()}
        times |= {name: min(seconds(call) for _ in range(2)) for name, call in slow.items()}
        ours = times["opweave"]
        report.row(
            product=f"{m}x{k}x{n}",
            **{f"{name}_ms": t * 1e3 for name, t in times.items()},
            gflops=flops / ours / 1e9,
            share_of_blas=times["blas"] / ours,
            share_of_bound=times["bound"] / ours,
        )
        report.target(f"{m}x{k}x{n}, over BLAS", ours / times["blas"], 1 / SHARE_OF_BLAS, "times")
        if tinygrad:
            report.target(f"{m}x{k}x{n}, over tinygrad", ours / times["tinygrad"], 1.0, "times")
    report.finish("f32 products on an OpenCL processor (minima)")


if __name__ == "__main__":
    main()
