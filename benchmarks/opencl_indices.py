"""What checking indices costs on OpenCL: plans that pick by index, where they are checked and where not.

- ``embedding N``: N rows of a table of 32,000 rows of 1,024 floats, a plan of one step.
- ``index_copy N``: N rows written into a state of 4,096 rows of 128 floats, as of a key-value cache.
- ``layers``: 32 steps of both kinds in one plan, as a decoder has them: the check is one copy of 16 bytes for all.

Each is run and waited for (*done*), and submitted ten times and then waited for (*queued*, per run), in turns. Target:
at most 10 µs a plan beside the work itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from opweave.contract import Arg, Step
from opweave.graph.dtypes import as_dtype
from opweave_opencl import OpenCLBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root, where `benchmarks` is

from benchmarks._measure import Report, interleaved, median, options

LIMIT = 10.0
QUEUED = 10


def operand(device: Any, values: np.ndarray[Any, Any]) -> Arg:
    buffer = device.alloc(values.nbytes)
    buffer.upload(0, values)
    return Arg(buffer, 0, as_dtype(values.dtype), values.shape, values.strides)


def main() -> None:
    given = options(__doc__.splitlines()[0])
    report = Report("opencl_indices", given)
    device: Any = OpenCLBackend().devices()[0]
    report.machine["device"] = device.description
    rng = np.random.default_rng(0)
    table = operand(device, np.zeros((32_000, 1024), np.float32))
    state = operand(device, np.zeros((4096, 128), np.float32))

    def picked(n: int) -> Step:
        ids = operand(device, rng.integers(0, 32_000, n))
        return Step("embedding", operand(device, np.zeros((n, 1024), np.float32)), (table, ids), {})

    def written(n: int) -> Step:
        ids = operand(device, rng.permutation(4096)[:n])
        return Step("index_copy", state, (ids, operand(device, np.zeros((n, 128), np.float32))), {})

    plans = {f"embedding {n}": [picked(n)] for n in (1, 16, 512)}
    plans |= {f"index_copy {n}": [written(n)] for n in (1, 16)}
    plans["layers"] = [picked(1), *[written(1) for _ in range(31)]]
    with device.open(check_indices=True) as checking, device.open(check_indices=False) as plain:
        for name, steps in plans.items():
            contestants: dict[str, Callable[[], object]] = {}
            for label, stream in (("checked", checking), ("plain", plain)):
                plan = stream.compile(steps)
                contestants[f"{label} done"] = partial(run, plan, 1)
                contestants[f"{label} queued"] = partial(run, plan, QUEUED)
            times = interleaved(contestants, 30 if given.quick else 200)
            us = {label: median(taken) * 1e6 for label, taken in times.items()}
            us |= {label: value / QUEUED for label, value in us.items() if label.endswith("queued")}
            report.row(plan=name, **{label.replace(" ", "_") + "_us": value for label, value in us.items()})
            for way in ("done", "queued"):
                report.target(f"{name}, {way}", us[f"checked {way}"] - us[f"plain {way}"], LIMIT, "µs more")
    report.finish("Plans that pick by index on OpenCL, µs (medians)")


def run(plan: Any, times: int) -> None:
    for _ in range(times):
        plan.run()
    plan.stream.synchronize()


if __name__ == "__main__":
    main()
