"""`opweave new-backend`: each variant of the package passes the suite as it stands, and planted faults are found."""

from __future__ import annotations

import ast
import io
import itertools
import os
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from opweave.cli.app import build_app
from opweave.errors import NameConflict, OpweaveError, PathError
from opweave.registry import Registry
from opweave_conformance.expectations import Expectations
from opweave_conformance.hooks import opweave_cli
from opweave_conformance.result import Result
from opweave_conformance.scaffold.package import LICENCES, Package, ScaffoldError, write_package
from opweave_conformance.suite import Suite

EMPTY = Registry(environ={}, search=[])

VARIANTS = {
    f"{language}_{memory}{'_async' * queue}{'_compiler' * compiles}": (memory, queue, compiles, language)
    for (language, memory), queue, compiles in itertools.product(
        (("python", "own"), ("python", "host"), ("c", "own")), (False, True), (False, True)
    )
}
CHECKS = [
    "hygiene-*", "memory-*", "add-f32-*", "relu-f32-*", "softmax-f32-*", "linear-f32-*", "async-*",
    "split-separate-layers", "compiler-*", "fault-*",
]  # fmt: skip
"""What the five kernels of a scaffold can meet; the rest of the suite is refused."""


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    root = tmp_path_factory.mktemp("packages")
    before = list(sys.path)

    @cache
    def written(variant: str) -> Path:
        folder = root / variant
        memory, queue, compiles, language = VARIANTS[variant]
        write_package(Package(variant, memory, queue, compiles, language), folder, EMPTY)  # type: ignore[arg-type]
        if language == "c":
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(command, cwd=folder, check=True, env=os.environ | {"CFLAGS": "-O1"}, capture_output=True)
        sys.path.insert(0, str(folder / "src"))
        return folder

    yield written
    sys.path[:] = before


def source_of(folder: Path) -> str:
    return (folder / f"src/opweave_{folder.name}/__init__.py").read_text()


