"""What `Program.submit` adds to a run: ``submit().result()`` beside the same calls in a pool of the standard library.

The pool has one thread and is given the very call that ``Program.run`` is, so that both hand over, compute, and hand
back; the difference is what the hand-over costs. ``run`` is the same without any thread. With ``parallel=True``,
``submit`` moreover hands every step to the device's own thread.

Target: in turn, no slower than the pool.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import opweave as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, median, options


def main() -> None:
    given = options(__doc__ or "")
    report = Report("submit", given)
    samples = 30 if given.quick else 150
    x = ow.input("x", (16,))
    ones = np.ones(16, np.float32)
    for overlapping in (False, True):
        with ow.Scheduler("cpu", parallel=overlapping) as scheduler, ThreadPoolExecutor(1) as pool:
            program = scheduler.build(x + 1)

            def submit(program: ow.Program = program) -> None:
                program.submit(x=ones).result()

            def several(program: ow.Program = program) -> None:
                for future in [program.submit(x=ones) for _ in range(3)]:
                    future.result()

            def in_pool(program: ow.Program = program, pool: ThreadPoolExecutor = pool) -> None:
                pool.submit(program.run, {"x": ones}).result()

            def several_in_pool(program: ow.Program = program, pool: ThreadPoolExecutor = pool) -> None:
                for future in [pool.submit(program.run, {"x": ones}) for _ in range(3)]:
                    future.result()

            def run(program: ow.Program = program) -> None:
                program.run(x=ones)

            timed = interleaved(
                {"run": run, "pool": in_pool, "submit": submit, "pool of 3": several_in_pool, "submit of 3": several},
                samples,
            )
        times = {name: median(values) for name, values in timed.items()}
        for one, other in (("submit", "pool"), ("submit of 3", "pool of 3")):
            report.row(
                mode="overlapping" if overlapping else "in turn",
                what=one,
                us=round(times[one] * 1e6, 2),
                pool_us=round(times[other] * 1e6, 2),
                run_us=round(times["run"] * 1e6, 2),
                ratio=round(times[one] / times[other], 3),
            )
            if not overlapping:
                report.target(f"{one} beside ThreadPoolExecutor", times[one] / times[other], 1.0, "")
    report.finish("One addition of 16 numbers on cpu: submit().result() beside ThreadPoolExecutor")


if __name__ == "__main__":
    main()
