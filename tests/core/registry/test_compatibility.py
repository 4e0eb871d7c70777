"""A plugin that was made for another version of the contract is incompatible: by its requirement before it is imported,
by the hooks that it overrides when it is registered."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.version import Version

from opweave.contract import VERSION, Backend, BufferType
from opweave.contract import version as changes
from opweave.contract.kernels import KernelTable
from opweave.contract.version import RELEASES, ChangedHook
from opweave.errors import Incompatible
from opweave.registry import Registry, State, compatibility
from opweave.registry.compatibility import why_incompatible
from opweave.runtime.host.memory import HostMemory
from opweave.runtime.stream import Stream
from tests.support.plugins_for_tests import PluginFolder, backend, by_name


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        yield folder


class TestIncompatible:
    def test_is_read_from_the_requirement_before_import(self, folder):
        folder.add("future", "raise SystemExit('imported')", requires=("opweave>=7,<8",))
        registry = folder.registry()
        record = by_name(registry.load_all())["future"]
        assert record.state is State.INCOMPATIBLE
        assert "opweave<8,>=7" in record.error
        assert "pip install --upgrade opweave-future" in record.remedy
        assert not folder.imported()
        with pytest.raises(Incompatible, match="opweave-future") as caught:
            registry.device("future:0")
        assert (caught.value.plugin, caught.value.distribution, caught.value.version) == (
            "future", "opweave-future", "1.0"
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("requires", "version", "fits"),
        [
            (["opweave>=0.1,<0.2"], "0.1.7", True),
            (["opweave>=0.1,<0.2"], "0.2.0", False),
            (["opweave>=0.1"], "0.2.0.dev3", True),
            (["OPWEAVE ~= 0.3"], "0.2.0", False),
            (["opweave>=9; extra == 'later'"], "0.1.0", True),
            (["opweave>=9; python_version < '3'"], "0.1.0", True),
            (["numpy>=9", "???"], "0.1.0", True),
            ([], "0.1.0", True),
            (["opweave>=9"], None, True),
        ],
    )
    def test_by_the_rules_of_version_specifiers(self, requires, version, fits):
        assert (why_incompatible("x", requires, version) is None) == fits


def test_each_version_of_the_contract_has_its_first_release_and_the_last_is_this_one():
    assert list(RELEASES) == list(range(1, VERSION + 1))
    releases = [Version(release) for release in RELEASES.values()]
    assert releases == sorted(set(releases))
    core = tomllib.loads((Path(__file__).parents[3] / "core/pyproject.toml").read_text(encoding="utf-8"))
    assert releases[-1] <= Version(core["project"]["version"])


@pytest.mark.parametrize(
    ("requires", "made_for"),
    [
        ("opweave>=0.1", 1),  # no upper bound: made for the contract of its lower bound
        ("opweave>=0.1,!=0.1.3", 1),
        ("opweave>0.3", 1),
        ("opweave>=0.4", 2),
        ("opweave>=0.5", 2),
        ("opweave>=0.1,<0.6", 2),  # it says itself where it ends
        ("opweave==0.5.*", 2),
        ("opweave", 2),  # it says nothing
    ],
)
def test_a_requirement_without_an_upper_bound_means_the_contract_of_its_lower_bound(monkeypatch, requires, made_for):
    monkeypatch.setattr(compatibility, "RELEASES", {1: "0.1", 2: "0.4"})
    monkeypatch.setattr(compatibility, "VERSION", 2)
    why = why_incompatible("opweave-acme", [requires], "0.5.0")
    if made_for == 2:
        assert why is None
    else:
        assert why is not None
        assert "version 1 of the contract for backends; opweave 0.5.0 has version 2" in why.message
        assert why.remedy == 'pip install --upgrade opweave-acme, or pip install "opweave<0.4"'


class Unit(HostMemory):
    kernels = KernelTable()


class Old(Unit):
    """A device whose stream overrides a hook that leaves the contract."""

    class Queue(Stream):
        def _joins(self, other):
            return True

    stream_class = Queue


class OldBackend(Backend):
    name = "old"

    def devices(self):
        return [Old()]


GOES = ChangedHook("Stream", "_joins", "override _inlines instead", "99.0")
GONE = GOES._replace(gone="0.1")


def test_a_hook_that_will_go_warns_once_with_the_release_and_what_to_override(monkeypatch):
    monkeypatch.setattr(changes, "CHANGED_HOOKS", (GOES,))
    monkeypatch.setattr(compatibility, "_told", set())
    message = "Old.Queue overrides Stream._joins, which opweave 99.0 will no longer call; override _inlines instead$"
    with pytest.warns(DeprecationWarning, match=message) as told:
        Registry().register(OldBackend)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Registry().register(OldBackend)


@pytest.mark.parametrize("owner", ["Backend", "Device", "BufferType"])
def test_hooks_of_every_class_that_authors_derive_from_are_seen(monkeypatch, owner):
    class Special(BufferType):
        def _old(self): ...

    class OldUnit(Unit):
        def _old(self): ...

        @property
        def buffer_types(self):
            return [Special(self)]

    class Family(Backend):
        name = "family"

        def devices(self):
            return [OldUnit()]

        def _old(self): ...

    monkeypatch.setattr(changes, "CHANGED_HOOKS", (ChangedHook(owner, "_old", "drop it", "99.0"),))
    with pytest.warns(DeprecationWarning, match=f"overrides {owner}._old, which opweave 99.0 will no longer call"):
        Registry().register(Family)


def test_a_hook_that_is_gone_makes_the_plugin_incompatible_with_a_remedy(monkeypatch, folder):
    monkeypatch.setattr(changes, "CHANGED_HOOKS", (ChangedHook("Device", "_probe", "override _try instead", "0.1"),))
    folder.add("acme", backend(extra="Unit._probe = lambda self: None"))
    folder.add("good")
    records = by_name(folder.registry().load_all())
    assert records["acme"].state is State.INCOMPATIBLE
    assert "Unit overrides Device._probe, which opweave does not call since 0.1" in records["acme"].error
    assert records["acme"].remedy == 'override _try instead, or pip install "opweave<0.1"'
    assert records["good"].state is State.READY
    monkeypatch.setattr(changes, "CHANGED_HOOKS", (GONE,))
    with pytest.raises(Incompatible, match="_joins"):
        Registry().register(OldBackend)


def test_what_overrides_nothing_that_changes_is_told_nothing(monkeypatch):
    monkeypatch.setattr(changes, "CHANGED_HOOKS", (GOES, GONE))

    class Young(Backend):
        name = "young"

        def devices(self):
            return [Unit()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Registry().register(Young).name == "young"
