"""Who keeps a name, what is seen when it was installed later, and plugins that are files or folders."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from opweave.errors import Broken, UnknownNameError
from opweave.registry import Registry, State
from tests.support.plugins_for_tests import PluginFolder, backend, by_name


@pytest.fixture
def folder(tmp_path):
    with PluginFolder(tmp_path / "site") as folder:
        folder.path.mkdir()
        yield folder


def states(registry: Registry) -> dict[str, State]:
    return {record.distribution or record.name: record.state for record in registry.plugins()}


class TestWhoKeepsAName:
    def test_the_distribution_that_is_called_like_it(self, folder):
        folder.add("acme")
        folder.add("squatter", "raise SystemExit('imported')", entry="ACME")
        registry = folder.registry()
        assert states(registry) == {
            "opweave-acme": State.DISCOVERED, "opweave-squatter": State.BROKEN, "opweave": State.READY,
        }  # fmt: skip
        assert registry.device("acme").name == "acme"
        record = next(r for r in registry.plugins() if r.distribution == "opweave-squatter")
        assert "opweave-squatter 1.0 and opweave-acme 1.0 both claim the name 'acme'" in record.error
        assert "opweave-acme keeps it" in record.error
        assert record.remedy == "uninstall or rename opweave-squatter"

    def test_also_of_several_and_if_it_was_installed_later(self, folder):
        folder.add("first", entry="acme")
        folder.add("second", entry="acme")
        registry = folder.registry()
        assert set(states(registry).values()) == {State.BROKEN, State.READY}
        folder.add("acme")
        assert by_name(registry.load_all())["acme"].distribution in ("opweave-acme", "opweave-first", "opweave-second")
        assert states(registry)["opweave-acme"] is State.READY

    def test_who_is_loaded_already_stays(self, folder):
        folder.add("squatter", entry="acme")
        registry = folder.registry()
        device = registry.device("acme")
        folder.add("acme")
        registry.load_all()
        assert states(registry)["opweave-acme"] is State.BROKEN
        assert registry.device("acme") is device

    def test_the_built_in_host_always_does(self, folder):
        folder.add("host", "raise SystemExit('imported')")
        registry = folder.registry()
        registry.load_all()
        assert states(registry) == {"opweave-host": State.BROKEN, "opweave": State.READY}


class TestInstalledSince:
    def test_is_seen_by_load_all(self, folder):
        folder.add("acme")
        registry = folder.registry()
        assert [d.name for d in registry.devices()] == ["acme", "host"]
        folder.add("later")
        assert by_name(registry.load_all())["later"].state is State.READY
        assert [d.name for d in registry.devices()] == ["acme", "later", "host"]

    def test_a_place_that_was_empty_is_looked_at_anew(self, folder, tmp_path):
        with PluginFolder(tmp_path / "later") as later:
            later.path.mkdir()
            registry = folder.registry(OPWEAVE_BACKEND_PATH=str(later.path))
            assert [r.state for r in registry.load_all()] == [State.UNAVAILABLE, State.READY]
            later.add("acme")
            assert [(r.name, r.state) for r in registry.load_all()] == [("acme", State.READY), ("host", State.READY)]

    @pytest.mark.parametrize("ask", [Registry.load, Registry.device, Registry.backend])
    def test_is_found_by_name(self, folder, ask):
        registry = folder.registry()
        registry.devices()
        with pytest.raises(UnknownNameError):
            ask(registry, "later")
        folder.add("later")
        assert ask(registry, "later").name == "later"


class TestFiles:
    def test_a_package_folder(self, folder, tmp_path):
        package = tmp_path / "acme_package"
        package.mkdir()
        (package / "__init__.py").write_text("from acme_package.parts import Acme\n")
        (package / "parts.py").write_text(backend())
        registry = folder.registry()
        try:
            record = registry.load(package)
            assert (record.name, record.state, record.value) == ("acme_package", State.READY, str(package))
            registry.unload("acme_package")
            (package / "parts.py").write_text(backend("[Unit(), Unit()]  # changed"))
            assert registry.load(str(package)).devices == ("acme_package:0", "acme_package:1"), "all of it anew"
        finally:
            for name in ("acme_package", "acme_package.parts"):
                sys.modules.pop(name, None)

    def test_a_package_of_a_name_that_another_has(self, folder, tmp_path):
        package = tmp_path / "json"
        package.mkdir()
        (package / "__init__.py").write_text(backend())
        with pytest.raises(Broken, match="'json' is the name of another module"):
            folder.registry().load(package)
        import json

        assert json.loads("[]") == []

    def test_a_folder_that_is_no_package(self, folder, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no __init__.py; load_all_from_path\(\) takes folders"):
            folder.registry().load(tmp_path)

    @pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
    def test_an_extension_module_is_called_like_its_file_without_the_suffix(self, folder, tmp_path):
        suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
        (tmp_path / "acme.c").write_text(
            '#include <Python.h>\nstatic PyModuleDef def = {PyModuleDef_HEAD_INIT, "acme", 0, 0, 0};\n'
            "PyMODINIT_FUNC PyInit_acme(void) { return PyModuleDef_Init(&def); }\n"
        )
        library = tmp_path / f"acme{suffix}"
        include = sysconfig.get_path("include")
        if not os.path.exists(os.path.join(include, "Python.h")):
            pytest.skip("no headers of Python")
        subprocess.run(
            ["cc", "-shared", "-fPIC", f"-I{include}", "-o", str(library), str(tmp_path / "acme.c")],
            check=True,
            timeout=60,
        )
        registry = folder.registry()
        with pytest.raises(Broken, match="no Backend class"):  # it was imported
            registry.load(library)
        assert by_name(registry.plugins())["acme"].value == str(library)

    def test_a_folder_of_plain_files_is_said_and_not_run(self, folder, tmp_path):
        loose = tmp_path / "loose"
        loose.mkdir()
        (loose / "acme.py").write_text("raise SystemExit('run')")
        (loose / "notes.txt").write_text("")
        (record,) = folder.registry().load_all_from_path(loose)
        assert record.state is State.UNAVAILABLE
        assert record.error == f"{loose} holds no distribution with a backend, only acme.py"
        assert str(loose / "acme.py") in record.remedy
        placed = by_name(folder.registry(OPWEAVE_BACKEND_PATH=str(loose)).load_all())[str(loose)]
        assert (placed.state, placed.error) == (record.state, record.error)


class TestOddArguments:
    @pytest.mark.parametrize("what", [5, None, b"cpu", 1.5, ["cpu"], object()])
    def test_names_that_are_no_texts(self, folder, what):
        registry = folder.registry()
        for ask in (registry.load, registry.backend, registry.open_device, registry.unload):
            with pytest.raises(UnknownNameError):
                ask(what)
        if what is not None:
            with pytest.raises(UnknownNameError, match="a name is a str"):
                registry.device(what)

    @pytest.mark.parametrize("what", [5, None, "cpu", object])
    def test_what_is_no_backend_and_no_device(self, folder, what):
        with pytest.raises(Broken, match=r"is no opweave\.Backend"):
            folder.registry().register(what)
        with pytest.raises(Broken, match=r"is no opweave\.Device"):
            folder.registry().register_device(what)

    def test_a_backend_name_that_is_no_text(self, folder):
        folder.add("acme", backend(attributes="name = 5"))
        registry = folder.registry()
        Acme = type(registry.backend("acme"))  # noqa: N806 - a class
        assert registry.backend("acme").name == "acme", "an only one is called like its plugin"
        with pytest.raises(Broken, match=r"Acme\.name is 5, not a str"):
            registry.register(Acme)

    @pytest.mark.parametrize("name", ["a\x1b[31mb", "\udc80", "a\u202eb"])
    def test_names_that_a_terminal_would_obey(self, folder, name):
        folder.add("acme", backend(f"[Unit({name!r}), Unit()]"))
        registry = folder.registry()
        with pytest.raises(Broken, match="control characters"):
            registry.load("acme")

    def test_excluded_plugins_give_the_reason_and_are_not_run(self, folder):
        folder.add("acme", "raise SystemExit('imported')")
        registry = folder.registry()
        registry.exclude("acme", Broken("it crashed"))
        assert by_name(registry.load_all())["acme"].error == "it crashed"
        with pytest.raises(Broken, match="it crashed"):
            registry.device("acme:0")
        registry.exclude("nobody", Broken("there is no such plugin"))
