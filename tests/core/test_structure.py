"""The structure of the core: modules that name each other in a circle, and the list of hooks that ruff reads."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import opweave
from opweave.contract.device import DeviceHooks
from opweave.contract.memory import BufferTypeHooks
from opweave.contract.stream import StreamHooks

ROOT = Path(opweave.__file__).parent
PROJECT = Path(__file__).parents[2]

CIRCLES = {
    "contract.backend contract.device contract.kernels contract.memory contract.step contract.stream "
    "runtime.buffer runtime.checks runtime.device runtime.functional runtime.fusion runtime.listing runtime.memory "
    "runtime.plan runtime.reclaim runtime.stream runtime.submission runtime.transfers runtime.worker",
    "graph.leaf graph.opdef graph.operators graph.tensor",
}
"""Modules that name each other, most of them in annotations only: what a device, its streams and its memory are, and
what a tensor is. Take out what no longer does; nothing is added."""

LATE = {
    # What most programs never do: files of graphs, weights that change, arrays of other libraries, quantized values.
    "graph.graph": "graph.dot graph.loading graph.saving",
    "leaf_memory": "runtime.host.regions",
    "leaves": "dlpack leaf_updates sharding.placing",
    "ops.blocks": "ops.codebook_blocks",
    "ops.encoding": "ops.codebook_encoding",
    "ops.indexing": "ops.blocks",
    "ops.operands": "ops.blocks warning",
    "ops.quantization": "ops.blocks ops.encoding",
    "runtime.host.operands": "runtime.host.regions",
    "runtime.stream": "runtime.functional",
    # What is needed when plugins are looked for, one of them fails, or a file is shown to the hooks.
    "opweave": "packages",
    "errors": "difflib",
    "packages": "urllib.request",
    "progress": "rich.console rich.progress",
    "registry.compatibility": "packaging.version",
    "registry.discovery": "importlib.metadata packaging.requirements",
    "registry.hooks": "pluggy registry.hookspecs",
    "registry.isolation": "hashlib json runtime.host.cache signal subprocess tempfile",
    "registry.loading": "registry.variants traceback",
    "registry.measured": "hashlib json runtime.host.cache runtime.host.cores",
    # What the first build needs, and passes that few graphs need.
    "scheduler.builder": "scheduler.place.strategy scheduler.plan.collectives sharding.sharded_graph",
    "scheduler.place.arguments": "scheduler.place.strategy",
    "scheduler.place.assign": "scheduler.place.memory",
    "scheduler.place.target": "runtime.host.cores",
    "scheduler.plan.partition": "scheduler.plan.collectives",
    "scheduler.scheduler": "scheduler.builder scheduler.place.capabilities sharding.placing",
    # What is asked of a program, and what happens when a run is submitted, traced or fails.
    "scheduler.explain.page": "jinja2",
    "scheduler.program": "scheduler.explain.report scheduler.place.strategy scheduler.plan.allocate "
    "scheduler.plan.fuse scheduler.run.observers",
    "scheduler.run.executor": "futures scheduler.run.failures scheduler.run.trace",
    "scheduler.run.runs": "scheduler.run.failures",
    # What prints tables and adds commands, which the processes that ask plugins do not.
    "cli": "cli.app",
    "cli.extensions": "typer typer.main",
    "cli.output": "rich.console rich.progress rich.table rich.text",
}
"""Module -> what it imports within functions, so that ``import opweave``, the first build, or a process that asks
plugins does not pay for it. Those of the first two take 90 ms together, each from 0.3 ms (`warning`) to 9 ms
(`scheduler.plan.collectives`)."""


def modules() -> dict[str, Path]:
    """The modules of the core by name."""
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports_of(module: str, path: Path, known: set[str]) -> set[str]:
    """The modules of the core that a module imports anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known) - {module}


def reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for other in imports[left.pop()] - seen:
            seen.add(other)
            left.append(other)
    return seen


def test_modules_name_each_other_in_no_further_circle():
    paths = modules()
    imports = {module: imports_of(module, path, set(paths)) for module, path in paths.items()}
    ways = {module: reached(module, imports) for module in paths}
    circles = {
        " ".join(sorted(other.removeprefix("opweave.") for other in ways[module] if module in ways[other]))
        for module in paths
        if module in ways[module]
    }
    assert circles == CIRCLES


def test_functions_import_what_start_up_does_not_pay_for():
    paths = modules()
    late: dict[str, set[str]] = {}
    for module, path in paths.items():
        functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
        for node in [node for function in functions for node in ast.walk(function)]:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                inner = {name: f"{node.module}.{name}" for name in names}
                names = [inner[name] if inner[name] in paths else str(node.module) for name in names]
            if names:
                late.setdefault(module.removeprefix("opweave."), set()).update(
                    [name.removeprefix("opweave.") for name in names]
                )
    assert {module: " ".join(sorted(names)) for module, names in late.items()} == LATE


def test_the_contract_can_be_read_in_one_sitting():
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "contract").glob("*.py")}
    assert sum(lines.values()) <= 3000
    assert max(lines.values()) <= 400


def test_only_hooks_and_names_of_python_are_called_by_others_although_they_are_underscored():
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    allowed = set(settings["tool"]["ruff"]["lint"]["flake8-self"]["extend-ignore-names"])
    hooks = {
        name
        for kind in (DeviceHooks, StreamHooks, BufferTypeHooks)
        for name, member in vars(kind).items()
        if name.startswith("_") and not name.startswith("__") and callable(member)
    }
    assert allowed - {"_at_fork_reinit", "_current_frames", "_getframe", "_is_owned"} == hooks
