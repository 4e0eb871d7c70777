"""What is known about plugins before any of them is imported, and what the environment selects."""

from __future__ import annotations

import os
import sys

import pytest

from opweave.errors import NameConflict, Unavailable, UnknownNameError
from opweave.registry import State
from opweave.registry.discovery import requirements
from tests.support.plugins_for_tests import PluginFolder, backend, by_name, write_distribution


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        yield folder


def test_without_plugins_there_is_the_host(folder):
    registry = folder.registry()
    (record,) = registry.plugins()
    assert (record.name, record.distribution, record.state) == ("host", "opweave", State.READY)
    assert [device.name for device in registry.devices()] == ["host"]
    assert registry.best_device() is registry.device("host")


def test_scanning_reads_metadata_and_imports_nothing(folder):
    folder.add("acme", "raise SystemExit('imported')", version="2.1")
    record = by_name(folder.registry().plugins())["acme"]
    assert record[:5] == ("acme", "opweave-acme", "2.1", State.DISCOVERED, "opweave_acme:Acme")
    assert record.devices == ()
    assert not folder.imported()


def test_records_are_sorted_and_the_host_is_last(folder):
    for name in ("zeta", "alpha"):
        folder.add(name)
    assert [r.name for r in folder.registry().plugins()] == ["alpha", "zeta", "host"]


def test_the_import_path_is_searched_and_a_distribution_counts_once(tmp_path, monkeypatch):
    from opweave.registry import Registry

    for place in ("first", "second"):
        write_distribution(tmp_path / place, "twicefound", version="1.0" if place == "first" else "0.9")
        monkeypatch.syspath_prepend(tmp_path / place)
    records = [r for r in Registry(environ={}).plugins() if r.name == "twicefound"]
    assert [r.version for r in records] == ["0.9"], "the one that an import would find"


def test_a_copy_of_another_version_in_a_named_folder_says_what_comes_before_it(folder, tmp_path):
    folder.add("acme")
    write_distribution(tmp_path / "more", "acme", version="2.0")
    write_distribution(tmp_path / "same", "acme", version="1.0")
    registry = folder.registry(OPWEAVE_BACKEND_PATH=os.pathsep.join([str(tmp_path / "same"), str(tmp_path / "more")]))
    first, second = [r for r in registry.plugins() if r.name == "acme"]
    assert (first.version, first.state) == ("1.0", State.DISCOVERED)
    assert (second.version, second.state) == ("2.0", State.DISABLED)
    assert "opweave-acme 1.0" in second.error
    assert registry.device("acme").name == "acme"


@pytest.mark.parametrize("entry_points", ["[opweave.backends]\nthis is no entry point\n", "[opweave.backends\nx = y:Z"])
def test_damaged_metadata_breaks_only_its_own_plugin(folder, entry_points):
    folder.add("good")
    folder.add("damaged", entry_points=entry_points)
    records = by_name(folder.registry().load_all())
    assert records["good"].state is State.READY
    damaged = [r for name, r in records.items() if name not in ("good", "host")]
    assert all(r.state is State.BROKEN and r.error and r.remedy for r in damaged)


def test_undecodable_metadata_of_others_is_no_matter(folder):
    folder.add("good")
    folder.add("bytes")
    (folder.path / "opweave_bytes-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[opweave.backends]")
    assert by_name(folder.registry().load_all())["good"].state is State.READY


@pytest.mark.parametrize("name", ["a:b", "a b", "a?b"])
def test_names_that_no_device_can_have_are_refused(folder, name):
    folder.add(
        "odd", value="opweave_odd:Acme", entry=None, entry_points=f"[opweave.backends]\n{name} = opweave_odd:Acme\n"
    )
    broken = [r for r in folder.registry().plugins() if r.name != "host"]
    assert [r.state for r in broken] == [State.BROKEN]
    assert "cannot be the name of a backend" in broken[0].error


def test_requirements_are_those_that_hold_here():
    lines = ["numpy", "ml-dtypes>=0.5", "???", "late>=2; extra == 'x'", "old; python_version < '3'"]
    assert [str(requirement) for requirement in requirements(lines)] == ["numpy", "ml-dtypes>=0.5"]


class TestConflicts:
    def test_two_that_claim_one_name_both_fail_naming_each_other(self, folder):
        folder.add("one", entry="Twin")
        folder.add("two", entry="twin")
        folder.add("third")
        registry = folder.registry()
        records = registry.load_all()
        twins = [r for r in records if r.name.lower() == "twin"]
        assert {r.distribution for r in twins} == {"opweave-one", "opweave-two"}
        for record in twins:
            assert record.state is State.BROKEN
            assert "opweave-one" in record.error
            assert "opweave-two" in record.error
        assert by_name(records)["third"].state is State.READY
        with pytest.raises(NameConflict, match="both claim"):
            registry.device("twin")
        assert not folder.imported() & {"opweave_one", "opweave_two"}

    def test_leaving_one_out_by_its_distribution_settles_it(self, folder):
        folder.add("one", entry="twin")
        folder.add("two", entry="twin")
        registry = folder.registry(OPWEAVE_DISABLE="opweave-one")
        assert registry.device("twin").name == "twin"
        assert {(r.distribution, r.state) for r in registry.plugins() if r.name == "twin"} == {
            ("opweave-one", State.DISABLED),
            ("opweave-two", State.READY),
        }

    def test_the_name_of_the_host_is_taken(self, folder):
        folder.add("mine", entry="host")
        registry = folder.registry()
        mine, host = registry.plugins()
        assert mine.state is State.BROKEN
        assert "opweave-mine" in mine.error
        assert host.state is State.READY
        assert registry.device("host").backend is registry.backend("host")


