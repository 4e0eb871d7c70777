"""What `opweave conformance` prints while it runs, where standard error is no terminal."""

from __future__ import annotations

from typing import Any

from opweave_conformance import command
from opweave_conformance.result import Result


class Check:
    def __init__(self, name: str, status: Any) -> None:
        self.name, self.status = name, status


class Run:
    """A suite whose checks have results already."""

    name = "acme"
    items = (Check("add-f32-1", "passed"), Check("add-f32-7", "failed"), Check("mul-f32-1", "passed"))

    def perform(self, item: Check) -> Any:
        return Result(item.status, "it is off by 3\nat [0]", name=item.name)


def test_progress_and_failures_are_lines(monkeypatch, capsys):
    monkeypatch.setattr(command, "EVERY", 0.0)
    command._perform(Run(), quiet=False)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert not out
    first, failed, second = err.splitlines()
    assert first.startswith("acme: 1 of 3 checks, 0 failed, ")
    assert first.endswith(", at add-f32-1")
    assert failed == "failed: add-f32-7: it is off by 3"
    assert second.startswith("acme: 2 of 3 checks, 1 failed, ")


def test_a_document_is_alone(monkeypatch, capsys):
    monkeypatch.setattr(command, "EVERY", 0.0)
    command._perform(Run(), quiet=True)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")
