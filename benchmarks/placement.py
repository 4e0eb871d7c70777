"""Placement by cost: whether it finds the fastest placement, and whether predictions rank placements as clocks do.

Five graphs over every device here: two CPU devices with separate memories (``OPWEAVE_CPU_DEVICES=2``), OpenCL and
torch where they are installed, each with one thread: nobody can predict threads that wait for each other on a busy
machine.
*best other*: the fastest of the priority rules and of every device that runs the whole graph alone. *rank correlation*:
Spearman's, of predicted and measured seconds over 20 random placements, runs of nodes on random devices. Seconds are
minima of runs in turns, those of programs that place every node alike taken together. Profiles are measured anew.

Targets: at most 1.05 times the best other placement; a rank correlation of at least 0.8 (shown as 1 - correlation,
which must not exceed 0.2).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, options
from benchmarks.graphs import PLACED

RATIO, CORRELATION = 1.05, 0.8
RANDOM = 20
NAMES = ("cpu:0", "cpu:1", "opencl:0", "torch:cpu")


def devices() -> list[ow.Device]:
    """Those of `NAMES` that are here."""
    # Read when the backends are loaded.
    os.environ.update(OPWEAVE_CPU_DEVICES="2", OMP_NUM_THREADS="1", POCL_CPU_MAX_CU_COUNT="1")
    found = []
    for name in NAMES:
        try:
            found.append(ow.device(name))
        except ow.OpweaveError as missing:
            print(f"  without {name}: {str(missing).splitlines()[0]}", file=sys.stderr)
    ow.backend("cpu").set_threads(1)  # type: ignore[attr-defined]
    return found


def random_pins(scheduler: ow.Scheduler, output: ow.Tensor, rng: np.random.Generator) -> dict[ow.Tensor, ow.Device]:
    """Runs of nodes on random devices; few runs are as likely as many (their number's logarithm is uniform)."""
    nodes = [n for split in scheduler.partition(output).splits for n in split.nodes]
    count = int(len(nodes) ** rng.random())
    cuts = set(rng.choice(len(nodes), count, replace=False).tolist())
    pins: dict[ow.Tensor, ow.Device] = {}
    at = rng.integers(len(scheduler.devices))
    for i, node in enumerate(nodes):
        if i in cuts:
            at = rng.integers(len(scheduler.devices))
        pins[node] = scheduler.devices[at]
        try:
            scheduler.partition(node, pins={node: pins[node]})
        except ow.UnsupportedOpError:
            pins[node] = scheduler.devices[0]
    return pins


def least(calls: dict[str, Callable[[], Any]], samples: int) -> dict[str, float]:
    return {name: min(times) for name, times in interleaved(calls, samples, 1e-3).items()}


def main() -> None:
    from scipy.stats import spearmanr

    given = options("Placement by cost against the best other placement.")
    report = Report("placement", given)
    found = devices()
    samples = 15 if given.quick else 41
    with TemporaryDirectory() as folder:
        os.environ["OPWEAVE_PROFILE_CACHE"] = folder
        for device in found:
            ow.profile(device)
        for graph, make in PLACED.items():
            built = make()
            run = partial(_placements, built, found, samples)
            ratio, name, best, cost = run()
            predicted, measured = _random(built, found, samples)
            rank = float(spearmanr(predicted, measured).statistic)
            report.row(graph=graph, by_cost_us=cost * 1e6, best_other_us=best * 1e6, best_other=name, ratio=ratio,
                       rank_correlation=rank)  # fmt: skip
            report.target(f"{graph}: over the best other", ratio, RATIO, "")
            report.target(f"{graph}: 1 - rank correlation", 1 - rank, 1 - CORRELATION, "")
    report.finish("Placement by cost")


def _placements(built: Any, found: list[ow.Device], samples: int) -> tuple[float, str, float, float]:
    """By cost over the best other, the name of that one, its seconds, and those by cost."""
    schedulers = {"by cost": ow.Scheduler(found, placement="cost"), "by priority": ow.Scheduler(found)}
    for device in found:
        schedulers[device.name] = ow.Scheduler(device)
    calls: dict[str, Callable[[], Any]] = {}
    kinds: dict[str, Any] = {}
    truth: Any = None
    for name, scheduler in schedulers.items():
        try:
            program = scheduler.build(built.output)
        except ow.UnsupportedOpError:
            continue
        value = program.run(built.feeds)
        truth = value if truth is None else truth
        np.testing.assert_allclose(value, truth, rtol=1e-2, atol=1e-3)
        calls[name] = partial(program.run, built.feeds)
        kinds[name] = [(split.target.name, split.nodes) for split in program.splits]
    seconds = least(calls, samples)
    # Programs that place every node alike do the same work: the least of them is that of each.
    seconds = {n: min(s for other, s in seconds.items() if kinds[other] == kinds[n]) for n in seconds}
    cost = seconds.pop("by cost")
    best = min(seconds, key=lambda name: (seconds[name], kinds[name] != kinds["by cost"]))
    for scheduler in schedulers.values():
        scheduler.close()
    return cost / seconds[best], best, seconds[best], cost


def _random(built: Any, found: list[ow.Device], samples: int) -> tuple[list[float], list[float]]:
    """Predicted and measured seconds of random placements."""
    rng = np.random.default_rng(0)
    with ow.Scheduler(found) as scheduler:
        programs = [
            scheduler.build(built.output, pins=random_pins(scheduler, built.output, rng)) for _ in range(RANDOM)
        ]
        measured = least({str(i): partial(p.run, built.feeds) for i, p in enumerate(programs)}, samples)
        return [p.predicted.seconds for p in programs], [measured[str(i)] for i in range(RANDOM)]


if __name__ == "__main__":
    main()
