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


FRAMEWORKS = {"torch", "pyopencl"}

RUN_ON_CPU = """
import numpy, opweave as ow
x = ow.input("x", (2, 3))
with ow.Scheduler("cpu") as scheduler:
    scheduler.build(ow.tanh(x)).run(x=numpy.ones((2, 3), "f4"))
"""

FORMATS = "import opweave.registry; opweave.registry.formats()"

HELP = """
import sys
sys.argv = ["opweave", "--help"]
from opweave.cli import main
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("import opweave", set()),
        ("import opweave; opweave.plugins()", set()),
        (HELP, set()),
        (FORMATS, set()),
        (RUN_ON_CPU, {"opweave_cpu"}),
    ],
    ids=["import", "plugins", "help", "formats", "cpu"],
)
@pytest.mark.timeout(100)
def test_what_is_only_needed_by_others_is_not_loaded(code, imported):
    tell = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{tell}"], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert not modules & FRAMEWORKS
    # The hooks of a plugin are a small module of its own: its kernels come with its devices.
    assert {name.partition(".")[0] for name in modules if name.endswith(".kernels") and "opweave_" in name} == imported
