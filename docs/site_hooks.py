"""Hooks of mkdocs: pages that lie elsewhere in the repository, notebooks as pages, links that lead out of ``docs/``.

Pages in ``docs/`` link to files of the repository, as they are read there too. On the site the README of a package, the
changelog and the like are pages, notebooks are pages with their outputs, and sources are shown as plain text.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
LINK: Final = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
SOURCE: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<h1>{title}</h1><pre>{text}</pre></html>
"""


def elsewhere() -> dict[str, str]:
    """Page of the site -> file of the repository outside of ``docs/``, or notebook in it, that it is made of."""
    pages = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    for readme in sorted(
        [*ROOT.glob("*/README.md"), *ROOT.glob("plugins/*/README.md"), *ROOT.glob("frontends/*/README.md")]
    ):
        if (readme.parent / "pyproject.toml").is_file():
            pages[f"packages/{readme.parent.name}.md"] = readme.relative_to(ROOT).as_posix()
    for notebook in sorted((ROOT / "docs/gallery").glob("*.ipynb")):
        pages[f"gallery/{notebook.stem}.md"] = notebook.relative_to(ROOT).as_posix()
    return pages


PAGES: Final = elsewhere()
HOMES: Final = {source: page for page, source in PAGES.items()} | {"README.md": "index.md"}


def origin(uri: str) -> str:
    """The file of the repository that a page of the site is made of."""
    return PAGES.get(uri, f"docs/{uri}")


def home(path: str) -> str:
    """Where a file or folder of the repository is on the site; for pages, their source in ``docs/``."""
    if path in HOMES:
        return HOMES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}/index.html" if (ROOT / path).is_dir() else f"source/{path}.html"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies elsewhere: pages, and the sources that pages link to."""
    for uri, path in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(
            File.generated(config, uri, content=as_page(json.loads(text)) if path.endswith(".ipynb") else text)
        )
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked.update(
            target for target in targets(file.content_string, file.src_uri) if home(target).startswith("source/")
        )
    for target in sorted(linked):
        files.append(File.generated(config, home(target), content=source_page(target)))
    return files


def targets(markdown: str, uri: str) -> set[str]:
    """The files of the repository that a page links to."""
    found = set()
    for part in FENCE.split(markdown)[::2]:
        for _, target, _ in LINK.findall(part):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(origin(uri)), target))
            if target and "://" not in target and not target.startswith("mailto:") and (ROOT / path).exists():
                found.add(path)
    return found


def source_page(path: str) -> str:
    """A file as plain text, a folder as the list of what is in it."""
    place = ROOT / path
    text = "\n".join(sorted(os.listdir(place))) if place.is_dir() else place.read_text(encoding="utf-8")
    return SOURCE.format(title=escape(path), text=escape(text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them."""
    uri = page.file.src_uri
    before = posixpath.dirname(origin(uri))

    def moved(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(before, target))
        if not target or "://" in target or target.startswith("mailto:") or not (ROOT / path).exists():
            return match[0]
        return f"{text}({posixpath.relpath(home(path), posixpath.dirname(uri) or '.')}{anchor})"

    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(moved, part) for i, part in enumerate(parts))


def as_page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: text, code, and what it printed or showed."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        parts += [shown(output) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def shown(output: dict[str, Any]) -> str:
    """An output of a cell: a picture or a table as it is, else its text."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return "".join(data["image/svg+xml"])
    if "text/html" in data:
        page = escape("".join(data["text/html"]), quote=True)
        return f'<iframe class="output" title="output of the cell above" srcdoc="{page}"></iframe>'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
