"""Writes ``docs/names.md``: the public names of `opweave` by group, each with the first sentence of its docstring.

Run it after a public name was added or its docstring changed: ``python docs/generate_names.py``.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Final

import opweave
from opweave.names import GROUPS

PAGE: Final = Path(__file__).with_name("names.md")

HEAD: Final = """\
# Names

<!-- Written by docs/generate_names.py: change the docstrings, not this page. -->

What `import opweave as ow` gives, by what it is for. The operations have [a page of their own](operations.md). Whole
docstrings, with shapes, types and errors, are shown by `help(ow.Scheduler)` and the like; how things work together is
in the [guide](guide.md).
"""


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring on one line; of a table, what it has."""
    if isinstance(value, dict):
        return f"Name -> `{type(next(iter(value.values()))).__name__}`, {len(value)} of them."
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    end = re.search(r"\.( (?=[A-Z])|$)", text)
    return (text[: end.start()] if end else text.rstrip(":")) + "."


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for group, names in GROUPS.items():
        lines += [f"## {group}", "", "| name | what it is |", "| --- | --- |"]
        for name in names:
            text = first_sentence(getattr(opweave, name)).replace("``", "`").replace("|", "\\|")
            lines.append(f"| `ow.{name}` | {text} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
