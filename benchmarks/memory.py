"""How much memory a plan takes over what any plan must take.

Chain, diamond, U and transformer (see ``graphs.py``) on ``cpu`` and on three CPU devices with separate memories, with
tensors of 64 KiB and more. ``planned`` is what the scheduler allocated for temporaries; ``bound`` is the largest sum of
live bytes at any moment, in place where that is allowed, at the same alignment. Its exact definition is that of
``memory_verifier.py``, which replays the compiled program, shares no code with the planner, and also checks that no two
live tensors overlap (``faults``).

``naive`` is what every value with memory of its own would take. Targets: planned at most 1.05 times the bound, and no
faults.
"""

from __future__ import annotations

import sys
from pathlib import Path

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, options
from benchmarks.graphs import GRAPHS, configurations
from benchmarks.memory_verifier import verify

LIMIT = 1.05
SIZES = {"64 KiB": (128, 128), "1 MiB": (2048, 128), "69 KiB": (130, 136)}
"""Rows and columns of f32 tensors. Those of a U have as many elements in its narrowest level."""


def main() -> None:
    given = options(__doc__.splitlines()[0])
    report = Report("memory", given)
    faults: list[str] = []
    for count, (devices, place) in configurations().items():
        for shape, make in GRAPHS.items():
            ratios = []
            for label, (rows, columns) in SIZES.items():
                for nodes in (100,) if given.quick else (100, 1000):
                    size = (rows * columns // 8, 64) if shape == "u" else (rows, columns)
                    built = make(nodes, *size, place=place)
                    with ow.Scheduler(devices) as scheduler:
                        program = scheduler.build(built.output)
                        judged = verify(program)
                        planned = sum(scheduler.buffer_size(d) for d in devices)
                        arenas, sizes = program.partition.arena_of, program.partition.sizes
                    naive = sum(s for a, s in zip(arenas, sizes, strict=True) if a >= 0)
                    bound = sum(judged.bound.values())
                    ratios.append(planned / bound)
                    faults += judged.faults
                    report.row(
                        graph=shape,
                        devices=count,
                        tensors=label,
                        nodes=len(program.partition.graph),
                        naive_KiB=naive / 1024,
                        bound_KiB=bound / 1024,
                        planned_KiB=planned / 1024,
                        ratio=planned / bound,
                        faults=len(judged.faults),
                    )
            name = f"{shape}, {count} device{'s' * (count > 1)}: planned over bound, at most"
            report.target(name, max(ratios), LIMIT, "times")
    report.target("overlaps and other faults", len(faults), 0, "")
    report.finish("Planned memory over the lower bound")
    for fault in faults:
        print(fault, file=sys.stderr)


if __name__ == "__main__":
    main()
