"""Which modules ``import opweave`` and its parts load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import numpy
before = set(sys.modules)
import opweave
print(json.dumps(sorted(set(sys.modules) - before)))
"""

AFTER_NUMPY = {"ml_dtypes", "opweave"}
"""Packages outside of the standard library: importing takes some 40 ms beyond NumPy with these."""

SLOW = {"asyncio", "concurrent", "ctypes", "difflib", "http", "inspect", "json", "logging", "multiprocessing",
        "sqlite3", "ssl", "subprocess", "tempfile", "tomllib", "unittest", "xml"}  # fmt: skip
"""Packages of the standard library that take long, and that only some programs need."""

LATER = {"cli", "hookspecs", "kv_cache", "tools"}
"""Parts of opweave that most programs never use."""


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """What ``import opweave`` loads beyond NumPy. What that takes follows from it, on a busy machine too."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


def test_importing_loads_no_other_package(modules):
    packages = {name.partition(".")[0] for name in modules}
    assert {name for name in packages if name not in sys.stdlib_module_names} == AFTER_NUMPY
    assert not packages & SLOW


def test_importing_loads_no_part_that_most_programs_never_use(modules):
    parts = {name.split(".")[1] for name in modules if name.startswith("opweave.")}
    assert not parts & LATER, parts & LATER
    assert not {f"opweave.graph.{name}" for name in ("container", "dot", "loading", "saving")} & modules
    own = {name for name in modules if name.partition(".")[0] == "opweave"}
    families = {name for name in own if name.startswith("opweave.ops.")}  # all: they make the table of operations
    assert len(own - families) < 90


FRAMEWORKS = {"onnx", "onnxruntime", "pyopencl", "torch"}

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
