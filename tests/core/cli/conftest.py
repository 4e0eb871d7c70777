"""The command in this process, on plugins of a test's own."""

from __future__ import annotations

import json
import sys

import pytest

from opweave import registry
from opweave.cli import main, probe
from tests.support.plugins_for_tests import PluginFolder


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        yield folder


def in_this_process(question, options, excluded, seconds, only="", quiet=False):
    """The answer of a child process, made here, where the plugins of a test are."""
    return json.loads(json.dumps(probe.collect(question, options, excluded)))


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """``run("devices", "--json")`` gives exit code, standard output, standard error, on the plugins in ``folder``."""

    def run(*arguments: str, columns: int = 80, **environ: str) -> tuple[int, str, str]:
        monkeypatch.setattr(registry, "REGISTRY", folder.registry(**environ))
        monkeypatch.setattr(probe, "_in_child", in_this_process)
        monkeypatch.setattr(sys, "argv", ["opweave", *arguments])
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else int(code is not None)), out, err

    return run
