"""What opweave costs beside eager torch, with the same kernels of torch on both sides, on ``torch:cpu``. (What it
costs on a card, ``benchmarks/gpu.py`` measures.)

The contestants take turns in one process, 30 pairs, and the figure of each is its fastest sample.

- chains of additions of 16 floats, an MLP, a transformer block: ``program.run({x: array})``, which feeds one input and
  returns a new array, beside the same operations in eager torch under ``inference_mode``;
- sharing: a chain that changes between ``cpu`` and ``torch:cpu`` every 5 nodes beside the same chain on ``torch:cpu``,
  per change of device.

Targets: 1.02 times eager torch, 0.8 for the chain; 5 µs a change of device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from operator import add
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation calls it

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._jobs import Array, Job, Operations, chain, mlp
from benchmarks._measure import Report, interleaved, options

PAIRS = 30


TORCH = Operations(add, F.linear, F.relu)

# --- the jobs -------------------------------------------------------------------------------------------------------


def transformer_block(tokens: int, width: int, heads: int) -> Job:
    """Self-attention and a feed-forward part, each after a layer norm and added to what came in."""
    rng = np.random.default_rng(0)

    def matrix(m: int, n: int) -> Array:
        return np.asarray(rng.standard_normal((m, n)) / np.sqrt(n), np.float32)

    arrays = {
        "qkv": matrix(3 * width, width), "qkv_b": rng.standard_normal(3 * width).astype("f4"),
        "o": matrix(width, width), "o_b": rng.standard_normal(width).astype("f4"),
        "up": matrix(4 * width, width), "up_b": rng.standard_normal(4 * width).astype("f4"),
        "down": matrix(width, 4 * width), "down_b": rng.standard_normal(width).astype("f4"),
        "n1": np.ones(width, "f4"), "n1_b": np.zeros(width, "f4"), "n2": np.ones(width, "f4"),
        "n2_b": np.zeros(width, "f4"),
    }  # fmt: skip
    size = width // heads

    def ours(x: ow.Tensor, w: Mapping[str, ow.Tensor]) -> ow.Tensor:
        h = ow.layer_norm(x, w["n1"], w["n1_b"])
        qkv = ow.linear(h, w["qkv"], w["qkv_b"]).reshape(1, tokens, 3, heads, size)
        q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        mixed = ow.attention(q, k, v).transpose(0, 2, 1, 3).reshape(1, tokens, width)
        x = x + ow.linear(mixed, w["o"], w["o_b"])
        h = ow.layer_norm(x, w["n2"], w["n2_b"])
        return x + ow.linear(ow.gelu(ow.linear(h, w["up"], w["up_b"])), w["down"], w["down_b"])

    def theirs(x: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
        h = F.layer_norm(x, (width,), w["n1"], w["n1_b"])
        qkv = F.linear(h, w["qkv"], w["qkv_b"]).view(1, tokens, 3, heads, size)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, tokens, width)
        x = x + F.linear(mixed, w["o"], w["o_b"])
        h = F.layer_norm(x, (width,), w["n2"], w["n2_b"])
        return x + F.linear(F.gelu(F.linear(h, w["up"], w["up_b"])), w["down"], w["down_b"])

    x = rng.standard_normal((1, tokens, width)).astype("f4")
    return Job(f"transformer block {tokens} x {width}", 11, x, arrays, ours, theirs)


# --- the sides ------------------------------------------------------------------------------------------------------


def opweave_run(job: Job, device: str) -> Callable[[], Array]:
    x = ow.input("x", job.x.shape)
    weights = ow.weights(job.arrays, device=device)
    program = ow.Scheduler(device).build(job.ours(x, weights))
    return partial(program.run, {x: job.x})


def eager_run(job: Job) -> Callable[[], Array]:
    """Feeding and fetching included, as on the other side: a tensor over the fed array, an array over the result."""
    weights = {name: torch.from_numpy(array) for name, array in job.arrays.items()}

    def run() -> Array:
        with torch.inference_mode():
            return job.theirs(torch.from_numpy(job.x), weights).numpy()  # type: ignore[no-any-return]

    return run


def alternating_run(nodes: int, every: int) -> tuple[Callable[[], Array], int]:
    """The chain on ``torch:cpu`` and ``cpu`` in turns, and how often it changes. ``every=0``: never."""
    x, w = ow.input("x", 16), ow.weights({"w": np.full(16, 1e-3, "f4")})["w"]
    scheduler = ow.Scheduler(["torch:cpu", "cpu"])
    pins, h = {}, x
    for i in range(nodes):
        h = h + w
        pins[h] = "cpu" if every and i // every % 2 else "torch:cpu"
    program = scheduler.build(h, pins=pins)
    assert program.n_copies == 0, "cpu and torch:cpu share their memory"
    return partial(program.run, {x: np.linspace(0, 1, 16, dtype="f4")}), len(program.splits) - 1


# --- the comparison -------------------------------------------------------------------------------------------------


def compare(report: Report, job: Job, limit: float, samples: int) -> None:
    """``limit``: how long ours may take, in times of eager torch."""
    contestants = {"opweave": opweave_run(job, "torch:cpu"), "eager": eager_run(job)}
    expected = contestants["eager"]()
    for name, run in contestants.items():
        np.testing.assert_allclose(run(), expected, rtol=1e-4, atol=1e-4, err_msg=f"{name} computes something else")
    times = interleaved(contestants, samples, sample_seconds=3e-3)
    best = {name: min(seconds) for name, seconds in times.items()}
    ratio = best["opweave"] / best["eager"]
    report.row(
        job=job.name, device="torch:cpu", **{f"{n}_us": t * 1e6 for n, t in best.items()}, over_eager=ratio
    )  # fmt: skip
    report.target(f"{job.name} on torch:cpu / eager torch", ratio, limit, "times")


def sharing(report: Report, nodes: int, samples: int) -> None:
    alone, _ = alternating_run(nodes, 0)
    both, changes = alternating_run(nodes, 5)
    times = interleaved({"alone": alone, "both": both}, samples, sample_seconds=3e-3)
    best = {name: min(seconds) for name, seconds in times.items()}
    more = (best["both"] - best["alone"]) / changes
    report.row(job=f"sharing, chain of {nodes:,}", device="torch:cpu + cpu", opweave_us=best["both"] * 1e6,
               alone_us=best["alone"] * 1e6, us_a_change=more * 1e6)  # fmt: skip
    report.target("change between cpu and torch:cpu", more * 1e6, 5, "µs")


def main() -> None:
    given = options(__doc__.splitlines()[0])
    report = Report("torch_overhead", given)
    samples = 7 if given.quick else PAIRS
    jobs = [
        (chain(100 if given.quick else 1000, 16, TORCH), 0.8),
        (mlp(32, (784, 512, 512, 10), TORCH), 1.02),
        (transformer_block(128, 384, 12), 1.02),
    ]
    for job, limit in jobs:
        compare(report, job, limit, samples)
    sharing(report, 100 if given.quick else 1000, samples)
    report.finish("Program.run beside eager torch (fastest samples)")


if __name__ == "__main__":
    main()
