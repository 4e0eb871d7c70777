"""Every Python block in the documentation runs, and prints what the page says it prints.

The blocks of a page run one after the other in one fresh process, as a reader would type them; those of a page in which
a reader lands on any section, section by section, each in a process of its own. A block with a file's name for title is
that file, which the blocks of all pages in its folder find. A block of ``text`` right after one of ``python`` is what
it prints, where ``...`` stands for anything. Where there is no OpenCL device, a block that names one is left out, with
all that follow in its process.
"""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
BY_SECTION = ("docs/guide/", "docs/start/")
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,3} (.*)$", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# As in the settings of pytest: warnings are errors, but for remarks of the OpenCL compiler.
REMARKS = ["Non-empty compiler output encountered", "From-source build succeeded"]
WARNINGS = ["-Werror", *(f"-Wignore:{remark}" for remark in REMARKS)]

# Runs the blocks that come in as JSON, each compiled as if it stood alone in its page, so that lines are the page's.
RUNNER = """
import contextlib, io, json, pathlib, sys, traceback
page, blocks, files = json.load(sys.stdin)
for name, code in files.items():
    pathlib.Path(name).write_text(code, encoding="utf-8")
results, names = [], {"__name__": "__main__"}
for line, code in blocks:
    out, error = io.StringIO(), ""
    try:
        if '"opencl' in code:
            import opweave
            try:
                opweave.device("opencl")
            except opweave.OpweaveError as missing:
                results.append([f"{type(missing).__name__}: {missing}", "skip"])
                break
        with contextlib.redirect_stdout(out):
            exec(compile("\\n" * line + code, page, "exec"), names)
    except Exception:
        error = traceback.format_exc()
    results.append([out.getvalue(), error])
    if error:
        break
json.dump(results, sys.stdout)
"""


class Block(NamedTuple):
    """A block of code: ``section`` is the part of the page whose blocks run together, ``line`` is that of its fence,
    ``file`` the name of the file that it is, if it is one, ``expected`` what the page says it prints."""

    page: str
    section: str
    line: int
    code: str
    file: str
    expected: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Block] = []
    end = -1
    for match in FENCE.finditer(text):
        language, title, body = match.groups()
        if language == "python":
            headings = HEADING.findall(FENCE.sub("", text[: match.start()])) if page.startswith(BY_SECTION) else []
            section = headings[-1] if headings else ""
            found.append(Block(page, section, text.count("\n", 0, match.start()) + 1, body, title or "", None))
        elif language == "text" and found and end >= 0 and not text[end : match.start()].strip():
            found[-1] = found[-1]._replace(expected=body)
        end = match.end() if language == "python" else -1
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@cache
def results(page: str, section: str) -> list[list[str]]:
    """For each block of a section that was reached: what it printed, and how it failed."""
    folder_of = Path(page).parent
    files = {b.file: b.code for b in BLOCKS if b.file and Path(b.page).parent == folder_of}
    todo = json.dumps([page, [(b.line, b.code) for b in BLOCKS if (b.page, b.section) == (page, section)], files])
    command = [sys.executable, *WARNINGS, "-c", RUNNER]
    with tempfile.TemporaryDirectory() as folder:  # pages may write files
        ran = subprocess.run(command, input=todo, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(block: Block):
    pytest.importorskip("opweave_cpu", reason="the examples run on the CPU backend")
    index = [b for b in BLOCKS if (b.page, b.section) == (block.page, block.section)].index(block)
    reached = results(block.page, block.section)
    if reached[-1][1] == "skip" and index >= len(reached) - 1:
        pytest.skip(reached[-1][0])
    assert index < len(reached), "a block before it failed"
    printed, error = reached[index]
    assert not error, error
    if block.expected is not None:
        same = doctest.OutputChecker().check_output(block.expected, printed, FLAGS)
        assert same, f"{block} says it prints\n{block.expected}\nbut it prints\n{printed}"


def test_there_is_something_to_run():
    pages = {block.page for block in BLOCKS}
    assert {"README.md", "docs/guide/running.md", "docs/backend/first-device.md", "docs/start/index.md"} <= pages


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in t]
    missing = [t for t in targets if not ((ROOT / page).parent / t).exists()]
    assert not missing


def test_the_package_of_an_author_is_built_as_our_own_are():
    page = (ROOT / "docs" / "backend" / "package.md").read_text()
    (sample,) = (tomllib.loads(body) for kind, _, body in FENCE.findall(page) if kind == "toml" and "[project]" in body)
    own = tomllib.loads((ROOT / "plugins" / "cpu" / "pyproject.toml").read_text())
    assert sample["build-system"] == own["build-system"]
    assert sample["project"]["requires-python"] == own["project"]["requires-python"]
    assert set(sample["project"]["dependencies"]) <= set(own["project"]["dependencies"])
    assert {"name", "version", "entry-points"} <= set(sample["project"])


def test_pictures_are_made_by_the_script_and_shown_on_a_page():
    made = set(re.findall(r"^def (\w+)\(page: Path\)", (ROOT / "docs/generate_pictures.py").read_text(), re.MULTILINE))
    pictures = {path.stem for path in (ROOT / "docs/pictures").iterdir()}
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    shown = set(re.findall(r"!\[[^\]]+\]\((?:docs/|\.\./)?pictures/(\w+)\.png\)", pages))
    assert made == pictures == shown


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the forges make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def has_section(page: Path, anchor: str) -> bool:
    """Whether a page has a heading of that name, or shows an object or its members, which the site's build checks."""
    shown = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in anchors(page) or any(f"{anchor}.".startswith(f"{name}.") for name in shown)


@pytest.mark.parametrize("page", [*PAGES, *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/*/README.md"))])
def test_links_to_sections_lead_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [(t, a) for t, a in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text) if "://" not in t]
    missing = [(t, a) for t, a in links if not has_section((ROOT / page).parent / t if t else ROOT / page, a)]
    assert not missing
