"""Placement: whether it finds the fastest one, and whether predictions rank placements as clocks do.

Seven graphs over every device here: two CPU devices with separate memories (``OPWEAVE_CPU_DEVICES=2``), OpenCL and
torch where they are installed, each with one thread: nobody can predict threads that wait for each other on a busy
machine. In two of the graphs parts are fastest on different devices.

- *best alone*: the fastest device that runs the whole graph alone. *by cost*, *tuned*: the time over it of
  ``placement="cost"`` and of what `ow.tune` found.
- *rank correlation*: Spearman's, of predicted and measured seconds over 20 random placements, runs of nodes on random
  devices; by the profiles alone, and with the steps' times that tuning has measured.
- *what-if*: the largest error of the predicted time over all devices alone, simulated like the real ones, after tuning.
- *optimum*: of the four nodes of "strengths" over three devices, the tuned placement over the fastest of all 81.

Seconds are minima of runs in turns, those of programs that place every node alike taken together. Profiles are
measured anew. Targets: tuned at most 1.05 times the best device alone, at most 0.9 where mixing must win, at most 1.1
times the optimum; a rank correlation of at least 0.8 (shown as 1 - correlation); an error of what-if of at most 25 %.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, options
from benchmarks.graphs import MIXED, PLACED

RATIO, MIXED_RATIO, OPTIMUM, CORRELATION, WHAT_IF = 1.05, 0.9, 1.1, 0.8, 0.25
RANDOM = 20
TURN = 2e-3
"""Seconds of a turn."""
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
    """The least seconds of a run of each, in turns of some runs: the first one of a turn, which finds the caches full
    of the data of others and the threads of its devices asleep, is not what a program takes that runs again and again.
    """
    result = dict.fromkeys(calls, inf)
    for _ in range(samples):
        for name, call in calls.items():
            call()
            end = perf_counter() + TURN
            while (start := perf_counter()) < end:
                call()
                result[name] = min(result[name], perf_counter() - start)
    return result


def main() -> None:
    given = options("Placement by cost and by tuning against the best device alone.")
    report = Report("placement", given)
    found = devices()
    samples = 15 if given.quick else 41
    with TemporaryDirectory() as folder:
        os.environ["OPWEAVE_PROFILE_CACHE"] = folder
        for device in found:
            ow.profile(device)
        for graph, make in {**PLACED, **MIXED}.items():
            _measure(graph, make(), found, samples, report)
        built = MIXED["strengths"]()
        report.target("strengths: over the optimum", _over_optimum(built, found, samples), OPTIMUM, "")
    report.finish("Placement")


def _measure(graph: str, built: Any, found: list[ow.Device], samples: int, report: Report) -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    with ow.Scheduler(found) as scheduler, ow.Scheduler(found, placement="cost") as by_cost:
        pins = [random_pins(scheduler, built.output, rng) for _ in range(RANDOM)]
        predicted = [scheduler.partition(built.output, pins=p).predicted.seconds for p in pins]
        programs = {"by cost": by_cost.build(built.output)}
        tuning = ow.tune(scheduler, built.output, built.feeds)
        programs["tuned"] = scheduler.build(built.output, pins=tuning.pins)
        again = [scheduler.partition(built.output, pins=p).predicted.seconds for p in pins]
        placed = {str(i): scheduler.build(built.output, pins=p) for i, p in enumerate(pins)}
        measured = least({name: partial(program.run, built.feeds) for name, program in placed.items()}, samples)
        alone, errors = _alone(built, found, programs, samples)
        ranks = [float(spearmanr(times, [measured[n] for n in placed]).statistic) for times in (predicted, again)]
    cost, tuned = alone.pop("by cost"), alone.pop("tuned")
    best = min(alone, key=alone.__getitem__)
    report.row(graph=graph, best_alone=best, best_alone_us=alone[best] * 1e6, by_cost=cost / alone[best],
               tuned=tuned / alone[best], rank_by_profiles=ranks[0], rank_tuned=ranks[1], what_if_error=max(errors),
               tuned_on=", ".join(sorted({device.name for device in tuning.pins.values()})))  # fmt: skip
    limit = MIXED_RATIO if graph in MIXED else RATIO
    report.target(f"{graph}: tuned over the best alone", tuned / alone[best], limit, "")
    report.target(f"{graph}: 1 - rank correlation, tuned", 1 - ranks[1], 1 - CORRELATION, "")
    report.target(f"{graph}: error of what-if", max(errors), WHAT_IF, "")


def _alone(
    built: Any, found: list[ow.Device], programs: dict[str, Any], samples: int
) -> tuple[dict[str, float], list[float]]:
    """Seconds of the programs and of those of each device alone, and how far predictions for simulated devices like
    these are off."""
    programs, guesses = dict(programs), {}
    for device in found:
        copy = ow.simulate(f"like {device.name}", like=device)
        try:
            programs[device.name] = ow.Scheduler(device).build(built.output)
            guesses[device.name] = ow.Scheduler(copy).partition(built.output).predicted.seconds
        except ow.UnsupportedOpError:
            continue
    truth = programs["tuned"].run(built.feeds)
    for program in programs.values():
        np.testing.assert_allclose(program.run(built.feeds), truth, rtol=1e-2, atol=1e-3)
    seconds = least({name: partial(program.run, built.feeds) for name, program in programs.items()}, samples)
    kinds = {name: [(split.target.name, split.nodes) for split in p.splits] for name, p in programs.items()}
    # Programs that place every node alike do the same work: the least of them is that of each.
    seconds = {n: min(s for other, s in seconds.items() if kinds[other] == kinds[n]) for n in seconds}
    return seconds, [abs(guess / seconds[name] - 1) for name, guess in guesses.items()]


def _over_optimum(built: Any, found: list[ow.Device], samples: int) -> float:
    """The tuned placement over the fastest of all, measured in turns."""
    devices = [device for device in found if device.name != "cpu:1"]
    with ow.Scheduler(devices) as scheduler:
        tuned = ow.tune(scheduler, built.output, built.feeds).pins
        nodes = list(tuned)
        able = [[d for d in devices if scheduler.supports(d, node)] for node in nodes]
        calls: dict[str, Callable[[], Any]] = {}
        for where in product(*able):
            program = scheduler.build(built.output, pins=dict(zip(nodes, where, strict=True)))
            calls[" ".join(device.name for device in where)] = partial(program.run, built.feeds)
        seconds = least(calls, samples // 3)
    return seconds[" ".join(tuned[node].name for node in nodes)] / min(seconds.values())


if __name__ == "__main__":
    main()