class TestSelection:
    def test_disable_excludes_before_import(self, folder):
        folder.add("acme", "raise SystemExit('imported')")
        folder.add("other")
        registry = folder.registry(OPWEAVE_DISABLE=" ACME , nosuch")
        records = by_name(registry.load_all())
        assert records["acme"].state is State.DISABLED
        assert "OPWEAVE_DISABLE" in records["acme"].error
        assert records["other"].state is State.READY
        assert "opweave_acme" not in folder.imported()
        with pytest.raises(Unavailable, match="disabled by OPWEAVE_DISABLE"):
            registry.device("acme")
        with pytest.raises(Unavailable, match="disabled by OPWEAVE_DISABLE"):
            registry.load("acme")

    def test_backends_selects_and_its_order_is_the_priority(self, folder):
        folder.add("gpu", backend("[Unit(kind=Kind.GPU)]", attributes="priority = 100"))
        folder.add("slow", backend("[Unit(kind=Kind.CPU)]"))
        folder.add("left", "raise SystemExit('imported')")
        registry = folder.registry(OPWEAVE_BACKENDS="SLOW, opweave-gpu")
        assert [d.name for d in registry.devices()] == ["slow", "gpu", "host"]
        assert [d.name for d in registry.default_devices()] == ["slow", "gpu", "host"]
        assert [b.name for b in registry.backends()] == ["slow", "gpu", "host"]
        assert registry.best_device().name == "gpu"
        assert by_name(registry.plugins())["left"].state is State.DISABLED
        assert "opweave_left" not in folder.imported()

    def test_the_host_may_be_put_first(self, folder):
        folder.add("acme")
        registry = folder.registry(OPWEAVE_BACKENDS="host,acme")
        assert [d.name for d in registry.devices()] == ["host", "acme"]

    def test_the_same_hardware_is_used_through_the_backend_listed_first(self, folder):
        folder.add("first", backend("[Unit(hardware_id='pci:1')]", attributes="priority = -5"))
        folder.add("second", backend("[Unit(kind=Kind.GPU, hardware_id='pci:1')]", attributes="priority = 5"))
        registry = folder.registry(OPWEAVE_BACKENDS="first,second")
        assert [d.name for d in registry.default_devices()] == ["first", "host"]

    def test_a_listed_name_that_nobody_has_is_an_error(self, folder):
        folder.add("acme")
        registry = folder.registry(OPWEAVE_BACKENDS="acme,acmee")
        with pytest.raises(UnknownNameError, match=r"'acmee'; did you mean 'acme'\?.*OPWEAVE_BACKENDS"):
            registry.devices()
        assert registry.device("acme").name == "acme", "what works can be used by name"

    def test_a_listed_plugin_that_fails_is_an_error_with_its_cause(self, folder):
        folder.add("boom", "1 / 0")
        folder.add("acme")
        registry = folder.registry(OPWEAVE_BACKENDS="boom,nosuch,acme")
        for ask in (registry.load_all, registry.devices, registry.best_device):
            with pytest.raises(Exception, match="ZeroDivisionError") as caught:
                ask()
            assert type(caught.value).__name__ == "Broken"
            assert any("nosuch" in note for note in caught.value.__notes__)
        assert by_name(registry.plugins())["acme"].state is State.READY

    def test_nothing_listed_is_no_selection(self, folder):
        folder.add("acme")
        registry = folder.registry(OPWEAVE_BACKENDS=" , ", OPWEAVE_DISABLE="", OPWEAVE_BACKEND_PATH="")
        assert [d.name for d in registry.devices()] == ["acme", "host"]


class TestBackendPath:
    def test_takes_folders_and_single_files(self, folder, tmp_path):
        write_distribution(tmp_path / "extra", "more")
        file = tmp_path / "loose.py"
        file.write_text(backend("[Unit('x'), Unit('y')]"))
        path = os.pathsep.join([str(tmp_path / "extra"), str(file)])
        registry = folder.registry(OPWEAVE_BACKEND_PATH=path)
        assert str(tmp_path / "extra") not in sys.path, "before anything is loaded"
        assert {d.name for d in registry.devices()} == {"more", "loose:x", "loose:y", "host"}
        assert by_name(registry.plugins())["loose"].value == str(file)
        assert sys.path[-1] == str(tmp_path / "extra"), "after what is installed"

    @pytest.mark.parametrize("what", ["missing", "missing.py", "empty"])
    def test_a_place_without_a_plugin_is_shown(self, folder, tmp_path, what):
        (tmp_path / "empty").mkdir()
        place = str(tmp_path / what)
        folder.add("missing")
        records = by_name(folder.registry(OPWEAVE_BACKEND_PATH=place).load_all())
        assert records[place].state is State.UNAVAILABLE
        assert place in records[place].error
        assert "OPWEAVE_BACKEND_PATH" in records[place].remedy
        assert records["missing"].state is State.READY
