"""Variants of one backend: each says a score, the best that works is taken, the others are shown with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from opweave.errors import Unavailable
from opweave.registry import PluginRecord, Registry, State
from tests.support.plugins_for_tests import PluginFolder, backend


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PluginFolder]:
    with PluginFolder(tmp_path / "plugins") as made:
        yield made


def scored(score: str, body: str = "pass", description: str = "") -> str:
    attributes = f"""priority = 0

            @classmethod
            def score(cls):
                return {score}
"""
    return backend(f"[Unit(description={description!r})]", body=body, attributes=attributes)


def add(folder: PluginFolder, variant: str, score: str, body: str = "pass") -> None:
    folder.add(f"acme_{variant}", scored(score, body, variant), entry=f"acme@{variant}")


def records(registry: Registry) -> dict[str, PluginRecord]:
    return {record.variant: record for record in registry.load_all() if record.name == "acme"}


def test_the_best_is_taken_and_the_others_are_shown(folder: PluginFolder) -> None:
    add(folder, "old", "1")
    add(folder, "new", "3.5")
    add(folder, "never", "0")
    registry = folder.registry()
    assert registry.device("acme").description == "new"
    found = records(registry)
    assert found["new"].state is State.READY
    assert found["new"].devices == ("acme",)
    assert found["old"].state is State.DISABLED
    assert "variant new of acme is taken, with score 3.5; this one has 1" in found["old"].error
    assert "OPWEAVE_VARIANTS=acme=old" in found["old"].remedy
    assert found["never"].state is State.UNAVAILABLE
    assert "score is 0" in found["never"].error


def test_equal_scores_are_taken_by_name(folder: PluginFolder) -> None:
    add(folder, "b", "2")
    add(folder, "a", "2")
    assert folder.registry().device("acme").description == "a"


@pytest.mark.parametrize("body", ["raise Unavailable('no driver')", "raise OSError('no library')"])
def test_the_next_best_is_taken_where_the_best_does_not_work(folder: PluginFolder, body: str) -> None:
    add(folder, "best", "9", body)
    add(folder, "next", "5")
    registry = folder.registry()
    assert registry.device("acme").description == "next"
    found = records(registry)
    assert found["best"].state in (State.UNAVAILABLE, State.BROKEN)
    assert found["next"].state is State.READY
    assert registry.load("acme").variant == "next"


def test_one_can_be_forced(folder: PluginFolder) -> None:
    add(folder, "old", "0")
    add(folder, "new", "3")
    registry = folder.registry(OPWEAVE_VARIANTS="other=x, ACME=Old")
    assert registry.device("acme").description == "old"
    found = records(registry)
    assert found["new"].state is State.DISABLED
    assert "OPWEAVE_VARIANTS takes the variant Old" in found["new"].error


def test_one_that_is_not_there_cannot(folder: PluginFolder) -> None:
    add(folder, "old", "1")
    with pytest.raises(Unavailable, match=r"variant 'newer' of acme, which is not installed[\s\S]*old"):
        folder.registry(OPWEAVE_VARIANTS="acme=newer").device("acme")


@pytest.mark.parametrize("score", ["-1", "'high'", "float('nan')", "True", "1 / 0"])
def test_a_wrong_score_is_the_variant_s_failure_only(folder: PluginFolder, score: str) -> None:
    add(folder, "wrong", score)
    add(folder, "right", "1")
    registry = folder.registry()
    assert registry.device("acme").description == "right"
    assert records(registry)["wrong"].state is State.BROKEN


def test_modules_with_hooks_say_their_score_by_a_function(folder: PluginFolder) -> None:
    for name, score in (("low", 1), ("high", 2)):
        extra = f"""
            @hookimpl
            def opweave_backends():
                return [Acme()]

            @hookimpl
            def opweave_score():
                return {score}
        """
        folder.add(f"acme_{name}", backend(f"[Unit(description={name!r})]", extra=extra), entry=f"acme@{name}",
                   value=f"opweave_acme_{name}")  # fmt: skip
    registry = folder.registry()
    assert registry.device("acme").description == "high"
    assert [b.name for b in registry.backends() if b.name != "host"] == ["acme"]


def test_a_plugin_without_variants_conflicts_with_variants(folder: PluginFolder) -> None:
    add(folder, "new", "3")
    folder.add("acme", backend())
    found = {r.variant: r for r in folder.registry().load_all() if r.name == "acme"}
    assert found["new"].state is State.BROKEN
    assert "both claim the name" in found["new"].error
