"""The site: links that lead out of ``docs/`` lead to pages of it, and links of what was built are followed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load_script("docs/site_hooks.py")


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("guide/running.md", "explain.md", "explain.md"),
        ("guide/saving.md", "../../plugins/torch/README.md#fast", "../packages/torch.md#fast"),
        ("packages/torch.md", "../../docs/support.md", "../support.md"),
        ("operations.md", "../core/src/opweave/ops/matmul.py", "source/core/src/opweave/ops/matmul.py.html"),
        ("changelog.md", "news", "source/news/index.html"),
        ("gallery/index.md", "precision.ipynb", "precision.md"),
        ("index.md", "https://pypi.org", "https://pypi.org"),
        ("index.md", "#here", "#here"),
    ],
)
def test_links_of_a_page_are_those_of_the_site(hooks: ModuleType, page: str, link: str, there: str):
    given = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    text = f"See [it]({link}).\n\n```text\n[it]({link})\n```\n"
    moved = hooks.on_page_markdown(text, given, None, None)
    assert moved == f"See [it]({there}).\n\n```text\n[it]({link})\n```\n"


def test_a_notebook_is_a_page_with_what_it_showed(hooks: ModuleType):
    outputs = [
        {"output_type": "stream", "text": ["one\n", "two\n"]},
        {"output_type": "execute_result", "data": {"text/html": ['<b title="x">'], "text/plain": ["<b>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
    ]
    page = hooks.as_page({"cells": cells})
    assert page.startswith("# Title\n\n```python\nprint(1)\n```\n\n```text\none\ntwo\n```\n\n<iframe ")
    assert 'srcdoc="&lt;b title=&quot;x&quot;&gt;"' in page


def test_links_that_lead_nowhere_are_found(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/index.html").write_text('<h1 id="top">x</h1><a href="../">up</a><a href="#bottom">down</a>')
    (tmp_path / "index.html").write_text(
        '<a href="there/#top">1</a><a href="there/#lost">2</a><a href="gone/">3</a><img src="no.png">'
        '<a href="https://pypi.org/x">4</a>'
    )
    assert sorted(load_script("docs/check_site.py").broken_links(tmp_path)) == [
        "index.html: gone/", "index.html: no.png", "index.html: there/#lost", "there/index.html: #bottom"
    ]  # fmt: skip
