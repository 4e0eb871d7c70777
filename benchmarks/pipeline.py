"""What overlapping gains: a model in two equal halves on two devices, a row of inputs through both.

Two CPU devices with separate memories (``OPWEAVE_CPU_DEVICES=2``), each half a stack of matrix products on one of them,
one BLAS thread for each. *in turn*: ``program.run`` for one input after the other. *overlapping*: with
``Scheduler(parallel=True)``, all inputs submitted, all results awaited. Pairs take turns in one process; the figure is
the median of their ratios.

The halves are measured alone too: their times should differ by at most 2 %, else the gain is bounded by the larger one.

Target: overlapping at least 1.7 times as fast.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, median, options

PAIRS = 7
TARGET = 1.7


def stack(x: ow.Tensor, layers: int, width: int, name: str) -> ow.Tensor:
    """``layers`` products with a ``width`` × ``width`` matrix each, kept small by a scale."""
    rng = np.random.default_rng(0)
    matrices = ow.weights(
        {f"{name}{i}": rng.standard_normal((width, width), np.float32) / width**0.5 for i in range(layers)}
    )
    for matrix in matrices.values():
        x = ow.relu(x @ matrix)
    return x


def one_by_one(program: ow.Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [program.run(x=array) for array in arrays]


def all_at_once(program: ow.Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [future.result() for future in [program.submit(x=array) for array in arrays]]


def main() -> None:
    given = options("A model in two halves on two devices: runs in turn against overlapping runs.")
    report = Report("pipeline", given)
    rows, width, layers, runs = (128, 512, 4, 8) if given.quick else (256, 768, 6, 32)
    os.environ["OPWEAVE_CPU_DEVICES"] = "2"  # read when the backend is loaded
    first, second = ow.device("cpu:0"), ow.device("cpu:1")
    x = ow.input("x", (rows, width))
    half = stack(x, layers, width, "a")
    whole = stack(half, layers, width, "b")
    pins: dict[ow.Tensor, ow.Device] = dict.fromkeys(ow.Graph((half,)).nodes, first)
    pins |= {t: second for t in ow.Graph((whole,)).nodes if t not in pins}
    arrays = [np.random.default_rng(i).standard_normal((rows, width), np.float32) for i in range(runs)]
    with (
        ow.Scheduler([d.open(threads=1) for d in (first, second)]) as in_turn,
        ow.Scheduler([d.open(threads=1, worker=True) for d in (first, second)], parallel=True) as overlapping,
    ):
        slow, fast = in_turn.build(whole, pins=pins), overlapping.build(whole, pins=pins)
        for expected, got in zip(one_by_one(slow, arrays), all_at_once(fast, arrays), strict=True):
            np.testing.assert_array_equal(got, expected)
        alone = in_turn.build(half, pins={t: d for t, d in pins.items() if d is first})
        pairs, halves = [], []
        for _ in range(PAIRS):
            start = perf_counter()
            one_by_one(slow, arrays)
            between = perf_counter()
            all_at_once(fast, arrays)
            end = perf_counter()
            one_by_one(alone, arrays)
            last = perf_counter()
            pairs.append((between - start, end - between))
            halves.append((last - end) / (between - start - (last - end)))
            report.row(
                in_turn_ms=(between - start) / runs * 1e3,
                overlapping_ms=(end - between) / runs * 1e3,
                gain=pairs[-1][0] / pairs[-1][1],
                first_half_over_second=halves[-1],
            )
        gain = median([a / b for a, b in pairs])
        report.row(
            in_turn_ms=median([a for a, _ in pairs]) / runs * 1e3,
            overlapping_ms=median([b for _, b in pairs]) / runs * 1e3,
            gain=gain,
            first_half_over_second=median(halves),
        )
    # Targets are upper limits: the share of the time that is left.
    report.target("time overlapping over time in turn", 1 / gain, 1 / TARGET, "")
    report.finish(f"{runs} inputs through two stacks of {layers} products of {rows} × {width} × {width}")


if __name__ == "__main__":
    main()
