"""Compiled splits beside the bare library: a program on the JAX example beside ``jax.jit`` of the same function.

Both sides take a NumPy array and give one, and both wait for the result. What is copied in a run is counted too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import opweave as ow

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "backends" / "jax")]  # for `benchmarks`, and for `opweave_jax`

from opweave_jax import FUNCTIONS, JaxBackend, JaxLibrary  # noqa: E402

from benchmarks._measure import Report, interleaved, options  # noqa: E402

Array = np.ndarray[Any, Any]

TIMES, MICROSECONDS = 1.03, 5.0
"""How long ours may take: so many times the library's own time, and so much more."""


class Job(NamedTuple):
    """One computation, written for both sides: ``ours`` of tensors and ``theirs`` of JAX's arrays."""

    name: str
    x: Array
    arrays: Mapping[str, Array]
    ours: Callable[[Any, Mapping[str, Any]], Any]
    theirs: Callable[[Any, Mapping[str, Any]], Any]


def chain(nodes: int) -> Job:
    def add(x: Any, w: Mapping[str, Any]) -> Any:
        for _ in range(nodes):
            x = x + w["w"]
        return x

    return Job(f"chain of {nodes}", np.linspace(0, 1, 1024, dtype="f4"), {"w": np.full(1024, 1e-3, "f4")}, add, add)


def mlp(batch: int, sizes: tuple[int, ...]) -> Job:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        arrays[f"w{i}"] = (rng.standard_normal((m, n)) / np.sqrt(n)).astype("f4")
        arrays[f"b{i}"] = rng.standard_normal(m).astype("f4")
    layers = len(sizes) - 1

    def layer(linear: Any, relu: Any, x: Any, w: Mapping[str, Any]) -> Any:
        for i in range(layers):
            x = linear(x, w[f"w{i}"], w[f"b{i}"])
            x = relu(x) if i < layers - 1 else x
        return x

    x = rng.standard_normal((batch, sizes[0])).astype("f4")
    ours, theirs = partial(layer, ow.linear, ow.relu), partial(layer, FUNCTIONS["linear"], FUNCTIONS["relu"])
    return Job(f"MLP {batch} x {'-'.join(map(str, sizes))}", x, arrays, ours, theirs)


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
    for job in (chain(10), mlp(1, (64, 64, 10)), mlp(32, (784, 512, 512, 10))):
        compare(report, job, 20 if given.quick else 400)
    report.finish("Program.run beside jax.jit (fastest samples)")


if __name__ == "__main__":
    main()
