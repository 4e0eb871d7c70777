"""`Report`: a text that is also a page, one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opweave.units import human_bytes, human_time

if TYPE_CHECKING:
    from os import PathLike


__all__ = ["COLOURS", "MOST_NODES", "Report", "render"]

COLOURS: Final = ("#3b76b5", "#d9822b", "#4a9a57", "#8a63b8", "#c0504d", "#3f9ea3", "#9a7b4f", "#6b7280")
"""One for each device, in order of priority; there may be more devices than colours."""


MOST_NODES: Final = 5_000
"""Nodes beyond this many are counted and not shown: browsers get slow."""


def render(template: Path, **values: Any) -> str:
    """A page from a template. ``base.html.j2`` of this folder is what all have in common."""
    # Local: importing opweave must not pay for it.
    from jinja2 import Environment, FileSystemLoader

    folders = FileSystemLoader([template.parent, Path(__file__).parent])
    environment = Environment(loader=folders, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["bytes"] = human_bytes
    environment.filters["time"] = human_time
    return environment.get_template(template.name).render(values)


class Report:
    """What a report has: a text, which printing shows and in which ``in`` looks for words, and a page."""

    __slots__ = ()

    if TYPE_CHECKING:  # a data class would take the property for the default of its field

        @property
        def text(self) -> str:
            """The whole report, as people read it."""

    def html(self) -> str:
        """One self-contained HTML page."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __contains__(self, words: str) -> bool:
        return words in self.text

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html())

    def _repr_html_(self) -> str:
        """What notebooks show: the page in a frame, so that its styles stay its own."""
        source = escape(self.html(), quote=True)
        return f'<iframe srcdoc="{source}" style="width: 100%; height: 40em; border: 1px solid #ccc"></iframe>'
