"""Whether files can be written, asked before the work whose result they are to hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from opweave.cli.options import Html, writable_folder
from opweave.errors import PathError
from opweave.tools.writable import check_folder, check_writable


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a file, ``file``; paths that start with ``locked`` are ones whose owner allows nobody to write."""
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked.html").write_text("")
    allowed = os.access  # which allows root everything

    def access(path, mode):
        return "locked" not in os.path.relpath(path, tmp_path) and allowed(path, mode)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = {
    "missing/x.html": "there is no folder missing",
    "file/x.html": "there is no folder file",
    ".": "it is a folder",
    "locked/x.html": "permission denied",
    "locked.html": "permission denied",
    "file": "",
    "new.html": "",
}
FOLDERS = {
    "file": "file is a file",
    "file/deep/er": "file is a file",
    "locked": "permission denied by locked",
    "locked/deep/er": "permission denied by locked",
    ".": "",
    "new/deep/er": "",
}
CASES = [(check_writable, *case) for case in FILES.items()] + [(check_folder, *case) for case in FOLDERS.items()]


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(("check", "path", "says"), CASES)
def test_what_cannot_be_written_is_refused_and_nothing_is_made(here, check, path, says, absolute):
    before = sorted(here.rglob("*"))
    asked = here / path if absolute else Path(path)
    if says:
        with pytest.raises(PathError, match=says.rpartition(" ")[0]):
            check(asked)
    else:
        check(asked)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(("option", "cases"), [("--html", FILES), ("--out", FOLDERS)])
def test_an_option_that_cannot_be_written_is_a_wrong_call_and_the_command_does_not_start(here, option, cases):
    app, started = typer.Typer(), []

    @app.command()
    def work(
        html: Html = None, out: Annotated[Path | None, typer.Option(readable=False, callback=writable_folder)] = None
    ) -> None:
        started.append(html or out)

    for path, says in cases.items():
        started.clear()
        done = CliRunner().invoke(app, [option, path])
        assert (done.exit_code, started) == ((2, []) if says else (0, [Path(path)])), path
        assert says in " ".join(done.output.replace("│", "").split())
    assert CliRunner().invoke(app, []).exit_code == 0
