"""What ``import opweave`` loads and what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import numpy
before = set(sys.modules)
from time import perf_counter
start = perf_counter()
import opweave
seconds = perf_counter() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""

RUNS = 20
LIMIT = 0.040
"""Seconds beyond NumPy."""


def run() -> tuple[float, list[str]]:
    # Importing is meant, not compiling, which an installed package never needs.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environ)
    seconds, modules = json.loads(done.stdout)
    return seconds, modules


@pytest.fixture(scope="module")
def runs() -> list[tuple[float, list[str]]]:
    run()  # writes the byte code where it is not there yet
    seen = [run()]
    # What is asked for is what importing takes, not what a busy machine makes of it: the best of several counts.
    while min(seconds for seconds, _ in seen) > LIMIT and len(seen) < RUNS:
        seen.append(run())
    return seen


@pytest.mark.parametrize(
    "package",
    [
        "opweave_cpu",
        "opweave_opencl",
        "opweave_torch",
        "pyopencl",
        "torch",
        "typer",
        "rich",
        "pytest",
        "pluggy",
        "packaging",
    ],
)
def test_loads_no(runs, package):
    assert package not in runs[0][1]


def test_takes_at_most_40_ms_beyond_numpy(runs):
    assert min(seconds for seconds, _ in runs) <= LIMIT
