"""Level 0: which modules finding, importing and loading the plugin imports, observed in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from typing import Any, Final

from opweave.registry.records import PluginRecord
from opweave_conformance.checklist import Checklist, Subject, expect, inapplicable

__all__ = ["CHECKS"]

FRAMEWORKS: Final = frozenset({"cupy", "jax", "mxnet", "onnxruntime", "paddle", "pyopencl", "tensorflow", "torch"})
"""Packages that are slow to import or open devices, by import name, which for these is also the distribution's name."""

hygiene = Checklist(0, "hygiene", per_device=False)
CHECKS = hygiene.checks


@hygiene("scan")
def _(subject: Subject) -> None:
    """Finding plugins reads metadata only: no plugin is imported and no framework."""
    stages = _probe(subject.record)
    loaded = set(stages["scan"]) & (set(stages["plugins"].values()) | FRAMEWORKS)
    expect(not loaded, f"finding plugins imports {_listed(loaded)}")


@hygiene("import")
def _(subject: Subject) -> None:
    """Importing the plugin's module imports no other plugin, and no framework that the plugin does not require."""
    stages = _probe(subject.record)
    if "import" not in stages:
        inapplicable("it is a single file")
    _judge("importing its module", stages, "import", subject.record)


@hygiene("load")
def _(subject: Subject) -> None:
    """Loading the plugin imports no other plugin, and no framework that the plugin does not require."""
    _judge("loading it", _probe(subject.record), "load", subject.record)


def _judge(doing: str, stages: dict[str, Any], stage: str, record: PluginRecord) -> None:
    loaded = set(stages[stage])
    own = record.value.partition(":")[0].partition(".")[0]
    others = loaded & (set(stages["plugins"].values()) - {own})
    expect(not others, f"{doing} imports another plugin: {_listed(others)}")
    foreign = {name for name in loaded & FRAMEWORKS if name not in _requirements(record.distribution)}
    expect(not foreign, f"{doing} imports {_listed(foreign)}, which its distribution does not require")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _probe(record: PluginRecord) -> dict[str, Any]:
    if record.name == "host":
        inapplicable("it is built in")
    is_file = record.value.endswith(".py")
    if not record.distribution and not is_file:
        inapplicable("the program registered it, it was not found by its metadata")
    return _run_probe(record.value if is_file else record.name, tuple(sys.path))


@cache
def _run_probe(target: str, path: tuple[str, ...]) -> dict[str, Any]:
    from opweave_conformance.levels import probe

    command = [sys.executable, probe.__file__, json.dumps(path), target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    expect(done.returncode == 0, f"in a fresh process it fails: {done.stderr.strip()[-500:]}")
    stages: dict[str, Any] = json.loads(done.stdout)
    return stages


def _requirements(distribution: str) -> frozenset[str]:
    """Names of the distributions that ``distribution`` requires, directly or not; those of extras left out."""
    from importlib.metadata import PackageNotFoundError, requires

    found: set[str] = set()
    todo = [distribution] if distribution else []
    while todo:
        try:
            lines = requires(todo.pop()) or []
        except PackageNotFoundError:
            continue
        for line in lines:
            name = re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0].lower().replace("_", "-")
            if "extra ==" not in line and name not in found:
                found.add(name)
                todo.append(name)
    return frozenset(found)
