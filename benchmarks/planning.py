"""What building costs: from outputs to a compiled program (`Scheduler.build`), for graphs of 1,000 to 100,000 nodes.

Chains, U-shaped skip graphs and transformer-like graphs (see ``graphs.py``) of small tensors, on one device (``cpu``)
and on three CPU devices with separate memories, where each third of the weights lies on another device. ``nodes`` are
those of the graph, views included; ``steps`` are what a run executes. Every sample has new leaves and a new scheduler.
Building the tensors is not timed, nor is placing weights on the three devices; on the one device weights are left
unplaced, and the program takes them in. Sizes take turns. Figures and targets are of the *minimum* of the samples, as
whatever else the machine does can only add to it; the median stands beside it.

- ``first``: the first build. Targets: at most 12 µs a node for each device at 1,000 nodes, and at 100,000 at most 1.5
  times as much a node as at 1,000.
- ``again``: the outputs are made once more by the same calls and built on the same scheduler. Target: at most a fifth
  of ``first``.
- ``next``: an encoder, a decoder with a growing cache and a stack (``sized_graphs.py``) are built in one size and then
  in two others, over the same leaves and on the same scheduler, on each of ``cpu``, ``torch:cpu`` and ``opencl`` that
  is here. The first build also takes the weights in, and repacks them where the device wants that. Target: at most a
  quarter of ``first``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, median, options
from benchmarks.graphs import GRAPHS, Place, configurations
from benchmarks.sized_graphs import SIZED

SHAPES = ("chain", "u", "transformer")
PER_NODE = 12e-6
GROWTH = 1.5
AGAIN = 0.2


NEXT = 0.25
DEVICES = (("cpu",), ("torch:cpu",), ("opencl", "cpu"))


class Sample(NamedTuple):
    """Seconds of building, and what was built."""

    first: float
    again: float
    nodes: int
    steps: int
    splits: int


def sample(shape: str, nodes: int, devices: Sequence[ow.Device], place: Place) -> Sample:
    built = GRAPHS[shape](nodes, place=place)
    gc.collect()
    scheduler = ow.Scheduler(devices)
    start = perf_counter()
    program = scheduler.build(built.output)
    first = perf_counter() - start
    output = built.again()
    start = perf_counter()
    scheduler.build(output)
    again = perf_counter() - start
    steps = sum(len(split.steps) for split in program.splits)
    result = Sample(first, again, len(program.partition.graph), steps, len(program.splits))
    scheduler.close()
    return result


def resized(report: Report, samples: int) -> None:
    """First builds, and builds of the same graphs in other sizes on the same scheduler."""
    for names in DEVICES:
        try:
            devices = [ow.device(name) for name in names]
        except (ow.PluginError, ow.UnknownNameError):
            continue
        for graph, make in SIZED.items():
            first, following = [], []
            for _ in range(samples):
                made = make()
                outputs = [made.at(size) for size in made.sizes]
                gc.collect()
                with ow.Scheduler(devices) as scheduler:
                    times = []
                    for output in outputs:
                        start = perf_counter()
                        program = scheduler.build(output)
                        times.append(perf_counter() - start)
                first.append(times[0])
                following.append(times[-1])
            nodes, ratio = len(program.partition.graph), min(following) / min(first)
            report.row(
                graph=f"{graph}, {' to '.join(map(str, made.sizes[::2]))} rows",
                devices=names[0],
                nodes=nodes,
                steps=sum(len(split.steps) for split in program.splits),
                splits=len(program.splits),
                first_ms=min(first) * 1e3,
                us_per_node=min(first) / nodes * 1e6,
                next_ms=min(following) * 1e3,
                next_us_per_node=min(following) / nodes * 1e6,
                next_over_first=ratio,
            )
            report.target(f"{graph} on {names[0]}: built in another size over first, at most", ratio, NEXT, "times")


def main() -> None:
    given = options(__doc__.splitlines()[0])
    report = Report("planning", given)
    sizes = (1000, 10_000) if given.quick else (1000, 10_000, 100_000)
    turns = 3 if given.quick else 5
    for count, (devices, place) in configurations().items():
        for shape in SHAPES:
            samples: dict[int, list[Sample]] = {size: [] for size in sizes}
            for _ in range(turns):
                for size in sizes:
                    # Small graphs are sampled several times in each turn.
                    samples[size] += [sample(shape, size, devices, place) for _ in range(8 if size == 1000 else 1)]
            best = {size: min(samples[size], key=lambda s: s.first) for size in sizes}
            per_node = {size: s.first / s.nodes for size, s in best.items()}
            again = {size: min(s.again for s in samples[size]) / best[size].first for size in sizes}
            for size, s in best.items():
                report.row(
                    graph=shape,
                    devices=count,
                    nodes=s.nodes,
                    steps=s.steps,
                    splits=s.splits,
                    first_ms=s.first * 1e3,
                    us_per_node=per_node[size] * 1e6,
                    median_us_per_node=median(t.first / t.nodes for t in samples[size]) * 1e6,
                    us_per_step=s.first / s.steps * 1e6,
                    over_1000=per_node[size] / per_node[1000],
                    again_over_first=again[size],
                )
            name, last = f"{shape}, {count} device{'s' * (count > 1)}", sizes[-1]
            report.target(
                f"{name}: a node and device at 1,000 nodes", per_node[1000] / count * 1e6, PER_NODE * 1e6, "µs"
            )
            report.target(f"{name}: a node at {last:,} over 1,000", per_node[last] / per_node[1000], GROWTH, "times")
            report.target(f"{name}: built again over first, at most", max(again.values()), AGAIN, "times")
    resized(report, 4 if given.quick else 12)
    report.finish("Scheduler.build, from outputs to compiled program (minima)")


if __name__ == "__main__":
    main()
