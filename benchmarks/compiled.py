"""Compiled splits beside the bare library: a program on the JAX example beside ``jax.jit`` of the same function.

Both sides take a NumPy array and give one, and both wait for the result. What is copied in a run is counted too.
"""

from __future__ import annotations

import sys
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opweave as ow

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "backends" / "jax")]  # for `benchmarks`, and for `opweave_jax`

from opweave_jax import FUNCTIONS, JaxBackend, JaxLibrary  # noqa: E402

from benchmarks._jobs import Array, Job, Operations, chain, mlp  # noqa: E402
from benchmarks._measure import Report, interleaved, options  # noqa: E402

TIMES, MICROSECONDS = 1.03, 5.0
"""How long ours may take: so many times the library's own time, and so much more."""

JAX = Operations(add, FUNCTIONS["linear"], FUNCTIONS["relu"])


class Counting(JaxLibrary):
    """Counts what is copied from and to the host."""

    copied = 0

    def from_host(self, array: Array, borrowed: bool) -> Any:
        type(self).copied += array.nbytes
        return super().from_host(array, borrowed)

    def to_host(self, array: Any) -> Array:
        type(self).copied += array.nbytes
        return super().to_host(array)


def compare(report: Report, job: Job, samples: int) -> None:
    device: Any = ow.device("jax")
    x = ow.input("x", job.x.shape)
    program = ow.Scheduler(device).build(job.ours(x, ow.weights(job.arrays, device=device)))
    program.warm()
    given = jax.device_put(dict(job.arrays))
    function = jax.jit(job.theirs)

    def theirs() -> Array:
        return np.array(jax.block_until_ready(function(job.x, given)))

    ours = partial(program.run, {x: job.x})
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-4, atol=1e-4)
    times = interleaved({"opweave": ours, "jax": theirs}, samples, sample_seconds=1e-3)
    best = {name: min(seconds) * 1e6 for name, seconds in times.items()}
    before, device.library.__class__ = Counting.copied, Counting
    ours()
    handed, whole = Counting.copied, job.x.nbytes + theirs().nbytes
    program.run({x: job.x}, on_device=True)
    handed, in_place = handed - before, Counting.copied - handed
    device.library.__class__ = JaxLibrary
    report.row(job=job.name, opweave_us=best["opweave"], jax_us=best["jax"], ratio=best["opweave"] / best["jax"],
               bytes_a_run=handed, bytes_on_device=in_place)  # fmt: skip
    limit = TIMES * best["jax"] + MICROSECONDS
    report.target(f"{job.name} beside jax.jit", best["opweave"] / limit, 1, f"of {TIMES} times and {MICROSECONDS:g} µs")
    report.target(f"{job.name}: bytes beside inputs and outputs", handed - whole, 0, "bytes")
    report.target(f"{job.name}: bytes beside the input, on device", in_place - job.x.nbytes, 0, "bytes")


def main() -> None:
    given = options(__doc__.splitlines()[0])
    ow.register(JaxBackend)
    report = Report("compiled", given)
    for job in (chain(10, 1024, JAX), mlp(1, (64, 64, 10), JAX), mlp(32, (784, 512, 512, 10), JAX)):
        compare(report, job, 20 if given.quick else 400)
    report.finish("Program.run beside jax.jit (fastest samples)")


if __name__ == "__main__":
    main()
