"""The page on architecture names files that there are, and ten of them on a graph's way."""

from __future__ import annotations

import re
from pathlib import Path

import opweave

PAGE = (Path(__file__).parents[3] / "docs/architecture.md").read_text(encoding="utf-8")
PACKAGE = Path(opweave.__file__).parent


def test_the_way_of_a_graph_goes_through_at_most_ten_files_that_there_are():
    picture = PAGE.split("```")[1]
    files = re.findall(r"[\w/]+\.py$", picture, re.MULTILINE)
    assert 8 <= len(set(files)) <= 10
    assert [name for name in files if not (PACKAGE / "scheduler" / name).is_file()] == []


def test_every_other_file_that_is_named_is_there():
    text = "".join(PAGE.split("```")[::2])
    names = re.findall(r"`(?:opweave/)?(\w+/?\w+\.py)`", text)
    assert names
    folders = (PACKAGE, PACKAGE / "scheduler")
    assert [name for name in names if not any((folder / name).is_file() for folder in folders)] == []
