"""What running a plan on OpenCL costs beyond the driver: 1,000 small kernels against bare loops that enqueue them.

Each step adds two vectors of 16 floats; nothing is fused. The contestants, in one process and in turns:

- ``bare``: a loop of ``enqueue_nd_range_kernel`` over the plan's own kernel objects, whose arguments are set, with one
  size for all; then one ``flush``, without which some drivers do not begin.
- ``own``: the same over kernel objects of a program written for this one case, ``o[i] = a[i] + b[i]``.
- ``opweave``: ``plan.run()``.

Each is timed twice: *submitted* is the processor time until the loop returns while the device is held up by an event,
so that it measures nothing but the host; *done* is the time until the work is done, which on two cores is mostly the
driver's.

Target for opweave: at most 1.1 times ``bare``, submitted and done. Compiling a step is printed beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import pyopencl as cl

import opweave as ow
from opweave.contract import Arg, Group, Step
from opweave.graph.dtypes import as_dtype

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, median, options

STEPS = 1000
SIZE = 16
LIMIT = 1.1
SOURCE = """
__kernel void add(__global const float *a, __global const float *b, __global float *o)
{
    const size_t i = get_global_id(0);
    o[i] = a[i] + b[i];
}
"""


def loop(queue: cl.CommandQueue, kernels: list[cl.Kernel], size: tuple[int, ...], group: tuple[int, ...]) -> None:
    enqueue = cl.enqueue_nd_range_kernel
    for kernel in kernels:
        enqueue(queue, kernel, size, group)
    queue.flush()


@contextmanager
def recorded(stream: Any, launches: list[Any]) -> Iterator[None]:
    """Within the ``with`` block, what the stream binds is noted."""
    bind = stream._bind

    def noting(group: Group) -> Any:
        launches.append(bind(group))
        return launches[-1]

    stream._bind = noting
    try:
        yield
    finally:
        del stream._bind


def submitted(stream: Any, call: Callable[[], object]) -> float:
    """Seconds of this thread until ``call`` returns, while the device waits."""
    stream.synchronize()
    gate = cl.UserEvent(stream.target.context)
    cl.enqueue_barrier(stream.queue, wait_for=[gate])
    start = thread_time()
    call()
    taken = thread_time() - start
    gate.set_status(cl.command_execution_status.COMPLETE)
    stream.synchronize()
    return taken


def done(stream: Any, call: Callable[[], object]) -> float:
    """Seconds until what ``call`` submits is done."""
    start = perf_counter()
    call()
    stream.queue.finish()
    return perf_counter() - start


def main() -> None:
    given = options(__doc__.splitlines()[0])
    report = Report("opencl_dispatch", given)
    device: Any = ow.device("opencl")
    report.machine["device"] = device.description
    with device.open() as stream:
        buffers = [device.alloc(SIZE * 4) for _ in range(3)]
        for buffer in buffers:
            buffer.upload(0, np.zeros(SIZE, np.float32))
        vectors = [Arg(buffer, 0, as_dtype("f32"), (SIZE,), (4,)) for buffer in buffers]
        # Two buffers in turns, as a memory plan without in-place results would have it.
        steps = [Step("add", vectors[i % 2], (vectors[1 - i % 2], vectors[2]), {}) for i in range(STEPS)]
        compiled = []
        for _ in range(5):
            start = perf_counter()
            stream.compile(steps)
            compiled.append((perf_counter() - start) / STEPS)
        launches: list[Any] = []
        with recorded(stream, launches):
            plan = stream.compile(steps)
        size, group = launches[0].args[2:]
        program = cl.Program(device.context, SOURCE).build(devices=[device.cl_device])
        kernels = []
        for step in steps:
            kernel = cl.Kernel(program, "add")
            for index, arg in enumerate((*step.srcs, step.out)):
                kernel.set_arg(index, arg.mem)
            kernels.append(kernel)

        contestants: dict[str, Callable[[], object]] = {
            "bare": partial(loop, stream.queue, [launch.args[1] for launch in launches], size, group),
            "own": partial(loop, stream.queue, kernels, (SIZE,), (SIZE,)),
            "opweave": plan.run,
        }
        names = list(contestants)
        for name, measure in (("submitted", submitted), ("done", done)):
            times: dict[str, list[float]] = {n: [] for n in names}
            for turn in range(20 if given.quick else 100):
                for k in range(len(names)):
                    contestant = names[(turn + k) % len(names)]
                    times[contestant].append(measure(stream, contestants[contestant]))
            middle, least = ({n: f(t) for n, t in times.items()} for f in (median, min))
            report.row(
                until=name,
                **{f"{n}_us": least[n] / STEPS * 1e6 for n in names},
                **{f"{n}_median_us": middle[n] / STEPS * 1e6 for n in names},
                opweave_over_bare=least["opweave"] / least["bare"],
                of_medians=middle["opweave"] / middle["bare"],
            )
            report.target(f"{STEPS:,} steps, {name}", least["opweave"] / least["bare"], LIMIT, "times bare")
        report.row(until="compiled", opweave_us=min(compiled) * 1e6, opweave_median_us=median(compiled) * 1e6)
        plan.close()
    report.finish("Running 1,000 additions of 16 floats on OpenCL, per step (least, and medians)")


if __name__ == "__main__":
    main()
