"""Prepares a release: one version in every package, and a section of the changelog made of ``news/``.

    python .ci/release.py 0.2.0           writes both; look at them, commit, and tag the commit v0.2.0
    python .ci/release.py 0.2.0 --check   exits with an error unless all packages, and the changelog, have that version
    python .ci/release.py 0.2.0 --notes   prints the section

The version stands in the packages and not in the tags alone: a clone has commits after a tag, and the versions that are
derived of those (0.2.1.dev5) are none that plugins which require `opweave>=0.2.1` accept.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = ["core/pyproject.toml", "frontends/*/pyproject.toml", "models/pyproject.toml", "plugins/*/pyproject.toml"]
SAMPLES = ["examples/backends/*/pyproject.toml", "docs/**/*.md"]  # packages of others, which require this version too
VERSION = re.compile(r'^(version|__version__) = "([^"]+)"$', re.MULTILINE)
RANGE = re.compile(r'(?<="opweave)([\w-]*)>=[\d.]+,<[\d.]+(?=")')


def versioned(root: Path) -> list[Path]:
    """The files with the version in a line of its own."""
    return [*matching(root, PROJECTS), root / "core/src/opweave/__init__.py"]


def matching(root: Path, patterns: list[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def write_versions(root: Path, version: str) -> None:
    """Write ``version`` into every package, and the range of its minor version into what they require of each other."""
    major, minor, *_ = version.split(".")
    bounds = rf"\1>={major}.{minor},<{major}.{int(minor) + 1}"
    for path in versioned(root):
        text = path.read_text(encoding="utf-8")
        path.write_text(VERSION.sub(rf'\1 = "{version}"', text, count=1), encoding="utf-8")
    for path in matching(root, [*PROJECTS, *SAMPLES]):
        path.write_text(RANGE.sub(bounds, path.read_text(encoding="utf-8")), encoding="utf-8")


def wrong_versions(root: Path, version: str) -> list[str]:
    """What does not have ``version``, one line each."""
    wrong = []
    for path in versioned(root):
        found = VERSION.search(path.read_text(encoding="utf-8"))
        if found is None or found[2] != version:
            wrong.append(f"{path.relative_to(root)}: {found[2] if found else 'no version'}")
    if not section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version):
        wrong.append(f"CHANGELOG.md: no section of {version}")
    return wrong


def section(page: str, version: str) -> str:
    """The changelog's section of a version without its heading, ``""`` if there is none."""
    found = re.search(rf"^## {re.escape(version)} [^\n]*\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return found[1].strip() + "\n" if found else ""


def with_news(page: str, version: str, news: str, today: str) -> str:
    """The changelog with the section of a release: what stood there as "to come", and ``news`` behind it."""
    heading = f"## {version} - {today}"
    open_section = re.search(rf"^## {re.escape(version)} - to come\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if open_section is None:
        before, rest = re.split(r"(?=^## )|\Z", page, maxsplit=1, flags=re.MULTILINE)
        return f"{before}{heading}\n\n{news.strip()}\n\n{rest}".rstrip() + "\n"
    text = f"{heading}\n{open_section[1].rstrip()}\n\n{news.strip()}".rstrip() + "\n\n"
    return (page[: open_section.start()] + text + page[open_section.end() :]).rstrip() + "\n"


def news_of(root: Path, version: str) -> str:
    """What towncrier makes of the fragments, without its heading; ``""`` if there are none."""
    fragments = sorted((root / "news").glob("+*.md"))
    if not fragments:
        return ""
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", version, "--dir", str(root)]
    draft = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for path in fragments:
        path.unlink()
    return draft.partition("\n")[2].strip()


def release(text: str) -> str:
    """The version of a release that an argument is; raises `ValueError` for versions of anything else."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", text):
        raise ValueError(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", type=release)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true")
    what.add_argument("--notes", action="store_true")
    given = parser.parse_args()
    changelog = ROOT / "CHANGELOG.md"
    page = changelog.read_text(encoding="utf-8")
    if given.check:
        sys.exit("\n".join(wrong_versions(ROOT, given.version)) or None)
    if given.notes:
        notes = section(page, given.version)
        print(notes, end="")
        sys.exit(None if notes else f"CHANGELOG.md has no section of {given.version}")
    write_versions(ROOT, given.version)
    news = news_of(ROOT, given.version)
    changelog.write_text(with_news(page, given.version, news, date.today().isoformat()), encoding="utf-8")


if __name__ == "__main__":
    main()
