"""Checks that every link of the built site leads somewhere: ``python docs/check_site.py site``.

`mkdocs build --strict` checks the links of pages; this checks what was built, docstrings, notebooks and sources too.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Where a page links to, and what in it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links.update(value for name in ("href", "src") if (value := given.get(name)))
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))


def broken_links(site: Path) -> list[str]:
    """The links that lead nowhere, one line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of the server
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            lost = anchor and target in pages and anchor not in pages[target].anchors
            if not target.is_file() or lost:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(found))
    sys.exit(f"{len(found)} broken links" if found else None)