def outcomes(source: str, patterns: list[str], most: int, expectations: Expectations | None = None) -> list[Result]:
    """The results of some of the checks that ``patterns`` select, evenly chosen, on the backend of a module."""
    sys.modules["scaffolded"] = module = ModuleType("scaffolded")
    exec(compile(source, "scaffolded", "exec"), module.__dict__)
    backend = next(v for name, v in vars(module).items() if name.endswith("Backend") and name != "Backend")
    registry = Registry(environ={}, search=[])
    found: list[Result] = []
    suite = Suite(registry.register(backend).name, using=registry, only=patterns, seconds=20)
    for pattern in patterns:
        part = Suite(suite.name, using=registry, only=[pattern], seconds=20, expectations=expectations)
        found += [part.perform(item) for item in part.items[:: max(1, -(-len(part.items) // most))]]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_passes_as_it_stands(variant: str, write: Callable[[str], Path]):
    found = outcomes(source_of(write(variant)), CHECKS, 3)
    assert [(o.id, o.reason) for o in found if o.status == "failed"] == []
    passed = {o.level for o in found if o.status == "passed"}
    assert passed == {0, 1, 2, 3, 4, 5}
    ran = {o.op for o in found if o.op and o.status == "passed"}
    assert ran == {"add", "relu", "softmax", "linear"}


FAULTS = {
    "python_own: a kernel ignores the offset": ("arg.size, arg.offset)", "arg.size, 0)", "add-f32-*"),
    "python_own: a mask is accepted": ('"a mask is not supported" if', "None if", "softmax-f32-*"),
    "python_own_async: only the first call is made": ("    call()", "    previous or call()", "split-separate-layers"),
    "python_own_async: errors of queued work are lost": ("            raise error\n", "", "fault-queued"),
    "python_own_compiler: values overlap": ("-(-arg.nbytes // 64) * 64", "64", "split-separate-layers"),
    "python_own_async_compiler: the order is lost": (
        "self.queue.submit(after, self.last, call)", "ThreadPoolExecutor(1).submit(call)", "async-order-*",
    ),
    "python_host: sums are products": ('if op == "add"', 'if op == "mul"', "add-f32-*"),
    "python_host_async: softmax loses its scale": (" * np.float32(scale)", "", "softmax-f32-*"),
    "python_host_compiler: a step is left out": ("in calls]", "in calls[1:]]", "split-separate-layers"),
    "python_host_async_compiler: relu loses NaN": ("np.maximum, x", "np.fmax, x", "relu-f32-*"),
    "c_own: rows and columns change places": ("out.size // n, n, k", "n, out.size // n, k", "linear-f32-*"),
    "c_own_async: uploads begin at the block": ("mem + offset, ffi", "mem, ffi", "memory-*"),
    "c_own_compiler: a command is left out": ("for call in calls", "for call in calls[1:]", "split-separate-layers"),
    "c_own_async_compiler: downloads begin at the block": ("mem + offset, len(out)", "mem, len(out)", "memory-*"),
}  # fmt: skip
"""Variant and what is wrong -> what is replaced, by what, and the checks that have to see it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, write: Callable[[str], Path]):
    old, new, pattern = FAULTS[fault]
    source = source_of(write(fault.partition(":")[0]))
    assert old in source
    assert any(o.status == "failed" for o in outcomes(source.replace(old, new), [pattern], 40))


def failing_call(stream: Any) -> Callable[[], None]:
    """A call that queues work which fails: a call that raises, or a command that the library does not know."""
    scaffolded = sys.modules[type(stream).__module__].__dict__
    if "lib" not in scaffolded:
        return partial(stream.enqueue, partial(divmod, 1, 0))
    launch: Callable[..., Callable[[], None]] = scaffolded["Launch"]
    return launch(stream, {"op": 99})


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "async" in v])
def test_all_who_wait_are_told_of_queued_work_that_fails(variant: str, write: Callable[[str], Path]):
    found = outcomes(source_of(write(variant)), ["*fault-driver"], 2, Expectations(failing_call=failing_call))
    assert [(o.status, o.reason) for o in found] == [("passed", "")] * 2


def test_errors_of_the_driver_that_are_swallowed_are_found(write: Callable[[str], Path]):
    source = source_of(write("python_own_async"))
    assert "            raise error\n" in source
    faulty = source.replace("            raise error\n", "")
    found = outcomes(faulty, ["*fault-driver"], 2, Expectations(failing_call=failing_call))
    assert [o.status for o in found] == ["failed"] * 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_python_is_short_and_has_no_other_language(variant: str, tmp_path: Path):
    memory, queue, compiles, language = VARIANTS[variant]
    package = Package("acme", memory, queue, compiles, language)  # type: ignore[arg-type]
    write_package(package, tmp_path / "acme", EMPTY)
    sources = [file.read_text() for file in (tmp_path / "acme").rglob("*.py") if file.parent.name != "tests"]
    assert sum(map(lines_of_code, sources)) < 100
    assert any(file.suffix == ".c" for file in (tmp_path / "acme").rglob("*")) == (language == "c")
    project = tomllib.loads((tmp_path / "acme/pyproject.toml").read_text())
    assert project["project"]["entry-points"]["opweave.backends"] == {"acme": "opweave_acme:AcmeBackend"}


def lines_of_code(source: str) -> int:
    """Lines that are neither blank nor comments nor docstrings."""
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({t.start[0] for t in tokens if t.type not in silent} - documented)


def test_pip_installs_it_and_the_registry_finds_it(tmp_path: Path):
    write_package(Package("acme_two", licence="Apache-2.0"), tmp_path / "package", EMPTY)
    target = tmp_path / "site"
    options = ["--no-build-isolation", "--no-deps", "--target", str(target), "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, str(tmp_path / "package")], check=True)
    registry = Registry(environ={"OPWEAVE_BACKEND_PATH": str(target)}, search=[])
    assert [device.name for device in registry.devices()] == ["acme_two", "host"]
    record = next(r for r in registry.plugins() if r.name == "acme_two")
    assert (record.distribution, record.version) == ("opweave-acme-two", "0.1.0")


# --- the command ----------------------------------------------------------------------------------------------------


def call(*arguments: str, typed: str | None = None) -> Any:
    app = build_app()
    opweave_cli(app)
    return CliRunner().invoke(app, ["new-backend", *arguments], input=typed)


def test_the_licence_is_asked_for(tmp_path: Path):
    result = call("scaffolded", "--into", str(tmp_path / "a"), "--author", "Ada", typed="BSD-3-Clause\n")
    assert result.exit_code == 0, result.output
    assert all(licence in result.output for licence in LICENCES)
    assert "BSD 3-Clause" in (tmp_path / "a/LICENSE").read_text()
    assert ", Ada\n" in (tmp_path / "a/LICENSE").read_text()
    assert tomllib.loads((tmp_path / "a/pyproject.toml").read_text())["project"]["license"] == "BSD-3-Clause"
    assert result.output.splitlines()[-3] == "pip install -e '.[test]'"


def test_without_an_answer_nothing_is_written(tmp_path: Path):
    result = call("scaffolded", "--into", str(tmp_path / "a"), typed="")
    assert isinstance(result.exception, ScaffoldError)
    assert "--license MIT" in str(result.exception)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("my-device", {}, ScaffoldError, "underscores"),
        ("Acme", {}, ScaffoldError, "lower-case"),
        ("2fast", {}, ScaffoldError, "a letter first"),
        ("class", {}, ScaffoldError, "cannot be the name"),
        ("höst", {}, ScaffoldError, "cannot be the name"),
        ("../acme", {}, ScaffoldError, "cannot be the name"),
        ("host", {}, NameConflict, "another name"),
        ("conformance", {}, NameConflict, "opweave-conformance is installed"),
        ("acme", {"language": "c", "memory": "host"}, ScaffoldError, "memory of its own"),
        ("acme", {"licence": "GPL"}, ScaffoldError, "Apache-2.0"),
    ],
)
def test_what_cannot_be_written_is_refused(
    name: str, options: dict[str, Any], error: type[OpweaveError], words: str, tmp_path: Path
):
    with pytest.raises(error, match=words):
        write_package(Package(name, **options), tmp_path / "a", EMPTY)
    assert list(tmp_path.iterdir()) == []


def test_an_installed_plugin_keeps_its_name(tmp_path: Path):
    with pytest.raises(NameConflict, match="taken by the installed opweave-cpu"):
        write_package(Package("cpu"), tmp_path / "a", Registry(environ={}))


def test_a_folder_with_files_stays_as_it_is(tmp_path: Path):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(PathError, match="is there already"):
        write_package(Package("acme"), tmp_path, EMPTY)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]
