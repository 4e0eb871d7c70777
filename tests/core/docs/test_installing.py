"""Installing: the extras of the core, and what pip says at the root of the repository."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def settings(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_plugin_is_an_extra_of_the_core_in_a_version_that_fits():
    from packaging.requirements import Requirement

    extras = settings("core")["project"]["optional-dependencies"]
    folders = [path.parent for kind in ("frontends", "plugins") for path in (ROOT / kind).glob("*/pyproject.toml")]
    folders.append(ROOT / "models")
    plugins = {folder.name for folder in folders}
    assert set(extras) == plugins | {"training", "all"}
    for folder in folders:
        name, project = folder.name, settings(str(folder.relative_to(ROOT)))["project"]
        (needed,) = map(Requirement, extras[name])
        assert needed.name == project["name"]
        assert project["version"] in needed.specifier
    (everything,) = map(Requirement, extras["all"])
    assert (everything.name, everything.extras) == ("opweave", plugins | {"training"})


def test_every_package_says_where_it_is_published():
    folders = [ROOT / "core", *(path.parent for path in ROOT.glob("*/*/pyproject.toml"))]
    assert len(folders) > 7
    for folder in folders:
        project = settings(str(folder.relative_to(ROOT)))["project"]
        assert project["urls"]["Homepage"] == f"https://pypi.org/project/{project['name']}/"


@pytest.mark.parametrize(
    "call", ["build_wheel", "build_sdist", "build_editable", "get_requires_for_build_wheel"]
)  # what pip calls, with and without -e
def test_the_root_says_what_to_install_instead(call: str):
    system = settings(".")["build-system"]
    assert not system["requires"], "it needs no network to say so"
    (folder,) = system["backend-path"]
    code = f"import {system['build-backend']} as backend; backend.{call}('x', config_settings=None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install ./core ./plugins/cpu" in done.stderr
    for plugin in (ROOT / "plugins").iterdir():
        assert f"./plugins/{plugin.name}" in done.stderr
