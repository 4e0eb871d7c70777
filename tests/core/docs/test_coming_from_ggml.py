"""``docs/coming-from-ggml.md`` is complete and true: its names resolve, and its tests exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.core.scheduler.test_parity import OPERATIONS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "coming-from-ggml.md").read_text(encoding="utf-8")

FUNCTIONS, OPS = 260, 110
"""How many there are: the functions of the headers of October 2025 and of 2024, each once, with the members of the
interfaces, the optional procedures, transfers of rows, memory of graphs, threads, quantizing, training and remote
devices; the operations of August 2026."""


class Row(NamedTuple):
    """A line of a table."""

    ggml: str
    here: str
    differs: str
    shown: str


def rows_of(section: str) -> list[Row]:
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 for row in cells), [row for row in cells if len(row) != 4]
    return [Row(ggml.strip("`"), here.strip("`"), differs, shown.strip("`")) for ggml, here, differs, shown in cells]


FUNCTION_ROWS, OP_ROWS = rows_of("Functions"), rows_of("Operations")
ROWS = FUNCTION_ROWS + OP_ROWS


def resolve(path: str) -> Any:
    """What ``ow.Buffer.clear`` or ``opweave.contract.Plan.run`` means; `None` for attributes that only objects have."""
    first, *rest = path.split(".")
    packages = ("opweave_combined", "opweave_conformance", "opweave_cost", "opweave_models", "opweave_training")
    assert first in ("ow", "opweave", *packages), path
    value: Any = importlib.import_module(package := "opweave" if first == "ow" else first)
    for i, name in enumerate(rest):
        if hasattr(value, name):
            value = getattr(value, name)
        elif inspect.ismodule(value):
            value = importlib.import_module(".".join([package, *rest[: i + 1]]))
        else:
            assert inspect.isclass(value), path
            declared = any(name in vars(base).get("__annotations__", ()) for base in value.__mro__)
            assert declared or name in value.__init__.__code__.co_names, path
            value = None
    return value


@cache
def written_in(path: Path) -> frozenset[str]:
    """The tests of a file: ``test_x`` and ``TestX::test_y``."""
    found = []
    for item in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(item, ast.FunctionDef):
            found.append(item.name)
        elif isinstance(item, ast.ClassDef):
            found += [f"{item.name}::{f.name}" for f in item.body if isinstance(f, ast.FunctionDef)]
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_every_function_and_operation_has_one_row():
    for rows, count in ((FUNCTION_ROWS, FUNCTIONS), (OP_ROWS, OPS)):
        assert [name for name, n in Counter(row.ggml for row in rows).items() if n > 1] == []
        assert len(rows) == count
    assert all(row.ggml.startswith("ggml_") for row in FUNCTION_ROWS)
    assert all(re.fullmatch(r"[A-Z0-9_]+", row.ggml) for row in OP_ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.ggml)
def test_row(row: Row):
    resolve(row.here)
    assert row.differs
    path, _, name = row.shown.partition("::")
    assert re.fullmatch(r"tests/[\w/]+/test_\w+\.py", path), row.shown
    assert name.partition("[")[0] in written_in(ROOT / path), f"{path} has no {name}"


ELSEWHERE = (
    "ggml_opt_",
    "ggml_backend_rpc_",
    "ggml_backend_is_rpc",
    "ggml_threadpool_",
    "ggml_backend_cpu_set_threadpool",
    "ggml_numa_init",
    "ggml_is_numa",
)
"""How functions begin that are of the processor alone, of remote devices, or of training, with its own tests on
devices."""


@pytest.mark.parametrize(
    "row", [row for row in FUNCTION_ROWS if not row.ggml.startswith(ELSEWHERE)], ids=lambda r: r.ggml
)
def test_functions_are_shown_on_every_shipped_backend(row: Row):
    """A test of a double would show that a backend can be so, not that `cpu`, `opencl` and `torch` are."""
    path, _, name = row.shown.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    assert "from tests.support.real_devices import" in source, f"{path} is of doubles"
    test = next(item for item in ast.parse(source).body if isinstance(item, ast.FunctionDef) and item.name == name)
    assert {arg.arg for arg in test.args.args} & {"device", "name", "real_device"}, f"{name} is of one device"


def test_every_name_in_the_text_resolves():
    names = re.findall(r"`((?:ow|opweave)(?:\.\w+)+)", PAGE)
    assert len(names) > FUNCTIONS / 2
    for name in names:
        resolve(name)


def test_every_operation_is_shown():
    assert {row.ggml for row in OP_ROWS} == set(OPERATIONS)


def test_names_that_do_not_exist_are_noticed():
    for wrong in ("ow.Bufer", "ow.Buffer.cleared", "ow.BufferType.sise", "opweave.contract.Event.join"):
        with pytest.raises((AssertionError, ImportError)):
            resolve(wrong)
