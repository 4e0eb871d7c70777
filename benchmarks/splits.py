"""The cost of a device boundary: a chain of small additions that changes its device every k nodes.

Two CPU devices with separate memories (``OPWEAVE_CPU_DEVICES=2``). *by hand*: a list of ``partial(np.add, a, b, out)``
that copies through the host at every boundary (two ``np.copyto``), in a loop; it also feeds and fetches by copies.
*one device*: the same chain on one device, so that the difference over the number of splits is the cost of one, its
copy included; *beyond by hand* is what a split costs more than in the loop, which makes the same copies.

Targets: at most 1.2 times the loop written by hand, at most 10 µs for each split beyond it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, median, options

Array = np.ndarray[Any, Any]
FACTOR = 1.2
SPLIT_SECONDS = 10e-6


def by_hand(x: Array, w: Array, nodes: int, every: int) -> Callable[[], Array]:
    """The same additions and copies, as one would write them without a scheduler."""
    memories = [[np.empty_like(x), np.empty_like(x), np.empty_like(x), np.array(w)] for _ in range(2)]
    fed, staged = memories[0][0], np.empty_like(x)
    calls: list[Callable[[], Any]] = []
    at, device = fed, 0
    for i in range(nodes):
        a, b, c, weight = memories[device]
        if i and i % every == 0:
            device = 1 - device
            a, b, c, weight = memories[device]
            calls += [partial(np.copyto, staged, at), partial(np.copyto, c, staged)]
            at = c
        out = b if at is not b else a
        calls.append(partial(np.add, at, weight, out))
        at = out

    def run() -> Array:
        np.copyto(fed, x)
        for call in calls:
            call()
        return at.copy()

    return run


def main() -> None:
    given = options("Changing the device every k nodes against a loop written by hand.")
    report = Report("splits", given)
    os.environ["OPWEAVE_CPU_DEVICES"] = "2"  # read when the backend is loaded
    devices = [ow.device("cpu:0"), ow.device("cpu:1")]
    nodes, samples = 200, 15 if given.quick else 51
    ratios, costs = [], []
    for size in (16, 16384):
        for every in (1, 5, 20):
            x = np.ones(size, np.float32)
            weight = ow.weights({"w": x})["w"]
            y = ow.input("x", (size,))
            pins: dict[ow.Tensor, ow.Device] = {}
            for i in range(nodes):
                y = y + weight
                pins[y] = devices[i // every % 2]
            with ow.Scheduler(devices) as scheduler, ow.Scheduler(devices[0]) as single:
                crossing, plain = scheduler.build(y, pins=pins), single.build(y)
                hand = by_hand(x, x, nodes, every)
                np.testing.assert_array_equal(crossing.run(x=x), hand())
                times = interleaved(
                    {"opweave": partial(crossing.run, {"x": x}), "hand": hand, "one": partial(plain.run, {"x": x})},
                    samples,
                )
                took, loop, one = (median(times[name]) for name in ("opweave", "hand", "one"))
                splits = len(crossing.splits)
                ratios.append(took / loop)
                costs.append((took - loop) / splits)
                report.row(
                    floats=size, every=every, splits=splits, opweave_us=took * 1e6, by_hand_us=loop * 1e6,
                    ratio=ratios[-1], one_device_us=one * 1e6, us_a_split=(took - one) / splits * 1e6,
                    us_beyond_by_hand=costs[-1] * 1e6,
                )  # fmt: skip
    report.target("over the loop by hand, worst row", max(ratios), FACTOR, "")
    report.target("a split beyond by hand, worst row", max(costs) * 1e6, SPLIT_SECONDS * 1e6, "µs")
    report.finish(f"{nodes} additions, another device every k")


if __name__ == "__main__":
    main()
