"""What a decoding step costs beyond its kernels: one token through a stack of layers with caches of keys and values.

Each step asks for its program anew, as a growing decoder does (`Scheduler.build` finds the one that is there), feeds a
token's row, its position and a mask, runs, and fetches the last row. *kernels*: the very same calls of the compiled
plans, in a bare loop. The difference is what the scheduler costs.

Target: at most 30 µs plus 0.1 µs for each node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, median, options

FIXED = 30e-6
EACH = 0.1e-6
WIDTH, HEADS, CACHE = 64, 4, 128


class Decoder:
    """A small transformer that attends over caches which hold up to ``CACHE`` tokens."""

    def __init__(self, layers: int) -> None:
        rng = np.random.default_rng(0)
        shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH),
                  "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}  # fmt: skip
        self.weights = ow.weights(
            {
                f"{i}.{name}": rng.standard_normal(shape, np.float32) / WIDTH
                for i in range(layers)
                for name, shape in shapes.items()
            }
        )
        self.caches = [[ow.state(f"{i}.{n}", (CACHE, WIDTH)) for n in ("keys", "values")] for i in range(layers)]
        self.layers = layers
        self.scheduler = ow.Scheduler("cpu")

    def graph(self, reach: int) -> list[ow.Tensor]:
        x, at = ow.input("x", (1, WIDTH)), ow.input("at", (1,), "i64")
        mask = ow.input("mask", (1, reach))
        caches = []
        for i, (keys, values) in enumerate(self.caches):
            w = {n: self.weights[f"{i}.{n}"] for n in ("q", "k", "v", "o", "up", "down")}
            h = ow.rms_norm(x)
            keys = ow.index_copy(keys, at, ow.linear(h, w["k"]))
            values = ow.index_copy(values, at, ow.linear(h, w["v"]))
            caches += [keys, values]
            query = by_heads(ow.linear(h, w["q"]))
            mixed = ow.attention(query, by_heads(keys[:reach]), by_heads(values[:reach]), mask)[0]
            x = x + ow.linear(mixed.transpose(1, 0, 2).reshape(1, WIDTH), w["o"])
            x = x + ow.linear(ow.silu(ow.linear(ow.rms_norm(x), w["up"])), w["down"])
        return [x, *caches]


def by_heads(x: ow.Tensor) -> ow.Tensor:
    """(tokens, width) as (1, heads, tokens, width / heads)."""
    return x.reshape(1, x.shape[0], HEADS, -1).transpose(0, 2, 1, 3)


def main() -> None:
    given = options("A decoding step against its kernels in a bare loop.")
    report = Report("decode", given)
    worst = 0.0
    for layers in (1, 4, 16):
        decoder = Decoder(layers)
        outputs = decoder.graph(CACHE)
        program = decoder.scheduler.build(outputs[0])
        fed: dict[str, Any] = {
            "x": np.ones((1, WIDTH), np.float32), "at": np.array([5]), "mask": np.zeros((1, CACHE), np.float32)
        }  # fmt: skip
        program.run(fed)
        calls = [call for plan in program.run_lists[0].plans for call in plan.calls]

        at = program.run_lists[0].feeds["at"].view
        assert at is not None

        def kernels(calls: list[Callable[[], Any]] = calls, at: np.ndarray[Any, Any] = at) -> None:
            at[:] = 5  # its memory serves other values later on
            with np.errstate(all="ignore"):
                for call in calls:
                    call()

        def step(program: ow.Program = program, fed: dict[str, Any] = fed) -> object:
            return program.run(fed)

        def asked(decoder: Decoder = decoder, output: ow.Tensor = outputs[0], fed: dict[str, Any] = fed) -> object:
            return decoder.scheduler.build(output).run(fed)

        times = interleaved({"kernels": kernels, "step": step, "asked": asked}, 15 if given.quick else 51)
        nodes = len(program.partition.graph.nodes)
        beyond = median([a - b for a, b in zip(times["asked"], times["kernels"], strict=True)])
        limit = FIXED + EACH * nodes
        worst = max(worst, beyond / limit)
        report.row(
            layers=layers, nodes=nodes, steps=len(calls), kernels_us=median(times["kernels"]) * 1e6,
            step_us=median(times["step"]) * 1e6, with_build_us=median(times["asked"]) * 1e6, beyond_us=beyond * 1e6,
            limit_us=limit * 1e6, over_kernels=median(times["asked"]) / median(times["kernels"]),
        )  # fmt: skip
        decoder.scheduler.close()
    report.target("beyond its kernels over the limit, worst row", worst, 1.0, "")
    report.finish(f"one token, width {WIDTH}, {HEADS} heads, {CACHE} tokens in the caches")


if __name__ == "__main__":
    main()
