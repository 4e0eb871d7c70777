"""The public names by group, and the page that shows them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import opweave
from opweave import ops
from opweave.names import GROUPS
from tests.support.scripts import load_script

DOCS = Path(__file__).parents[3] / "docs"


def test_each_public_name_is_an_operation_or_in_one_group():
    counts = Counter(name for names in GROUPS.values() for name in names)
    assert not [name for name, count in counts.items() if count > 1]
    public = vars(opweave)["__all__"]
    assert sorted([*counts, *vars(ops)["__all__"]]) == sorted(public)
    assert [group for group, names in GROUPS.items() if list(names) != sorted(names, key=order)] == []


def order(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


def test_the_page_shows_them_with_their_docstrings():
    generator = load_script("docs/generate_names.py")
    assert generator.render() == (DOCS / "names.md").read_text(encoding="utf-8"), "run python docs/generate_names.py"
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (DOCS / "reference").iterdir()}
    assert generator.reference() == pages, "run python docs/generate_names.py"
