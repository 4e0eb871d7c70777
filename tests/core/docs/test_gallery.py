"""The notebooks of the gallery run, and print what they show.

After a change, ``jupyter execute --inplace docs/gallery/*.ipynb`` writes what they show anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "docs/gallery").glob("*.ipynb"))
# In a process of its own: the settings of pytest make errors of the warnings of Jupyter's packages.
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=150).execute()
nbformat.write(notebook, sys.argv[2])
"""


def outputs(notebook: dict[str, Any]) -> list[list[str]]:
    """Of each cell what it printed, and of what kind it showed something."""
    found = []
    for cell in notebook["cells"]:
        given = cell.get("outputs", [])
        printed = "".join("".join(output["text"]) for output in given if output["output_type"] == "stream")
        found.append([printed, *(kind for output in given for kind in sorted(output.get("data", {})))])
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path: Path, tmp_path: Path):
    made = tmp_path / path.name
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(path), str(made)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert outputs(json.loads(made.read_text())) == outputs(json.loads(path.read_text(encoding="utf-8")))


def test_every_notebook_is_on_the_page_of_the_gallery():
    page = (ROOT / "docs/gallery/index.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 3
    assert [path.name for path in NOTEBOOKS if f"]({path.name})" not in page] == []
