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
    "contract.workspace runtime.buffer runtime.checks runtime.device runtime.event runtime.functional "
    "runtime.fusion runtime.listing runtime.memory runtime.plan runtime.reclaim runtime.space runtime.stream "
    "runtime.submission runtime.transfers runtime.worker",
    "graph.leaf graph.opdef graph.operators graph.tensor",
}
"""Modules that name each other, most of them in annotations only: what a device, its streams and its memory are, and
what a tensor is. Take out what no longer does; nothing is added."""


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
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imports = {module: imports_of(module, path, set(paths)) for module, path in paths.items()}
    ways = {module: reached(module, imports) for module in paths}
    circles = {
        " ".join(sorted(other.removeprefix("opweave.") for other in ways[module] if module in ways[other]))
        for module in paths
        if module in ways[module]
    }
    assert circles == CIRCLES


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
