"""A release: one version everywhere, and a section of the changelog made of the fragments in ``news/``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[3]
KINDS = {"added", "changed", "fixed", "authors"}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_script(".ci/release.py")


@pytest.fixture
def copy(tmp_path: Path, release: ModuleType) -> Path:
    samples = release.matching(ROOT, release.SAMPLES)
    for path in [*release.versioned(ROOT), *samples, ROOT / "CHANGELOG.md", ROOT / "pyproject.toml"]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (tmp_path / "news").mkdir()
    return tmp_path


def test_all_packages_have_the_version_of_the_newest_section(release: ModuleType):
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert release.wrong_versions(ROOT, newest[1]) == []
    assert len(release.versioned(ROOT)) > 12


def test_a_release_writes_one_version_and_the_ranges_of_it(release: ModuleType, copy: Path):
    release.write_versions(copy, "0.2.1")
    assert release.wrong_versions(copy, "0.2.1") == ["CHANGELOG.md: no section of 0.2.1"]
    for path in copy.rglob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        extras = [need for needs in project.get("optional-dependencies", {}).values() for need in needs]
        ours = [need for need in [*project.get("dependencies", ()), *extras] if re.match(r"opweave(-\w+)?>=", need)]
        assert all(need.endswith(">=0.2,<0.3") for need in ours), path
        assert ours or path == copy / "pyproject.toml", path
    assert '"opweave>=0.2,<0.3"' in (copy / "docs/backend/package.md").read_text(encoding="utf-8")


def test_fragments_become_a_section_and_are_gone(release: ModuleType, copy: Path):
    pytest.importorskip("towncrier")
    (copy / "news/+door.added.md").write_text("Doors open.\n")
    (copy / "news/+hinge.authors.md").write_text("Override\n`_hinge`.\n")
    news = release.news_of(copy, "0.3.0")
    assert news == "### Added\n\n- Doors open.\n\n### For authors of backends\n\n- Override\n  `_hinge`."
    assert list((copy / "news").iterdir()) == []
    page = "# Changelog\n\nWords.\n\n## 0.2.0 - 2026-12-01\n\n- Old.\n"
    made = release.with_news(page, "0.3.0", news, "2027-01-01")
    assert made == f"# Changelog\n\nWords.\n\n## 0.3.0 - 2027-01-01\n\n{news}\n\n## 0.2.0 - 2026-12-01\n\n- Old.\n"
    assert release.section(made, "0.3.0") == news + "\n"
    assert release.section(made, "0.4.0") == ""


def test_a_section_that_is_to_come_is_completed(release: ModuleType):
    page = "# Changelog\n\n## 0.2.0 - to come\n\n### Graphs\n\n- New.\n\n## 0.1.0 - 2026-01-01\n\n- Old.\n"
    assert release.with_news(page, "0.2.0", "### Fixed\n\n- It.", "2027-01-01") == (
        "# Changelog\n\n## 0.2.0 - 2027-01-01\n\n### Graphs\n\n- New.\n\n### Fixed\n\n- It.\n\n"
        "## 0.1.0 - 2026-01-01\n\n- Old.\n"
    )
    assert release.with_news(page, "0.2.0", "", "2027-01-01") == page.replace("to come", "2027-01-01")


@pytest.mark.parametrize("version", ["1", "v0.2.0", "0.2.0.dev5"])
def test_what_is_no_version_of_a_release_is_refused(version: str):
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/release.py", version], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "invalid" in done.stderr


def test_fragments_have_a_kind_and_say_something():
    kinds = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]["type"]
    assert {kind["directory"] for kind in kinds} == KINDS
    for path in (ROOT / "news").iterdir():
        if path.name != "README.md":
            assert re.fullmatch(rf"\+[\w-]+\.({'|'.join(KINDS)})\.md", path.name), path.name
            assert len(path.read_text(encoding="utf-8").split()) >= 4, path.name


def test_the_changelog_can_be_read():
    """By a person: a section has at most 120 lines, and no heading twice."""
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    for text in sections:
        assert text.count("\n") <= 120, text.partition("\n")[0]
        headings = re.findall(r"^### .*$", text, re.MULTILINE)
        assert len(headings) == len(set(headings))
